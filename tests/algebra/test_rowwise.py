"""Masks that differ by row: causal, sliding window, packed, arbitrary; against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnlens.algebra import rowwise
from attnlens.algebra.effective import effective_attention, value_basis
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.supports import support_of
from attnlens.errors import InputError, NonFiniteError
from tests.algebra.test_nullspace import (
    BATCH,
    HEADS,
    ill_conditioned_values,
    random_attention,
    random_values,
)
from tests.support import reference
from tests.support.reference import BARS

TOKENS, WIDTH = 30, 8


def window(tokens: int, reach: int) -> Tensor:
    position = torch.arange(tokens)
    return (position[:, None] - position).abs() <= reach


def random_mask(*shape: int, share: float = 0.5) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(7)) < share


PADDING = (torch.arange(TOKENS) < torch.tensor([TOKENS, 17])[:, None])[:, None, None]
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
BLOCKS = torch.block_diag(*(torch.ones(size, size) for size in (4, 15, 1, 10))).bool()[None, None]
HOLES = PADDING & (torch.arange(TOKENS) % 5 != 2)
EMPTY_ROWS = random_mask(BATCH, 1, TOKENS, TOKENS)
EMPTY_ROWS[:, :, ::7] = False
MASKS = {
    "causal": CAUSAL,
    "causal with padding": CAUSAL & PADDING,
    "causal with padding on the left": CAUSAL & PADDING.flip(-1),
    "window": window(TOKENS, 4)[None, None],
    "window with padding": window(TOKENS, 6) & PADDING,
    "window with holes": window(TOKENS, 6) & HOLES,
    "causal window": window(TOKENS, 11)[None, None] & CAUSAL,
    "blocks": BLOCKS,
    "blocks with padding": BLOCKS & PADDING,
    "random": random_mask(BATCH, 1, TOKENS, TOKENS),
    "random, one for each head": random_mask(BATCH, HEADS, TOKENS, TOKENS),
    "window, one for each head": torch.stack([window(TOKENS, r) for r in (2, 9, 30)])[None],
    "sparse": random_mask(BATCH, 1, TOKENS, TOKENS, share=0.1),
    "empty rows": EMPTY_ROWS,
    "more keys than queries": random_mask(BATCH, 1, 11, TOKENS),
    "window with more queries": window(TOKENS, 5)[:, :13][None, None],
}
NAMES = list(MASKS)


def problem(mask: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    queries, keys = mask.shape[-2:]
    attention = random_attention(queries, keys, mask)
    return attention.to(dtype), random_values(keys, WIDTH).to(dtype)


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_row_at_a_time(name: str, dtype: torch.dtype, simplex: bool) -> None:
    mask = MASKS[name]
    attention, value = problem(mask, dtype)
    found = effective_attention(attention, value, mask, simplex=simplex)
    expected = reference.effective_attention(attention, value, mask, simplex=simplex)
    assert reference.relative_errors(found, expected).max() <= BARS[dtype]
    assert (found[~reference.dense_mask(mask, *attention.shape)] == 0).all()
    before, after = (a.double() @ value.double() for a in (attention, found))
    assert reference.relative_errors(after, before).max() <= BARS[dtype]
    if simplex:
        assert (found.sum(-1) - attention.sum(-1)).abs().max() <= BARS[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_rank_and_nullity_of_every_row(name: str) -> None:
    mask = MASKS[name]
    attention, value = problem(mask)
    basis = value_basis(value, mask)
    dense = reference.dense_mask(mask, *attention.shape)
    expected = reference.ranks(value, mask, attention.shape[2])
    assert isinstance(basis, RowFactor)
    assert torch.equal(basis.rank, expected)
    assert torch.equal(basis.nullity, dense.sum(-1) - expected)


@pytest.mark.parametrize("name", ["causal", "window with padding", "random", "blocks"])
def test_rank_deficient_values(name: str) -> None:
    """Repeated tokens: some rows see fewer distinct values than keys, others more than D."""
    mask = MASKS[name]
    attention, value = problem(mask)
    tokens = torch.randint(0, 6, (TOKENS,), generator=torch.Generator().manual_seed(8))
    value = value[:, :, tokens]
    found = effective_attention(attention, value, mask)
    expected = reference.effective_attention(attention, value, mask)
    assert reference.relative_errors(found, expected).max() <= 1e-12
    assert torch.equal(value_basis(value, mask).rank, reference.ranks(value, mask, TOKENS))


@pytest.mark.parametrize("rank", [WIDTH, 5])
@pytest.mark.parametrize("name", ["causal", "window", "random"])
def test_ill_conditioned_values(name: str, rank: int) -> None:
    mask = MASKS[name]
    attention, _ = problem(mask)
    value = ill_conditioned_values(TOKENS, WIDTH, rank, 1e-3)
    found = effective_attention(attention, value, mask)
    expected = reference.effective_attention(attention, value, mask)
    assert reference.relative_errors(found, expected).max() <= 1e-12


@pytest.mark.parametrize("name", ["causal", "window with padding", "random", "empty rows"])
def test_results_do_not_depend_on_the_size_of_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = MASKS[name]
    attention, value = problem(mask)
    whole = effective_attention(attention, value, mask)
    monkeypatch.setattr(rowwise, "_CHUNK_BYTES", 8 * HEADS * WIDTH * 2 * WIDTH * 3)
    assert (
        reference.relative_errors(effective_attention(attention, value, mask), whole).max() < 1e-12
    )


@pytest.mark.parametrize("padding", [None, PADDING, PADDING[:, 0, 0]], ids=["none", "4d", "2d"])
def test_causal_rule_equals_its_mask(padding: Tensor | None) -> None:
    mask = CAUSAL if padding is None else CAUSAL & PADDING
    attention, value = problem(mask)
    found = effective_attention(attention, value, padding, causal=True)
    expected = reference.effective_attention(attention, value, mask)
    assert reference.relative_errors(found, expected).max() <= 1e-12


@pytest.mark.parametrize("queries", [9, 30, 41])
def test_causal_rule_with_other_numbers_of_queries(queries: int) -> None:
    mask = torch.ones(queries, TOKENS, dtype=torch.bool).tril()[None, None]
    attention = random_attention(queries, TOKENS, mask)
    found = effective_attention(attention, random_values(TOKENS, WIDTH), causal=True)
    expected = reference.effective_attention(attention, random_values(TOKENS, WIDTH), mask)
    assert reference.relative_errors(found, expected).max() <= 1e-12


def test_blocks_are_projected_apart() -> None:
    attention, value = problem(BLOCKS)
    whole = effective_attention(attention, value, BLOCKS)
    for start, stop in ((0, 4), (4, 19), (19, 20), (20, 30)):
        block = (..., slice(start, stop), slice(start, stop))
        alone = effective_attention(attention[block], value[:, :, start:stop])
        assert reference.relative_errors(whole[block], alone).max() <= 1e-12


def test_rank_deficient_projection() -> None:
    mask = MASKS["window with padding"]
    attention, value = problem(mask)
    projection = random_values(24, WIDTH)[0].mT.clone()
    projection[1, 3:] = 0
    found = effective_attention(attention, value, mask, projection)
    expected = reference.effective_attention(attention, value, mask, projection)
    assert reference.relative_errors(found, expected).max() <= 1e-12


@pytest.mark.parametrize("name", ["causal with padding", "window with padding"])
def test_what_stands_at_padding_does_not_matter(name: str) -> None:
    mask = MASKS[name]
    attention, value = problem(mask)
    hostile = value.masked_fill(~PADDING.squeeze(2)[..., None], torch.nan)
    assert torch.equal(
        effective_attention(attention, value, mask), effective_attention(attention, hostile, mask)
    )
    hostile[1, 2, 3] = torch.inf
    with pytest.raises(NonFiniteError, match="batch index 1, head 2"):
        value_basis(hostile, mask)


@pytest.mark.parametrize("method", ["cholesky", "svd"])
def test_methods_that_need_one_support_are_refused(method: str) -> None:
    with pytest.raises(InputError, match='method="auto"'):
        value_basis(random_values(TOKENS, WIDTH), CAUSAL, method=method)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_support_forms_reproduce_the_mask(name: str) -> None:
    mask = MASKS[name]
    queries, keys = mask.shape[-2:]
    support = support_of(mask, BATCH, queries, keys)
    heads = support.keys.shape[1]
    dense = reference.dense_mask(mask, BATCH, heads, queries, keys)
    assert torch.equal(support.mask(0, queries).expand_as(dense), dense)
    assert torch.equal(support.mask(3, 8).expand_as(dense[:, :, 3:8]), dense[:, :, 3:8])
    assert torch.equal(support.sizes, dense.sum(-1))
    assert torch.equal(support.active, dense.any(-1))
    assert not support.shared
    intervals = "causal" in name or "window" in name or "block" in name
    assert (support.first is not None) == intervals


def test_masks_equal_in_every_row_are_recognised() -> None:
    dense = PADDING.expand(BATCH, 1, TOKENS, TOKENS).clone()
    support = support_of(dense, BATCH, TOKENS, TOKENS)
    assert support.shared
    assert torch.equal(support.keys, PADDING[:, :, 0])
    assert support.tokens.tolist() == [[TOKENS], [17]]
    counted = support.counted()
    assert counted.active.sum(-1).tolist() == [[TOKENS], [17]]
    assert support.counted(own=False).active.all()
    assert support_of(dense[..., :5, :], BATCH, 5, TOKENS).counted().active.all()


def test_rows_of_padding_that_see_themselves_leave_the_mask_shared() -> None:
    """What padding sees says nothing: of the rows that count, all see the same keys."""
    own = PADDING & PADDING.mT | torch.eye(TOKENS, dtype=torch.bool)
    padding = PADDING[:, 0, 0]
    support = support_of(own, BATCH, TOKENS, TOKENS)
    assert not support.shared
    counted = support.counted(padding=padding)
    assert counted.shared
    assert torch.equal(counted.keys[:, 0], padding) and torch.equal(counted.active[:, 0], padding)


def test_keys_that_no_row_sees_are_none() -> None:
    """A causal rule from the first query on, with fewer queries than keys."""
    support = support_of(None, BATCH, 9, TOKENS, causal=True)
    assert support.keys.sum(-1).tolist() == [[9]] * BATCH
    sparse = random_mask(BATCH, 1, 9, TOKENS, share=0.05)
    kept = torch.arange(9) % 2 == 0
    counted = support_of(sparse, BATCH, 9, TOKENS).counted(padding=kept.expand(BATCH, -1))
    assert torch.equal(counted.keys, (sparse & kept[:, None]).any(-2))
