"""What HeadStatistics adds to a forward pass, and what the same numbers cost otherwise."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.linalg import null_space, svdvals
from torch import Tensor

from attnlens import HeadStatistics, Lens, Observer
from attnlens.algebra.effective import effective_attention
from attnlens.attention import Recording
from attnlens.capture import Capture
from benchmarks.models import Inputs, bert, images, minilm, tokens, vit
from benchmarks.registry import Check, Comparison, Step, case, seconds

# BERT-base as published; fewer layers cost the same in relation to the forward pass.
LAYERS = int(os.environ.get("ATTNLENS_BENCHMARK_LAYERS", "12"))
SHAPES = [(32, 64), (8, 64), (1, 128), (16, 128), (1, 512), (4, 512), (64, 32), (2, 1024)]
# Batches under one lens, which finds W_O in the first of them.
BATCHES = 2


class Idle(Observer):
    """Sees every capture and does nothing with it."""

    def update(self, capture: Capture) -> None:
        """Look away."""

    def compute(self) -> None:
        """Nothing."""


@case("statistics")
def steps() -> Iterator[Step]:
    """HeadStatistics at BERT-base shape, batch 4 × 512, against the bare SDPA forward."""
    inputs = tokens(4, 512, padded=True)
    model, eager = bert(LAYERS), bert(LAYERS, implementation="eager")
    yield from _checks(model, inputs)

    bare, idle, null_fields, every, attentions = seconds(
        partial(_forward, model, inputs),
        partial(_looked, model, inputs, Idle()),
        partial(_looked, model, inputs, HeadStatistics(fields="null_space")),
        partial(_looked, model, inputs, HeadStatistics()),
        partial(_forward, eager, inputs, output_attentions=True),
    )
    setting = f"{LAYERS} layers, {BATCHES} batches of 4 × 512"
    for subject, value in (
        ("capture alone", idle),
        ("null-space fields", null_fields),
        ("every field", every),
        ("eager with output_attentions", attentions),
    ):
        yield Comparison(setting, subject, value, "bare SDPA forward", bare, ratio_is="cost")
    yield Comparison(
        setting,
        "null-space fields, forward included",
        null_fields,
        "eager forward with output_attentions",
        attentions,
        ratio_is="cost",
    )


@case("shapes", by_name=True)
def shape_steps() -> Iterator[Step]:
    """HeadStatistics at the shapes of common batches, in CPU time of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for batch, length in SHAPES:
            model = bert(LAYERS, positions=max(512, length))
            yield from _costs("BERT-base", model, tokens(batch, length, padded=True))
        yield from _costs("MiniLM", minilm(LAYERS), tokens(8, 128, padded=True))
        yield from _costs("ViT-base", vit(LAYERS), images(1))
    finally:
        torch.set_num_threads(threads)


def _costs(name: str, model: Any, inputs: Inputs) -> Iterator[Step]:
    """What the fields add to the forward pass of one batch."""
    setting = f"{name}, {LAYERS} layers, {' × '.join(map(str, next(iter(inputs.values())).shape))}"
    observers = {
        "null-space fields": HeadStatistics(fields="null_space"),
        "spectrum": HeadStatistics(fields="spectrum"),
        "every field": HeadStatistics(),
    }
    bare, *looked = seconds(
        partial(_forward, model, inputs),
        *(partial(_looked, model, inputs, observer) for observer in observers.values()),
        clock=time.process_time,
    )
    for subject, value in zip(observers, looked, strict=True):
        yield Comparison(setting, subject, value, "bare SDPA forward", bare, ratio_is="cost")


def _forward(model: Any, inputs: Inputs, **options: bool) -> None:
    with torch.no_grad():
        for _ in range(BATCHES):
            model(**inputs, **options)


def _looked(model: Any, inputs: Inputs, observer: Observer) -> None:
    with Lens(model, observer):
        _forward(model, inputs)


@case("null_space_fields")
def null_space_steps() -> Iterator[Step]:
    """Null-space fields of one layer `[2, 12, 512, 64]` against a scipy loop over its heads."""
    (capture,) = _captures(bert(1), tokens(2, 512))
    observer = HeadStatistics(fields="spectrum")
    observer.update(capture)
    ours = observer.compute()
    theirs = scipy_fields(capture)
    for name, reference in theirs.items():
        error = (getattr(ours, name)[0] - reference).abs() / reference.abs()
        yield Check(f"{name} against the scipy loop", float(error.max()), 1e-5)
    fast, loop = seconds(lambda: observer.update(capture), lambda: scipy_fields(capture), repeats=3)
    yield Comparison("n = 512", "null-space fields", fast, "scipy loop", loop)


def scipy_fields(capture: Capture) -> dict[str, Tensor]:
    """The textbook way: A, a null space per head, and the norms of what remains."""
    attention, value = capture.attention().double().numpy(), capture.value.double().numpy()
    weight = capture.projection
    assert weight is not None
    batch, heads, _, _, _ = capture.shape
    fields = {name: np.zeros((batch, heads)) for name in ("nullity", "effective_norm")}
    fields["output_norm"] = np.zeros((batch, heads))
    fields["condition"] = np.zeros((batch, heads))
    for example in range(batch):
        for head in range(heads):
            reached = value[example, head] @ weight[head].double().numpy()
            free = null_space(value[example, head].T)
            rows = attention[example, head]
            fields["nullity"][example, head] = free.shape[1]
            fields["effective_norm"][example, head] = np.linalg.norm(rows - rows @ free @ free.T)
            fields["output_norm"][example, head] = np.linalg.norm(rows @ reached)
            sigma = svdvals(reached)[: value.shape[-1]]
            fields["condition"][example, head] = sigma[0] / sigma[-1]
    return {name: torch.from_numpy(field.mean(0)) for name, field in fields.items()}


def _checks(model: Any, inputs: Inputs) -> Iterator[Step]:
    """Outputs unchanged, and statistics equal to those of dense matrices, on one layer."""
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        observer = HeadStatistics(layers=[0])
        with Lens(model, observer):
            looked = model(**inputs).last_hidden_state
    yield Check("outputs with a lens attached", float((plain - looked).abs().max()), 0.0)
    capture = _captures(model, inputs)[0]
    attention = capture.attention().double()
    effective = effective_attention(attention, capture.value.double(), capture.mask)
    real = capture.real_rows[..., None]
    raw_norm = (attention * real).flatten(2).norm(dim=-1).mean(0)
    norm = (effective * real).flatten(2).norm(dim=-1).mean(0)
    result = observer.compute()
    for name, dense in (("attention_norm", raw_norm), ("effective_norm", norm)):
        error = (getattr(result, name)[0] - dense).abs() / dense
        yield Check(f"{name} against dense matrices", float(error.max()), 1e-5)


def _captures(model: Any, inputs: Inputs) -> list[Capture]:
    recording = Recording(layers=[0])
    with Lens(model, recording), torch.no_grad():
        model(**inputs)
    return recording.compute()
