"""Rows that share factors: every kind of mask against a decomposition of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnlens import LabelAttention
from attnlens.algebra import chains, rowwise, updates
from attnlens.algebra.chains import plan_rows
from attnlens.algebra.effective import effective_attention, value_basis
from attnlens.algebra.supports import Support, support_of
from attnlens.capture import Capture, Masking
from tests.algebra.test_agreement import assert_close, clear_ranks, normal, statistics
from tests.support import reference

KINDS = (
    "causal",
    "left padding",
    "right padding",
    "fewer queries",
    "more queries",
    "window",
    "causal window",
    "chunks",
    "packed",
    "packed, causal",
    "prefix and window",
    "global tokens",
    "holes",
)


def mask_of(kind: str, keys: int, reach: int) -> Tensor:
    """`[1, 1, Q, K]` bool."""
    queries = {"fewer queries": keys * 2 // 3, "more queries": keys + 9}.get(kind, keys)
    row, key = torch.arange(queries)[:, None], torch.arange(keys)
    causal = key <= row + (keys - queries if kind == "fewer queries" else 0)
    near = (key - row).abs() <= reach
    part = 2 * reach + 5
    rows = {
        "window": near,
        "left padding": causal & (key >= reach // 2),
        "right padding": causal & (key < keys - reach // 2),
        "causal window": causal & near,
        "chunks": causal & (key // part == row // part),
        "packed": key // part == row // part,
        "packed, causal": causal & (key * 3 // keys == row * 3 // keys),
        "prefix and window": causal & (near | (key < 5)),
        "global tokens": near | (key % 17 == 0) | (row % 29 == 0),
        "holes": causal & (key % 6 != 2),
    }.get(kind, causal)
    return rows[None, None]


def served(mask: Tensor, width: int) -> tuple[int, int]:
    """How many rows of a mask stand in chains, and how many rows see a key at all."""
    support = support_of(mask, 1, *mask.shape[-2:])
    plan = plan_rows(support, 0, 0, width)
    rows = [row for chain in (*plan.chains, *plan.short) for row in chain.rows.tolist()]
    everyone = sorted(rows + plan.separate.tolist())
    assert everyone == (support.active[0, 0] & (support.sizes[0, 0] > 0)).nonzero()[:, 0].tolist()
    return len(rows), len(everyone)


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_lead_to_the_keys_of_every_row(kind: str, width: int) -> None:
    mask = mask_of(kind, 90, 12)
    support = support_of(mask, 1, *mask.shape[-2:])
    base: set[int] = set()
    for chain in plan_rows(support, 0, 0, width).chains:
        base = (base if chain.continues else set()) | set(chain.added.tolist())
        for row, applied, size in zip(chain.rows, chain.applied, chain.sizes, strict=True):
            count = {key: 1 for key in base}
            for key, sign in zip(chain.keys[:applied], chain.signs[:applied], strict=True):
                count[int(key)] = count.get(int(key), 0) + int(sign)
            seen = mask[0, 0, row].nonzero()[:, 0].tolist()
            assert sorted(key for key, times in count.items() if times) == seen
            assert set(count.values()) <= {0, 1} and size == len(seen)
            assert chain.span[0] <= min(seen) and max(seen) < chain.span[1]
    for short in plan_rows(support, 0, 0, width).short:
        for row, reach, size in zip(short.rows, short.reach, short.sizes, strict=True):
            seen = set(mask[0, 0, row].nonzero()[:, 0].tolist())
            assert seen <= set(short.keys[:reach].tolist()) and size == len(seen)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "packed"])
def test_nearly_all_rows_of_regular_masks_share_factors(kind: str) -> None:
    chained, rows = served(mask_of(kind, 400, 40), 16)
    assert chained > 0.9 * rows


def test_masks_without_neighbours_are_left_to_single_factors() -> None:
    for mask in (
        torch.rand(1, 1, 80, 80, generator=torch.Generator().manual_seed(0)) < 0.5,
        mask_of("packed", 400, 40),
        mask_of("causal", 2, 1),
    ):
        assert served(mask, 16)[0] == 0


def test_a_mask_of_which_no_row_counts_has_nothing_to_plan() -> None:
    support = support_of(mask_of("causal", 6, 1), 1, 6, 6)
    plan = plan_rows(replace(support, active=torch.zeros_like(support.active)), 0, 0, 4)
    assert not plan.chains and not plan.short and not len(plan.separate)


@pytest.mark.parametrize("kind", KINDS)
def test_well_conditioned_rows_are_not_factored_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long rows none is; those about as long as D may be nearly singular."""
    mask = mask_of(kind, 240, 40)
    factored: list[int] = []
    whitened = rowwise._whitened

    def counting(values: Tensor, keys: Tensor, *more: Tensor) -> object:
        factored.extend(keys.sum(-1).tolist())
        return whitened(values, keys, *more)

    monkeypatch.setattr(rowwise, "_whitened", counting)
    support = support_of(mask, 1, *mask.shape[-2:])
    separate = plan_rows(support, 0, 0, 8).separate
    value_basis(normal(1, 2, 240, 8).float(), mask).rank  # noqa: B018
    sizes = mask[0, 0].sum(-1)
    assert sorted(size for size in factored if size > 24) == sorted(
        set_of(support, separate, sizes, 24)
    )


