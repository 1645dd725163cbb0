"""Dimension formulas against Jacobian ranks; ranks and verdicts against loops over heads."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnlens.errors import InputError, NonFiniteError
from attnlens.identifiability.dimensions import (
    identifiability,
    simplex_dimension,
    softmax_dimension,
    softmax_threshold,
)

EPS32 = float(np.finfo(np.float32).eps)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7919 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rank(matrix: Tensor) -> int:
    """Rank with a demand for a clear gap, so that no case is decided by a tolerance."""
    values = torch.linalg.svdvals(matrix)
    relative = values / values[0].clamp_min(1e-300)
    assert not ((relative > 1e-12) & (relative < 1e-7)).any(), "no gap in the spectrum"
    return int((relative > 1e-9).sum())


def jacobian_ranks(queries: int, keys: int, query_width: int, value_width: int) -> tuple[int, int]:
    """Ranks of the derivatives of A and of AV with respect to (Q, K), by automatic means."""
    query, key = 0.7 * normal(queries, query_width), 0.7 * normal(keys, query_width, seed=1)
    value = normal(keys, value_width, seed=2)

    def attention(query: Tensor, key: Tensor) -> Tensor:
        return torch.softmax(query @ key.T, dim=-1)

    parts = torch.autograd.functional.jacobian(attention, (query, key), vectorize=True)
    jacobian = torch.cat([part.flatten(2) for part in parts], dim=-1)  # [Q, K, P]
    output = torch.einsum("ijp,jd->idp", jacobian, value)
    return rank(jacobian.flatten(0, 1)), rank(output.flatten(0, 1))


@pytest.mark.parametrize("query_width", [1, 2, 3, 4])
@pytest.mark.parametrize("value_width", [1, 2, 3, 4, 6, 8])
def test_softmax_dimension_is_the_jacobian_count(query_width: int, value_width: int) -> None:
    # n = D, D + 1, D + 2 and beyond the threshold where there is one; also R > n - 1.
    lengths = {2, 3, value_width, value_width + 1, value_width + 2, value_width + 3}
    longest = softmax_threshold(query_width, value_width)
    if longest is not None and longest < 14:
        lengths |= {longest, longest + 1}
    for keys in sorted(length for length in lengths if length >= 2):
        realisable, seen = jacobian_ranks(keys, keys, query_width, value_width)
        width = min(query_width, keys - 1)
        assert realisable == width * (2 * keys - 1 - width)
        assert softmax_dimension(keys, query_width, value_width) == realisable - seen, keys


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 9])
@pytest.mark.parametrize(("query_width", "value_width"), [(2, 2), (3, 2), (2, 3), (4, 2), (2, 5)])
def test_softmax_dimension_with_other_query_counts(
    queries: int, query_width: int, value_width: int
) -> None:
    for keys in (2, 3, 4, 5, 7):
        realisable, seen = jacobian_ranks(queries, keys, query_width, value_width)
        found = softmax_dimension(keys, query_width, value_width, queries=queries)
        assert found == realisable - seen, keys


def test_softmax_dimension_of_one_token_is_zero() -> None:
    assert softmax_dimension(1, 4, 3) == 0


@pytest.mark.parametrize(("keys", "width"), [(2, 3), (4, 4), (5, 4), (6, 4), (9, 3)])
def test_simplex_dimension_is_the_null_space_of_the_conditions(keys: int, width: int) -> None:
    with_ones = np.hstack([normal(keys, width).numpy(), np.ones((keys, 1))])
    conditions = np.kron(np.eye(keys), with_ones.T)  # every row of A on its own
    free = scipy.linalg.null_space(conditions).shape[1]
    assert simplex_dimension(keys, np.linalg.matrix_rank(with_ones)) == free
    assert simplex_dimension(keys, min(keys, width + 1)) == free


@given(st.integers(1, 12), st.integers(1, 24))
def test_threshold_is_where_the_softmax_dimension_becomes_positive(
    query_width: int, value_width: int
) -> None:
    lengths = torch.arange(1, 400)
    positive = softmax_dimension(lengths, query_width, value_width) > 0
    longest = softmax_threshold(query_width, value_width)
    if longest is None:
        assert value_width >= 2 * query_width
        assert not positive.any()
    else:
        assert torch.equal(positive, lengths > longest)


@given(st.integers(1, 9), st.integers(1, 9))
def test_softmax_family_lies_in_the_simplex_family(query_width: int, value_width: int) -> None:
    lengths = torch.arange(1, 60)
    softmax = softmax_dimension(lengths, query_width, value_width)
    simplex = simplex_dimension(lengths, torch.minimum(lengths, torch.tensor(value_width + 1)))
    assert (softmax <= simplex).all()
    if query_width >= value_width:
        assert torch.equal(softmax > 0, simplex > 0)


def naive_ranks(values: np.ndarray, rtol: float | None) -> dict[str, float]:
    """Ranks of one head's visible values from full singular value decompositions."""
    count, width = values.shape
    cut = rtol if rtol is not None else max(count, width) * EPS32
    singular = np.linalg.svd(values, compute_uv=False)
    centred = np.linalg.svd(values - values.mean(0), compute_uv=False)
    rank = int((singular > cut * singular[0]).sum())
    rank_with_ones = min(1 + int((centred > cut * singular[0]).sum()), count)
    return {
        "tokens": count,
        "rank": rank,
        "nullity": count - rank,
        "simplex_nullity": count - rank_with_ones,
        "condition": singular[0] / singular[rank - 1],
        "rtol": cut,
    }


