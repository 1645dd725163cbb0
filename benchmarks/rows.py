"""Statistics of masks that differ by row: causal, grouped, sliding-window and packed."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2Model,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3Model,
)

from attnlens import HeadStatistics, Lens
from attnlens.algebra.problem import problem
from attnlens.algebra.rowwise import RowFactor
from attnlens.attention import Recording
from attnlens.capture import Capture
from benchmarks.registry import Check, Comparison, Step, case

# Lengths that are measured; up to 8192 takes half an hour on two cores.
LENGTHS = tuple(map(int, os.environ.get("ATTNLENS_BENCHMARK_LENGTHS", "256,1024").split(",")))
_VOCABULARY = 64
_TOKENS: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}


def gpt2(length: int) -> Any:
    """GPT-2's shape, two layers."""
    return GPT2Model(GPT2Config(n_layer=2, n_positions=length, vocab_size=_VOCABULARY, **_SDPA))


def qwen3(length: int) -> Any:
    """The shape of Qwen3-0.6B, two layers: 16 query heads, 8 value heads, D = 128."""
    return Qwen3Model(
        Qwen3Config(
            num_hidden_layers=2,
            hidden_size=1024,
            intermediate_size=3072,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=length,
            **_TOKENS,
            **_SDPA,
        )
    )


def wide(length: int) -> Any:
    """The shape of Gemma 2 2B, D = 256 and grouped values, in the layers of Qwen3."""
    return Qwen3Model(
        Qwen3Config(
            num_hidden_layers=2,
            hidden_size=2304,
            intermediate_size=9216,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=length,
            **_TOKENS,
            **_SDPA,
        )
    )


def modernbert(length: int) -> Any:
    """ModernBERT-base, one global and two local layers."""
    return ModernBertModel(
        ModernBertConfig(num_hidden_layers=3, max_position_embeddings=length, **_TOKENS, **_SDPA)
    )


MODELS: dict[str, Callable[[int], Any]] = {
    "GPT-2": gpt2,
    "Qwen3-0.6B": qwen3,
    "Gemma-like, D = 256": wide,
    "ModernBERT": modernbert,
}


@case("rows")
def steps() -> Iterator[Step]:
    """HeadStatistics of causal, grouped, sliding and packed masks against the bare SDPA forward."""
    for name, make in MODELS.items():
        yield from _measured(name, make)
    yield from _measured("packed GPT-2, documents of 100 to 300", gpt2, packed=True)


def _measured(name: str, make: Callable[[int], Any], packed: bool = False) -> Iterator[Step]:
    """Check one layer against single rows, then compare CPU time and memory at every length."""
    torch.manual_seed(0)
    forward = Forward(make(256), 256, packed)
    for capture in _captures(forward):
        yield from _checks(name, capture)
    taken: dict[str, list[float]] = {"null-space fields": [], "every field": [], "bare": []}
    for length in LENGTHS:
        forward = Forward(make(length), length, packed)
        runs: dict[str, Callable[[], None]] = {
            "bare": forward,
            "null-space fields": _looked(forward, HeadStatistics(fields="null_space")),
            "every field": _looked(forward, HeadStatistics()),
        }
        before = _peak()
        runs["bare"]()
        bare_memory = max(_peak() - before, 1)
        for subject, value in _cpu_seconds(runs).items():
            taken[subject].append(value)
        extra = max(_peak() - before - bare_memory, 4096)  # a page, if none
        for subject in ("null-space fields", "every field"):
            yield Comparison(
                f"{name}, n = {length}",
                f"forward with {subject}",
                taken[subject][-1],
                "bare SDPA forward",
                taken["bare"][-1],
                "s of CPU",
                "cost",
            )
        dense = 4 * _heads(forward.model) * length**2
        yield Comparison(
            f"{name}, n = {length}",
            "memory beside the forward",
            extra / 2**20,
            "dense attention of a layer",
            dense / 2**20,
            "MiB",
            "cost",
        )
    if len(LENGTHS) > 1:
        first, last = LENGTHS[0], LENGTHS[-1]
        growth = {
            subject: math.log(values[-1] / values[0]) / math.log(last / first)
            for subject, values in taken.items()
        }
        yield Comparison(
            f"{name}, n = {first} to {last}",
            "growth exponent with null-space fields",
            growth["null-space fields"],
            "of the bare forward",
            growth["bare"],
            "",
            "cost",
        )


class Forward:
    """A forward pass of random embeddings, no two alike."""

    def __init__(self, model: Any, length: int, packed: bool) -> None:
        self.model = model.eval()
        hidden = model.config.hidden_size
        self.inputs: dict[str, Any] = {"inputs_embeds": torch.randn(1, length, hidden)}
        if not isinstance(model, ModernBertModel):
            self.inputs["use_cache"] = False
        if packed:
            generator = torch.Generator().manual_seed(0)
            sizes = torch.randint(100, 301, (length // 100 + 1,), generator=generator)
            document = torch.arange(len(sizes)).repeat_interleave(sizes)[:length]
            same = document[:, None] == document
            self.inputs["attention_mask"] = (same & same.new_ones(same.shape).tril())[None, None]

    def __call__(self) -> None:
        """Run it."""
        with torch.no_grad():
            self.model(**self.inputs)


def _looked(forward: Forward, observer: HeadStatistics) -> Callable[[], None]:
    def run() -> None:
        with Lens(forward.model, observer):
            forward()

    return run


def _captures(forward: Forward) -> list[Capture]:
    recording = Recording(layers=[0, 1])
    with Lens(forward.model, recording):
        forward()
    captures: list[Capture] = recording.compute()
    return captures


def _checks(name: str, capture: Capture) -> Iterator[Step]:
    """Norms and ranks against a factor for every row."""
    observer = HeadStatistics(fields="null_space")
    observer.update(capture)
    result = observer.compute()
    attention = capture.attention().double()
    factor = problem(capture).factor
    assert isinstance(factor, RowFactor)
    squares = torch.zeros(attention.shape[:3], dtype=torch.float64)
    rank = torch.zeros(attention.shape[:3], dtype=torch.int64)
    for chunk in factor.groups():
        rows = chunk.take(attention[..., chunk.span])
        context = rows @ chunk.values[:, None]
        chunk.scatter(squares, torch.linalg.vecdot(context, chunk.refined(context)))
        chunk.scatter(rank, chunk.row_rank[:, None])
    norm = squares.sum(-1).sqrt()[0]
    error = (result.effective_norm[0] - norm).abs() / norm
    setting = f"{name}, layer {capture.layer}"
    yield Check(f"{setting}: ‖A⊥‖ against single rows", float(error.max()), 1e-5)
    apart = (result.rank[0] - rank.double().mean(-1)[0]).abs().max()
    yield Check(f"{setting}: ranks against single rows", float(apart), 1e-9)


def _cpu_seconds(runs: dict[str, Callable[[], None]], repeats: int = 3) -> dict[str, float]:
    """CPU time of each, alternating: the median."""
    taken: dict[str, list[float]] = {subject: [] for subject in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for subject, run in runs.items():
            start = time.process_time()
            run()
            taken[subject].append(time.process_time() - start)
    return {subject: median(values) for subject, values in taken.items()}


def _peak() -> int:
    """The most memory that the process has held, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _heads(model: Any) -> int:
    return int(model.config.num_attention_heads)
