"""The simplest distribution with the same output against the enumeration of all supports."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlens import Lens, functional, record
from attnlens.attention import MinimalDistribution, Recording
from tests.algebra.test_hypothesis import MASKS, draw_mask
from tests.attention.test_statistics import FAMILIES, PADDED, PROBLEMS, PROJECTION
from tests.support import heads, reference
from tests.support.captures import synthetic_capture


def by_enumeration(row: Any, values: Any) -> Any:
    """Least norm over all supports on which it is ≥ 0: exact, and exponential in the keys."""
    conditions = np.column_stack([values, np.ones(len(row))])
    target = row @ conditions
    best, least = row, row @ row
    for size in range(1, len(row) + 1):
        for support in map(list, combinations(range(len(row)), size)):
            some = np.linalg.pinv(conditions[support].T, rcond=1e-9) @ target
            fits = np.linalg.norm(some @ conditions[support] - target) <= 1e-9
            if fits and (some >= -1e-11).all() and some @ some < least:
                best, least = np.zeros(len(row)), some @ some
                best[support] = some
    return best


@st.composite
def short_problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    tokens, width = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    seed, sharpness = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.1, 1.0, 6.0]))
    generator = torch.Generator().manual_seed(seed)
    distinct = draw(st.integers(1, tokens))
    vectors = torch.randn(1, 2, distinct, width, dtype=torch.float64, generator=generator)
    value = vectors[:, :, torch.randint(0, distinct, (tokens,), generator=generator)]
    mask = draw_mask(draw(st.sampled_from(MASKS)), 1, 2, tokens, seed)
    dense = reference.dense_mask(mask, 1, 2, tokens, tokens)
    logits = torch.randn(1, 2, tokens, tokens, dtype=torch.float64, generator=generator)
    logits = (sharpness * logits).masked_fill(~dense, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0), value, mask


@given(short_problems())
def test_the_solution_equals_the_enumeration(problem: tuple[Tensor, Tensor, Any]) -> None:
    attention, value, mask = problem
    found = functional.minimal_distribution(attention, value, mask)
    dense = reference.dense_mask(mask, *attention.shape)
    assert found.converged.all()
    assert (found.distribution >= 0).all() and (found.distribution[~dense] == 0).all()
    for head, row in np.ndindex(*attention.shape[1:3]):
        if not found.distribution[0, head, row].any():
            continue  # a row that does not count
        keys = dense[0, head, row].numpy()
        given, values = (t.numpy() for t in (attention[0, head, row], value[0, head]))
        expected = by_enumeration(given[keys], values[keys])
        x = found.distribution[0, head, row].numpy()[keys]
        assert np.linalg.norm(x - expected) <= 1e-5 * np.linalg.norm(expected)
        assert x @ x <= expected @ expected * (1 + 1e-9)


@pytest.mark.parametrize("name", PROBLEMS)
def test_certificates_of_every_mask(name: str) -> None:
    settings, _ = PROBLEMS[name]
    capture = synthetic_capture(dtype=torch.float64, **{"projection": PROJECTION, **settings})
    found = capture.minimal_distribution()
    rows = capture.real_rows.expand(-1, 4, -1)
    attention = torch.where(rows[..., None], capture.attention(), 0.0)
    assert found.converged.all() and (found.distribution >= 0).all()
    assert found.residual.max() <= 1e-9 and found.gap.max() <= 1e-9
    values = capture.value
    if capture.projection is not None:
        values = values @ capture.projection.double()
    scale = (attention @ values).norm()
    assert ((found.distribution - attention) @ values).norm() <= 1e-8 * scale
    torch.testing.assert_close(found.distribution.sum(-1), attention.sum(-1))
    assert (found.distribution.norm(dim=-1) <= attention.norm(dim=-1) * (1 + 1e-9)).all()
    single = found.unique
    torch.testing.assert_close(
        found.distribution[single], attention[single], rtol=1e-12, atol=1e-14
    )
    seen = capture.support.mask().expand_as(attention)
    assert (found.distribution[~seen] == 0).all()


def test_a_family_of_one_is_attention_itself() -> None:
    capture = synthetic_capture(dtype=torch.float64, queries=8, keys=8, width=8)
    found = capture.minimal_distribution()
    assert found.unique.all()
    torch.testing.assert_close(found.distribution, capture.attention(), rtol=1e-12, atol=1e-14)
    one = synthetic_capture(dtype=torch.float64, queries=1, keys=1).minimal_distribution()
    assert one.unique.all() and (one.distribution == 1).all()


@pytest.mark.parametrize("tokens", [40, 80])
def test_every_row_of_the_demo_encoder_converges(minilm: Any, tokens: int) -> None:
    text = " ".join(["Each scout returns and dances; the ferry waits."] * 9)
    batch = minilm.tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt")
    for capture in record(minilm.model, **batch)[:2]:
        found = capture.minimal_distribution()
        assert found.distribution.shape[-1] == tokens
        assert found.converged.all() and found.residual.max() <= 1e-9


@pytest.mark.parametrize("name", [*FAMILIES, "gpt2"])
def test_statistics_are_those_of_the_maps(name: str) -> None:
    model, inputs = heads.build(name), heads.inputs(name)
    kinds: Any = {"kinds": "decoder"} if name == "gpt2" else FAMILIES[name]
    observer, recording = MinimalDistribution(), Recording()
    with Lens(model, observer, recording, **kinds), torch.no_grad():
        model(**inputs)
    result = observer.compute()
    for row, capture in enumerate(recording.compute()):
        maps, active = capture.minimal_distribution(), capture.real_rows
        x, a = maps.distribution, torch.where(active[..., None], capture.attention().double(), 0)
        active = active.expand(x.shape[:3]).double()
        share = x.square().sum((-1, -2)) / a.square().sum((-1, -2))
        variation = (x - a).abs().sum((-1, -2)) / 2 / active.sum(-1)
        torch.testing.assert_close(result.share[row], share.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            result.total_variation[row], variation.mean(0), rtol=1e-5, atol=1e-6
        )
        assert (result.unconverged == 0).all()


def test_streaming_merging_and_what_is_not_finite() -> None:
    first = synthetic_capture(projection=PROJECTION, mask=PADDED[:, None, None])
    second = synthetic_capture(seed=1)
    first.grouped_value[1, 2, 3] = torch.nan
    one, other, whole = MinimalDistribution(), MinimalDistribution(), MinimalDistribution()
    for observer, captures in ((one, [first]), (other, [second]), (whole, [first, second])):
        for capture in captures:
            observer.update(capture)
    with pytest.warns(UserWarning, match=r"1 example\(s\) held NaN"):
        expected = whole.compute()
    assert expected.skipped.tolist() == [[0, 0, 1, 0]]
    with pytest.warns(UserWarning):
        merged = one.merge(other).compute()
    for name, values in expected.tensors().items():
        torch.testing.assert_close(getattr(merged, name), values)
    assert first.minimal_distribution().distribution[1, 2].isnan().all()
