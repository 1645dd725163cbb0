"""What following the heads through a training costs."""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from attnlens import HeadImportance, HeadStatistics, LensCallback
from benchmarks.registry import Check, Comparison, Step, case

EVERY = 10
# A small sentence encoder: 6 layers, 12 heads of width 32.
SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 8000,
}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 500,
}
OBSERVERS: dict[str, Callable[[], list[Any]]] = {
    "HeadStatistics": lambda: [HeadStatistics()],
    "HeadStatistics and HeadImportance": lambda: [HeadStatistics(), HeadImportance()],
}


@case("training")
def steps() -> Iterator[Step]:
    """A Trainer with LensCallback(every_n_steps=10) against the same without: time, memory."""
    bare, *followed = [_train(SHAPE, 2 * EVERY, *callbacks) for callbacks in _ways()]
    for name, run in zip(OBSERVERS, followed, strict=True):
        yield Check(f"losses, {name} against none", _distance(bare.losses, run.losses), 0.0)
        yield Check(f"weights, {name} against none", _distance(bare.weights, run.weights), 0.0)
    for name, callbacks in zip(OBSERVERS, _ways()[1:], strict=True):
        # Within one run, so that a slow moment of the machine hits both kinds of step.
        seconds = _train(SHAPE, 6 * EVERY, *callbacks).seconds
        looked = median(seconds[EVERY::EVERY])
        others = median(second for step, second in enumerate(seconds) if step % EVERY)
        yield Comparison(
            f"batch 8 × 64, every {EVERY} steps",
            f"mean training step with {name}",
            (looked + (EVERY - 1) * others) / EVERY,
            "step not looked at",
            others,
            ratio_is="cost",
        )
    yield from _memory()


def _memory() -> Iterator[Step]:
    """Tensors and resident memory after 500 steps, all looked at, against after 100."""
    watch = Watch((100, 500))
    callback = LensCallback([HeadStatistics(), HeadImportance()], every_n_steps=1)
    _train(TINY, 500, callback, watch, batch=4, tokens=24)
    (tensors, before), (later, after) = watch.seen
    yield Check("tensors alive after 500 steps against after 100", abs(later - tensors), 0.0)
    yield Comparison(
        "500 steps, every one looked at", "peak memory", after, "after 100", before, "KiB", "cost"
    )


class Run(TrainerCallback):
    """What a training was like.

    Attributes:
        seconds: of every step.
        losses: `[steps]`.
        weights: all of them, in a row.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses = self.weights = torch.empty(0)
        self._began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._began)


class Watch(TrainerCallback):
    """Count tensors and peak memory at some steps."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self.seen: list[tuple[int, int]] = []
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count."""
        if state.global_step in self._at:
            gc.collect()
            alive = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
            self.seen.append((alive, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


class Texts(Dataset[dict[str, Tensor]]):
    """Random token ids in two classes."""

    def __init__(self, count: int, tokens: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, vocabulary, (count, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": ids > 0, "labels": ids[0] % 2}


def _ways() -> list[list[TrainerCallback]]:
    """No callback, then one for each choice of observers."""
    made = [LensCallback(make(), every_n_steps=EVERY) for make in OBSERVERS.values()]
    return [[], *([callback] for callback in made)]


def _train(
    shape: dict[str, int],
    count: int,
    *callbacks: TrainerCallback,
    batch: int = 8,
    tokens: int = 64,
) -> Run:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**shape))
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=count,
            per_device_train_batch_size=batch,
            logging_steps=EVERY,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        data = Texts(batch * min(count, 32), tokens, shape["vocab_size"])
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[run, *callbacks])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    run.losses = torch.tensor(losses, dtype=torch.float64)
    run.weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    return run


def _distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()