def assert_ranks(found, index: tuple[int, ...], expected: dict[str, float]) -> None:
    for name, wanted in expected.items():
        assert getattr(found, name)[index].item() == pytest.approx(wanted, rel=1e-6), name


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    width=st.integers(1, 5),
    query_width=st.integers(1, 5),
    defect=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_padded_heads_match_a_loop(
    lengths: list[int], width: int, query_width: int, defect: int, seed: int
) -> None:
    batch, heads, keys = len(lengths), 2, max(lengths)
    value = normal(batch, heads, keys, width, seed=seed).float()
    value[:, 1, :, max(1, width - defect) :] = 0  # the second head is rank-deficient
    mask = torch.arange(keys) < torch.tensor(lengths)[:, None]
    value[~mask[:, None].expand(batch, heads, keys)] = torch.nan  # padding must not matter
    query = torch.zeros(batch, heads, keys, query_width)
    found = identifiability(query, query, value, mask=mask[:, None, None])
    for b, length in enumerate(lengths):
        for h in range(heads):
            expected = naive_ranks(value[b, h, :length].double().numpy(), None)
            assert_ranks(found, (b, h), expected)
            free = expected["simplex_nullity"]
            assert found.simplex_dimension[b, h] == length * free
            contrasts = length - free - 1
            assert found.softmax_dimension is not None
            wanted = softmax_dimension(length, query_width, int(contrasts))
            assert found.softmax_dimension[b, h] == wanted


def masks_by_row(keys: int) -> dict[str, Tensor]:
    place = torch.arange(keys)
    return {
        "causal": place[:, None] >= place,
        "window": (place[:, None] - place).abs() <= 2,
        "packed": (place[:, None] < 4) == (place < 4),
    }


@pytest.mark.parametrize("kind", ["causal", "window", "packed"])
def test_masks_that_vary_by_row_match_a_loop(kind: str) -> None:
    keys, width = 9, 3
    value = normal(1, 2, keys, width)
    value[0, 1, 1::2] = value[0, 1, ::2][:4]  # repeated values, as at the first layer
    query = torch.zeros(1, 2, keys, 2)
    mask = masks_by_row(keys)[kind]
    found = identifiability(query, query, value, mask=mask[None, None])
    for h in range(2):
        rows = [naive_ranks(value[0, h, mask[i]].numpy(), None) for i in range(keys)]
        for i, expected in enumerate(rows):
            expected["rtol"] = max(int(mask[i].sum()), width) * EPS32
            assert_ranks(found, (0, h, i), expected)
        assert found.simplex_dimension[0, h] == sum(row["simplex_nullity"] for row in rows)
    assert found.softmax_dimension is None
    assert found.identifiable_softmax is None
    assert "mask varies by row" in found.verdict(0, 1)


def test_an_expanded_padding_mask_is_a_padding_mask() -> None:
    value, query = normal(2, 1, 6, 2), torch.zeros(2, 1, 6, 2)
    padding = torch.arange(6) < torch.tensor([[6], [4]])
    short = identifiability(query, query, value, mask=padding[:, None, None])
    full = padding[:, None, None] & padding[:, None, :, None]  # padded rows see nothing
    for mask in (padding[:, None, None].expand(2, 1, 6, 6), full):
        found = identifiability(query, query, value, mask=mask)
        assert torch.equal(found.simplex_dimension, short.simplex_dimension)
        assert torch.equal(found.tokens, torch.tensor([[6], [4]]))
    assert short.simplex_dimension.tolist() == [[6 * 3], [4 * 1]]


def test_padded_queries_count_only_where_they_are_not_keys() -> None:
    value, mask = normal(1, 1, 6, 2), (torch.arange(6) < 5)[None, None, None]
    query = torch.zeros(1, 1, 3, 2)
    found = identifiability(query, torch.zeros(1, 1, 6, 2), value, mask=mask)
    assert found.simplex_dimension.item() == 3 * (5 - 3)


@pytest.mark.parametrize("width", [1, 4, 7])
def test_the_threshold_is_one_token_later_than_the_null_space_of_the_values(width: int) -> None:
    for keys, nullity, identifiable in (
        (width, 0, True),
        (width + 1, 1, True),
        (width + 2, 2, False),
    ):
        query = torch.zeros(1, 1, keys, width)
        found = identifiability(query, query, normal(1, 1, keys, width))
        assert found.nullity.item() == nullity
        assert found.identifiable_simplex.item() is identifiable
        assert found.identifiable_softmax is not None
        assert found.identifiable_softmax.item() is identifiable