def set_of(support: Support, rows: object, sizes: Tensor, least: int) -> list[int]:
    """Sizes of the distinct supports of some rows, those above a size."""
    seen = support.seen(0, 0, torch.as_tensor(rows))
    distinct = torch.unique(seen, dim=0) if len(seen) else seen
    return [size for size in distinct.sum(-1).tolist() if size > least]


def test_a_dependent_head_leaves_the_others_their_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    value = normal(1, 3, 120, 8).float()
    value[:, 1, :, 5] = value[:, 1, :, 2]
    mask = mask_of("causal", 120, 1)
    shapes: list[tuple[int, int]] = []
    whitened = rowwise._whitened

    def counting(values: Tensor, keys: Tensor, *more: Tensor) -> object:
        shapes.append((len(values), len(keys)))
        return whitened(values, keys, *more)

    monkeypatch.setattr(rowwise, "_whitened", counting)
    basis = value_basis(value, mask)
    assert torch.equal(basis.rank, reference.ranks(value, mask, 120))
    assert sum(heads * rows for heads, rows in shapes) < 200
    assert sum(rows for heads, rows in shapes if heads == 1) > 100


@pytest.mark.parametrize("simplex", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_maps_and_ranks_of_every_kind(kind: str, dtype: torch.dtype, simplex: bool) -> None:
    mask = mask_of(kind, 150, 20)
    value = normal(1, 2, 150, 12, seed=2).to(dtype)
    logits = normal(1, 2, *mask.shape[-2:], seed=3).masked_fill(~mask, -torch.inf)
    attention = logits.softmax(-1).nan_to_num(0.0).to(dtype)
    found = effective_attention(attention, value, mask, simplex=simplex)
    expected = reference.effective_attention(attention, value, mask, simplex=simplex)
    assert reference.relative_errors(found, expected).max() <= reference.BARS[dtype]
    basis = value_basis(value, mask, simplex=simplex)
    assert torch.equal(basis.rank, reference.ranks(value, mask, len(mask[0, 0]), simplex=simplex))


@dataclass(frozen=True)
class Draw:
    """A call whose mask differs by row, and how it was drawn."""

    call: Capture
    mask: Tensor


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """Masks of every kind, conditions to 1e6, repeated and dependent keys, grouped values."""
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**20))
    keys, width = draw(st.integers(20, 90)), draw(st.sampled_from([2, 5, 8]))
    groups, heads = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    mask = mask_of(kind, keys, draw(st.integers(1, 24)))
    value = normal(1, heads, keys, width, seed=seed)
    condition = 10.0 ** draw(st.sampled_from([0, 1, 3, 6]))
    scales = torch.logspace(0, -float(torch.tensor(condition).log10()), width).double()
    value = value * scales @ torch.linalg.qr(normal(width, width, seed=seed + 1))[0]
    what = draw(st.sampled_from(["", "repeated", "dependent", "offset", "late"]))
    if what == "repeated":
        value = value[:, :, torch.arange(keys) % draw(st.integers(1, 12))]
    if what == "dependent":
        value[:, 0, :, -1] = value[:, 0, :, 0]
    if what == "offset":
        value = value + 10 * normal(1, heads, 1, width, seed=seed + 2)
    if what == "late":  # one key much larger than all others, which enters and leaves
        value[:, :, keys // 2] *= 1e3
    value = value.float()
    queries = mask.shape[-2]
    query = normal(1, heads * groups, queries, width, seed=seed + 3).float()
    key = normal(1, heads, keys, width, seed=seed + 4).float()
    attention = reference.attention(query, key.repeat_interleave(groups, 1), mask)
    call = Capture(
        site="layer.0", stack="layer.*", query=query, grouped_key=key, grouped_value=value,
        context=attention.float() @ value.repeat_interleave(groups, 1), masking=Masking(mask),
        scaling=width**-0.5,
    )  # fmt: skip
    return Draw(call, mask)


@settings(max_examples=60, deadline=None)
@given(draws(), st.sampled_from(["all", "null_space"]))
def test_statistics_of_chains_equal_one_row_at_a_time(drawn: Draw, fields: str) -> None:
    call = drawn.call
    assume(clear_ranks(call.value, drawn.mask))
    assert call.query is not None and call.key is not None
    attention = reference.attention(call.query, call.key, drawn.mask)
    real = call.real_rows.expand(1, *attention.shape[1:3])[:, 0]
    twin = reference.head_statistics(attention, call.value, drawn.mask, real)
    found = statistics(call, fields=fields)
    for name, expected in twin.items():
        if fields == "all" or not found[name].isnan().all():
            assert_close(name, found[name], expected)


@settings(max_examples=30, deadline=None)
@given(draws())
def test_labels_of_chains_equal_one_row_at_a_time(drawn: Draw) -> None:
    call = drawn.call
    assume(clear_ranks(call.value, drawn.mask))
    labels = torch.arange(call.shape[3])[None] % 3
    observer = LabelAttention(labels, ("a", "b", "c"))
    observer.update(call)
    found = observer.compute()
    attention = call.attention().double()
    effective = reference.effective_attention(attention, call.value, drawn.mask)
    real = call.real_rows.expand(1, *attention.shape[1:3])[:, 0]
    expected = torch.from_numpy(reference.label_attention(effective, labels, real, 3))
    torch.testing.assert_close(found.effective[0], expected.mean(0), rtol=1e-5, atol=1e-6)


def test_results_do_not_depend_on_the_length_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of("prefix and window", 150, 30)
    value = normal(1, 2, 150, 12).float()
    attention = (mask * normal(1, 2, 150, 150).exp()).float()
    whole = effective_attention(attention, value, mask)
    for longest, size in ((8, 1 << 14), (200, 1 << 30)):
        monkeypatch.setattr(chains, "_LONGEST", longest)
        monkeypatch.setattr(updates, "_CHUNK_BYTES", size)
        again = effective_attention(attention, value, mask)
        assert reference.relative_errors(again, whole).max() < 1e-6


def test_heads_that_share_values_share_factors() -> None:
    value = normal(1, 2, 90, 8).float()
    mask = mask_of("causal", 90, 1)
    query, key = (normal(1, heads, 90, 8, seed=heads).float() for heads in (6, 2))
    context = reference.attention(query, key.repeat_interleave(3, 1), mask).float()
    call = Capture(
        site="layer.0", stack="layer.*", query=query, grouped_key=key, grouped_value=value,
        context=context @ value.repeat_interleave(3, 1), masking=Masking(mask), scaling=8**-0.5,
    )  # fmt: skip
    alone = replace(
        call,
        grouped_key=key.repeat_interleave(3, 1),
        grouped_value=value.repeat_interleave(3, 1),
    )
    for name, tensor in statistics(alone).items():
        torch.testing.assert_close(statistics(call)[name], tensor, rtol=1e-9, atol=1e-12)
