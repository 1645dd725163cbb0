"""Train with two processes of gloo; run as a module with the folder to write to."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

from attnlens import LensCallback, monitor
from tests.support.finetuning import (
    NO_DROPOUT,
    Sentences,
    classifier,
    every_observer,
    scalars,
    trainer,
)


def work(rank: int, folder: Path, port: int) -> None:
    """Train on every other sentence, and say what was seen."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    callback = LensCallback(every_observer(), every_n_steps=1, keep="all")
    run = trainer(
        folder / "run",
        callback,
        model=classifier(**NO_DROPOUT),
        learning_rate=0.0,
        ddp_backend="gloo",
    )
    run.model_accepts_loss_kwargs = False  # else the Trainer scales losses that it thinks are sums
    run.train()
    assert isinstance(run.model_wrapped, DistributedDataParallel)

    model = DistributedDataParallel(classifier(**NO_DROPOUT))
    with monitor(model, every=1) as heads:
        model(**Sentences().batch(*range(rank, 8, 2))).loss.backward()
        monitored = heads.scalars(sync=True)
    logs = {"trainer": scalars(run), "monitor": monitored}
    (folder / f"rank{rank}.json").write_text(json.dumps(logs))
    saved = folder / f"rank{rank}"
    saved.mkdir()
    torch.distributed.destroy_process_group()
    callback.save(saved)  # the totals of this process, which are those of both


def main() -> None:
    """Fork, so that torch is imported once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.start_processes(work, (Path(sys.argv[1]), port), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