def test_wide_values_make_narrow_heads_identifiable() -> None:
    query = torch.zeros(1, 1, 30, 2)
    found = identifiability(query, query, normal(1, 1, 30, 4))
    assert not found.identifiable_simplex.item()
    assert found.identifiable_softmax is not None
    assert found.identifiable_softmax.item()
    assert "every length" in found.verdict(0, 0)


def test_the_simplex_fields_ignore_a_value_bias() -> None:
    value = normal(1, 1, 8, 3).float()
    query = torch.zeros(1, 1, 8, 3)
    plain = identifiability(query, query, value)
    biased = identifiability(query, query, value + torch.tensor([30.0, -20.0, 10.0]))
    assert torch.equal(plain.simplex_nullity, biased.simplex_nullity)
    # Equal values have rank one, and [T, 1] no more, whatever their rounding.
    equal = identifiability(query, query, (value[:, :, :1] / 3).expand(1, 1, 8, 3))
    assert (equal.rank.item(), equal.simplex_nullity.item()) == (1, 7)


def test_projections_matter_only_if_they_lose_rank() -> None:
    value, query = normal(1, 2, 7, 3), torch.zeros(1, 2, 7, 3)
    projection = normal(2, 3, 10)
    projection[1, 2] = projection[1, 0] - projection[1, 1]
    found = identifiability(query, query, value, projection=projection)
    assert found.rank.tolist() == [[3, 2]]
    products = value[0] @ projection
    for h in range(2):
        with_ones = np.hstack([products[h].numpy(), np.ones((7, 1))])
        assert found.simplex_nullity[0, h] == 7 - np.linalg.matrix_rank(with_ones, tol=1e-9)
        singular = np.linalg.svd(products[h].numpy(), compute_uv=False)
        kept = singular[singular > 1e-6 * singular[0]]
        assert found.condition[0, h].item() == pytest.approx(kept[0] / kept[-1], rel=1e-9)


def test_rtol_decides_and_is_recorded() -> None:
    value, query = torch.eye(4, 2).double()[None, None], torch.zeros(1, 1, 4, 2)
    value[..., 1] *= 1e-3
    loose = identifiability(query, query, value, rtol=1e-2)
    strict = identifiability(query, query, value, rtol=1e-4)
    assert (loose.rank.item(), strict.rank.item()) == (1, 2)
    assert (loose.rtol.item(), strict.condition.item()) == pytest.approx((1e-2, 1e3))


def test_zero_values_and_hidden_examples() -> None:
    query, mask = torch.zeros(2, 1, 4, 2), torch.tensor([True, False])[:, None, None, None]
    found = identifiability(query, query, torch.zeros(2, 1, 4, 2), mask=mask)
    assert found.rank.tolist() == [[0], [0]]
    assert found.tokens.tolist() == [[4], [0]]
    assert found.simplex_nullity.tolist() == [[3], [0]]
    assert found.simplex_dimension.tolist() == [[12], [0]]
    assert found.condition.isnan().all()  # no singular value counts


def test_verdicts_state_the_threshold() -> None:
    query = torch.zeros(1, 1, 54, 32)
    found = identifiability(query, query, normal(1, 1, 54, 32))
    words = found.verdict(0, 0)
    assert "n > D + 1 = 33" in words
    assert str(54 * 21) in words
    assert f"dimension {32 * 21}" in words
    short = identifiability(query[:, :, :33], query[:, :, :33], normal(1, 1, 33, 32)).verdict(0, 0)
    assert "no other row-stochastic matrix" in short
    assert "Nor can" in short


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.zeros(1, 2, 5, 3)}, "repeat grouped"),
        ({"key": torch.zeros(1, 2, 4, 5)}, "query, key and value"),
        ({"mask": torch.ones(1, 1, 1, 4)}, "boolean.*float32"),
        ({"mask": torch.ones(1, 4, dtype=torch.bool)}, "padding mask"),
        ({"mask": torch.ones(1, 1, 1, 5, dtype=torch.bool)}, "broadcast to"),
        ({"projection": torch.zeros(2, 4, 9)}, "projection"),
        ({"rtol": 1e-9}, "rtol"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "query": torch.zeros(1, 2, 4, 3),
        "key": torch.zeros(1, 2, 4, 3),
        "value": torch.zeros(1, 2, 4, 3),
    }
    with pytest.raises(InputError, match=message):
        identifiability(**{**arguments, **change})


def test_values_that_are_not_finite_are_named() -> None:
    value = torch.zeros(2, 3, 4, 2)
    value[1, 2, 0, 0] = torch.inf
    query = torch.zeros(2, 3, 4, 2)
    with pytest.raises(NonFiniteError, match=r"value .* batch index 1, head 2"):
        identifiability(query, query, value)
