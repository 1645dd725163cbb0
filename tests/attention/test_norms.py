"""Norm-weighted attention, mixing with the residual stream and rollout against dense loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from attnlens import Lens, functional, record
from attnlens.attention import NormStatistics, Recording, ResidualMixing
from attnlens.errors import CaptureError, InputError
from attnlens.observer import Observer
from tests.algebra.test_hypothesis import Problem, problems
from tests.attention.test_statistics import FAMILIES, PADDED, PROBLEMS, PROJECTION, expected_masks
from tests.support import heads, models, reference
from tests.support.captures import synthetic_capture

NAMES = ("value_norm", "norm_weighted", "cancellation")


def dense_norms(
    attention: Tensor, value: Tensor, mask: Tensor | None, real: Tensor, projection: Tensor | None
) -> dict[str, Tensor]:
    """Means over rows of every example with a real one, then over these; loops."""
    dense = reference.dense_mask(mask, *attention.shape)
    parts: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    for example in range(len(attention)):
        if not real[example].any():
            continue
        for name in NAMES:
            parts[name].append([])
        for head in range(attention.shape[1]):
            values = reference.seen_values(value[example, head], head, projection)
            keys = dense[example, head][real[example]].any(0).numpy()
            written, ratios = [], []
            for row in real[example].nonzero()[:, 0].tolist():
                p = attention[example, head, row].double().numpy()[keys]
                norms = np.linalg.norm(values[keys], axis=1)
                written.append(p @ norms)
                ratios.append(np.linalg.norm(p @ values[keys]) / written[-1])
            found = (np.linalg.norm(values[keys], axis=1).mean(), np.mean(written), np.mean(ratios))
            for name, number in zip(NAMES, found, strict=True):
                parts[name][-1].append(float(number))
    return {n: torch.tensor(p, dtype=torch.float64).nanmean(0) for n, p in parts.items()}


def compare(result: Any, row: int, expected: dict[str, Tensor], bar: float) -> None:
    for name in NAMES:
        found = getattr(result, name)[row]
        torch.testing.assert_close(found, expected[name], rtol=bar, atol=bar, msg=name)


def streamed(observer: Observer, *captures: Any) -> Any:
    for capture in captures:
        observer.update(capture)
    return observer.compute()


def dense_attention(capture: Any, mask: Tensor | None) -> Tensor:
    bias = capture.masking.bias
    return reference.attention(capture.query, capture.key, mask, capture.scaling, bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_norms_equal_the_dense_computation(name: str, dtype: torch.dtype) -> None:
    settings, mask = PROBLEMS[name]
    capture = synthetic_capture(dtype=dtype, **{"projection": PROJECTION, **settings})
    own = capture.kind == "encoder" and mask is not None and mask.shape[0] == 3
    real = PADDED if own else torch.ones(3, capture.shape[2], dtype=torch.bool)
    attention = dense_attention(capture, mask)
    expected = dense_norms(attention, capture.value, mask, real, capture.projection)
    bar = 1e-10 if dtype == torch.float64 else 1e-5
    compare(streamed(NormStatistics(), capture), 0, expected, bar)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_equal_the_dense_computation(name: str) -> None:
    model, inputs = models.build(name, "eager"), models.inputs(name)
    statistics, recording = NormStatistics(), Recording()
    with Lens(model, statistics, recording, **FAMILIES[name]), torch.no_grad():
        model(**inputs)
    for capture, mask in zip(recording.captures, expected_masks(name, inputs), strict=True):
        real = torch.ones(2, capture.shape[2], dtype=torch.bool)
        if mask is not None and mask.shape[0] == 2:
            real = inputs["attention_mask"].bool()
        attention = dense_attention(capture, mask)
        expected = dense_norms(attention, capture.value, mask, real, capture.projection)
        compare(statistics.compute(), capture.layer, expected, 1e-5)


@given(problems())
def test_norms_of_tensors_stay_in_range(problem: Problem) -> None:
    found = functional.norm_statistics(problem.attention, problem.value, problem.mask)
    ratio = found["cancellation"]
    assert ((ratio >= 0) & (ratio <= 1) | ratio.isnan()).all()
    scaled = functional.norm_statistics(problem.attention, 3 * problem.value, problem.mask)
    torch.testing.assert_close(scaled["norm_weighted"], 3 * found["norm_weighted"], equal_nan=True)


@pytest.mark.parametrize("name", ["padding", "causal", "grouped heads"])
def test_maps_equal_the_vectors(name: str) -> None:
    settings, mask = PROBLEMS[name]
    capture = synthetic_capture(dtype=torch.float64, projection=PROJECTION.double(), **settings)
    attention, written = dense_attention(capture, mask), capture.projected_value()
    real = (capture.real_rows.expand(-1, 4, -1))[..., None]
    single = capture.norm_weighted_attention()
    expected = attention * written.norm(dim=-1)[:, :, None]
    torch.testing.assert_close(single * real, expected * real)
    vectors = torch.einsum("bhqk,bhkm->bqkm", attention, written)
    summed = capture.norm_weighted_attention(summed=True)
    torch.testing.assert_close(summed * real[:, 0], vectors.norm(dim=-1) * real[:, 0])
    blind = synthetic_capture()
    assert blind.norm_weighted_attention().shape == (3, 4, 26, 26)
    with pytest.raises(CaptureError, match="no per-head output projection"):
        blind.norm_weighted_attention(summed=True)


@pytest.mark.parametrize("observer", [NormStatistics, ResidualMixing])
def test_merged_halves_equal_one_run(observer: Any) -> None:
    model = models.build("bert")
    batches = [models.text_inputs((19, 6)), models.text_inputs((11, 4), seed=1)]
    whole, one, other = observer(), observer(), observer()
    with torch.no_grad():
        with Lens(model, whole):
            for batch in batches:
                model(**batch)
        for part, batch in zip((one, other), batches, strict=True):
            with Lens(model, part):
                model(**batch)
    merged = one.merge(other).compute()
    for name, values in whole.compute().tensors().items():
        torch.testing.assert_close(getattr(merged, name), values)


@pytest.mark.parametrize("name", ["bert", "modernbert", "t5", "vit", "gpt2", "eurobert"])
def test_mixing_splits_what_attention_adds(name: str) -> None:
    """What stays and what is mixed in, from eager maps and the hidden state before the layer."""
    model, inputs = heads.build(name, "eager"), heads.inputs(name)
    kinds: Any = {"kinds": "decoder"} if name == "gpt2" else {}
    mixing, recording = ResidualMixing(), Recording()
    with Lens(model, mixing, recording, **kinds), torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    mask = inputs.get("attention_mask", torch.ones(hidden[0].shape[:2])).bool()
    for layer, capture in enumerate(recording.compute()):
        written, attention = capture.projected_value().double(), capture.attention().double()
        ratios = []
        for example, real in enumerate(mask):
            for i in real.nonzero()[:, 0].tolist():
                own = (attention[example, :, i, i, None] * written[example, :, i]).sum(0)
                every = torch.einsum("hk,hkm->m", attention[example, :, i], written[example])
                stays = (hidden[layer][example, i].double() + own).norm()
                ratios.append((example, ((every - own).norm() / ((every - own).norm() + stays))))
        means = [
            torch.stack([r for e, r in ratios if e == example]).mean()
            for example in range(len(mask))
        ]
        found = mixing.compute().mixing_ratio[layer]
        torch.testing.assert_close(found, torch.stack(means).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prepare", ["bfloat16", "train"])
def test_low_precision_and_dropout_are_recomputed(prepare: str) -> None:
    model, inputs = models.build("bert"), models.inputs("bert")
    model.to(torch.bfloat16) if prepare == "bfloat16" else model.train()
    statistics, mixing, recording = NormStatistics(), ResidualMixing(), Recording()
    with Lens(model, statistics, mixing, recording):
        model(**inputs)
    assert ((mixing.compute().mixing_ratio > 0) & (mixing.compute().mixing_ratio < 1)).all()
    for capture in recording.captures:
        real = inputs["attention_mask"].bool()
        attention = dense_attention(capture, real[:, None, None])
        mask = real[:, None, None]
        expected = dense_norms(attention, capture.value, mask, real, capture.projection)
        compare(statistics.compute(), capture.layer, expected, 1e-5)


def test_rollout_multiplies_the_layers(generator: torch.Generator) -> None:
    maps = [torch.rand(2, 3, 5, 5, generator=generator).softmax(-1) for _ in range(4)]
    found = functional.rollout(maps, 0.3)
    expected = torch.eye(5).expand(2, -1, -1)
    for layer, attention in enumerate(maps):
        expected = (0.3 * torch.eye(5) + 0.7 * attention.mean(1)) @ expected
        torch.testing.assert_close(found[:, layer], expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 5))
    weighted = [3 * layer for layer in maps]
    torch.testing.assert_close(functional.rollout(weighted, 0.3, normalise=True), found)
    (capture, _) = record(models.build("bert"), **models.text_inputs((7,)))
    assert functional.rollout([capture.effective_attention()]).shape == (1, 1, 7, 7)
    for wrong, message in (([], "one shape"), ([maps[0][..., :3]], "square"), (maps, "residual")):
        with pytest.raises(InputError, match=message):
            functional.rollout(wrong, 1.5 if message == "residual" else 0.5)
