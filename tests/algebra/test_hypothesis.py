"""Properties over random sizes, masks and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from attnlens import HeadStatistics
from attnlens.algebra.effective import effective_attention, value_basis
from attnlens.algebra.supports import support_of
from tests.support import reference
from tests.support.captures import dense_statistics, synthetic_capture

MASKS = ("none", "padding", "causal", "window", "blocks", "random", "random by head")


@dataclass(frozen=True)
class Problem:
    """Attention, values and a mask, all float64."""

    attention: Tensor
    value: Tensor
    mask: Tensor | None

    @property
    def dense(self) -> Tensor:
        return reference.dense_mask(self.mask, *self.attention.shape)

    @property
    def bar(self) -> float:
        """The accuracy bar, times how far the worst support amplifies rounding."""
        worst = 1.0
        for index in np.ndindex(*self.attention.shape[:2]):
            for _, keys in reference.supports(self.dense[index]):
                values = self.value[index].numpy()[keys]
                if values.any():
                    worst = max(worst, reference.condition(values, self.rtol))
        return 1e-13 * max(10.0, worst)

    @property
    def rtol(self) -> float:
        return max(self.value.shape[-2:]) * reference.EPS


def draw_mask(kind: str, batch: int, heads: int, tokens: int, seed: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(tokens)

    def integer(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    padding = (position < integer(tokens + 1, batch, 1))[:, None, None]
    if kind == "none":
        return None
    if kind == "padding":
        return padding
    if kind == "causal":
        return padding & (position <= position[:, None])
    if kind == "window":
        return padding & ((position[:, None] - position).abs() <= integer(tokens, 1))
    if kind == "blocks":
        segment = integer(2, batch, 1, tokens).cumsum(-1)
        return padding & (segment[..., None] == segment[..., None, :])
    count = heads if kind == "random by head" else 1
    share = torch.rand((), generator=generator)
    return torch.rand(batch, count, tokens, tokens, generator=generator) < share


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tokens, width = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    rank = draw(st.integers(0, width))
    distinct = draw(st.integers(1, tokens))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    vectors = normal(batch, heads, distinct, rank) @ normal(heads, rank, width)
    value = vectors[:, :, torch.randint(0, distinct, (tokens,), generator=generator)]
    mask = draw_mask(draw(st.sampled_from(MASKS)), batch, heads, tokens, seed)
    dense = reference.dense_mask(mask, batch, heads, tokens, tokens)
    logits = normal(batch, heads, tokens, tokens).masked_fill(~dense, -torch.inf)
    return Problem(logits.softmax(-1).nan_to_num(0.0), value, mask)


@given(problems(), st.booleans())
def test_effective_attention_equals_the_loop(problem: Problem, simplex: bool) -> None:
    arguments = (problem.attention, problem.value, problem.mask)
    found = effective_attention(*arguments, simplex=simplex)
    expected = reference.effective_attention(*arguments, simplex=simplex)
    bar = problem.bar * (10 if simplex else 1)  # the constant column changes the condition
    assert reference.relative_errors(found, expected).max() <= bar
    assert (found[~problem.dense] == 0).all()
    if simplex:
        assert (found.sum(-1) - problem.attention.sum(-1)).abs().max() <= bar


@given(problems())
def test_projection_laws(problem: Problem) -> None:
    attention, value, bar = problem.attention, problem.value, problem.bar
    effective = effective_attention(attention, value, problem.mask)
    scale = value.square().sum((-2, -1), keepdim=True).sqrt() + 1
    assert ((effective - attention) @ value / scale).abs().max() <= bar
    again = effective_attention(effective, value, problem.mask)
    assert reference.relative_errors(again, effective).max() <= bar
    square = effective.square().sum((-2, -1))
    assert ((attention * effective).sum((-2, -1)) - square).abs().max() <= bar * attention.numel()
    assert (square <= attention.square().sum((-2, -1)) + bar).all()


@given(problems())
def test_rank_and_nullity(problem: Problem) -> None:
    basis = value_basis(problem.value, problem.mask)
    queries = problem.attention.shape[2]
    expected = reference.ranks(problem.value, problem.mask, queries)
    rank, nullity = (t if t.dim() == 3 else t[..., None] for t in (basis.rank, basis.nullity))
    assert torch.equal(rank.expand_as(expected), expected)
    sizes = problem.dense.sum(-1)
    assert torch.equal(nullity.expand_as(sizes), sizes - expected)


@given(st.sampled_from(MASKS), st.integers(1, 3), st.integers(1, 25), st.integers(0, 2**31))
def test_support_is_the_mask(kind: str, batch: int, tokens: int, seed: int) -> None:
    mask = draw_mask(kind, batch, 2, tokens, seed)
    support = support_of(mask, batch, tokens, tokens)
    dense = reference.dense_mask(mask, batch, support.keys.shape[1], tokens, tokens)
    assert torch.equal(support.mask(0, tokens).expand_as(dense), dense)
    assert torch.equal(support.sizes.expand(dense.shape[:3]), dense.sum(-1))
    assert torch.equal(support.keys, dense.any(-2))
    causal = support_of(mask, batch, tokens, tokens, causal=True)
    lower = dense & dense.new_ones(tokens, tokens).tril()
    assert torch.equal(causal.mask(0, tokens).expand_as(lower), lower)


@example("window", 2, 7, 3)
@given(st.sampled_from(MASKS), st.sampled_from([1, 2]), st.integers(2, 12), st.integers(0, 2**31))
def test_statistics_equal_the_dense_computation(
    kind: str, groups: int, width: int, seed: int
) -> None:
    batch, tokens = 2, 14
    mask = draw_mask(kind, batch, 2, tokens, seed)
    capture = synthetic_capture(
        batch=batch, heads=2, groups=groups, queries=tokens, keys=tokens, width=width,
        mask=mask, dtype=torch.float64, seed=seed,
    )  # fmt: skip
    dense = reference.dense_mask(mask, batch, 2, tokens, tokens)
    real = capture.real_rows.expand(batch, 2, tokens)
    observer = HeadStatistics()
    observer.update(capture)
    result = observer.compute()
    own = dense.any(-2) & dense.any(-1)  # a token is real when it is a key, and sees one
    assert torch.equal(real, own.expand_as(real))
    if not torch.equal(real[:, 0], real[:, 1]) or not real.any():
        return  # the twin takes one set of rows for all heads
    expected = dense_statistics(capture, mask, real[:, 0])
    rounding = 1e-12 * expected["condition"].max().item() ** 2
    for name, values in expected.items():
        torch.testing.assert_close(
            result.tensors()[name][0], values, rtol=1e-8 + rounding, atol=1e-8 + rounding,
            msg=lambda text, name=name: f"{name}: {text}", equal_nan=True,
        )  # fmt: skip
