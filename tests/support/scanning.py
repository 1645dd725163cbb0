"""A small model, a corpus and observers to scan it with; run as a module, processes of a scan.

`python -m tests.support.scanning slow OUT` scans so slowly that it can be killed before it ends.
`ranks OUT` scans with two processes of gloo, one of which is killed on its way, and with two more,
which finish it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from transformers import AutoTokenizer, BertConfig, BertModel

import attnlens
from attnlens import HeadStatistics, HiddenTokenAttribution, Observer, TokenIdentifiability
from attnlens.corpus import Scan
from attnlens.demo import model_folder
from attnlens.files import load_state

WORDS = "river stone paper window garden letter engine winter candle market bridge teacher".split()
COUNT = 64
SETTINGS: dict[str, Any] = {"chunk": 8, "batch_size": 4, "batch_tokens": 40}


def texts(count: int = COUNT, seed: int = 0) -> list[str]:
    """Texts of one to twelve words."""
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(WORDS[i] for i in torch.randint(12, (1 + 5 * n % 12,), generator=generator))
        for n in range(count)
    ]


def model(seed: int = 0) -> BertModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=30522,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=20,
            max_position_embeddings=32,
            initializer_range=0.3,
        )
        return BertModel(config).eval()


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_folder())


def observers() -> list[Observer]:
    attribution = HiddenTokenAttribution(2, layers=[0])
    return [HeadStatistics(), attribution, TokenIdentifiability("linear", "l2")]


def scan(corpus: Any, looking: Any = None, **settings: Any) -> Scan:
    looking = observers() if looking is None else looking
    return attnlens.scan(model(), tokenizer(), corpus, looking, **(SETTINGS | settings))


def slowly(items: list[str], pause: float = 0.05, last: float = 0.05) -> Iterator[str]:
    """The items, with pauses before each, in seconds, and before the last."""
    for place, item in enumerate(items):
        time.sleep(last if place == len(items) - 1 else pause)
        yield item


def dying(items: list[str], at: int) -> Iterator[str]:
    """The items, until this process is killed."""
    for place, item in enumerate(items):
        if place == at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item


def work(rank: int, out: Path, port: int, die: bool) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    corpus: Any = texts()
    if die:  # while the other process still reads, however busy the machine is
        corpus = dying(texts(), 45) if rank == 1 else slowly(texts(), pause=0.0, last=1800)
    found = scan(corpus, out=out, checkpoint_every=0.0)
    assert found.shard.complete and bool(found.results) == (rank == 0)
    # Every process has the whole result, not only the one that writes.
    assert found.counts.records == COUNT
    assert found.observers[0].compute().examples.eq(COUNT).all()
    assert not torch.distributed.is_initialized()


def main() -> None:
    torch.set_num_threads(1)
    what, out = sys.argv[1], Path(sys.argv[2])
    if what == "slow":
        scan(slowly(texts(), last=1800), out=out, checkpoint_every=0.0)
        return
    try:
        ranks(out, die=True)
    except processes.ProcessExitedException as killed:
        assert killed.signal_name == "SIGKILL"
    except processes.ProcessRaisedException as lost:
        assert lost.error_index == 0  # it may be told first that the other is gone
    left = [load_state(path)[1] for path in out.glob("*.safetensors")]
    # The other may have finished its half by then, or not.
    assert [state for state in left if state["shard"][0] == 1 and not state["finished"]], left
    ranks(out, die=False)


def ranks(out: Path, die: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Fork, so that torch is imported once.
    processes.start_processes(work, (out, port, die), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
