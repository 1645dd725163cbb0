"""`effective_attention` and `value_basis` where all rows of an example share their keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlens.algebra.effective import effective_attention, value_basis
from attnlens.algebra.factors import ValueBasis
from attnlens.errors import InputError, NonFiniteError
from tests.support import reference
from tests.support.reference import BARS

BATCH, HEADS = 2, 3
METHODS = ["auto", "cholesky", "eigh", "svd"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [(6, 8), (8, 8), (9, 8), (70, 8), (1, 8), (1, 1), (40, 1), (31, 31), (12, 31), (90, 31),
         (20, 64), (64, 64), (65, 64), (150, 64)]  # fmt: skip


def random_attention(queries: int, keys: int, mask: Tensor | None = None, seed: int = 0) -> Tensor:
    """`[B, H, Q, K]` float64 probabilities, zero where masked."""
    logits = torch.randn(
        BATCH,
        HEADS,
        queries,
        keys,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )
    if mask is not None:
        mask = reference.dense_mask(mask, BATCH, HEADS, queries, keys)
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


def random_values(keys: int, width: int, seed: int = 1) -> Tensor:
    """`[B, H, K, D]` float64, with a bias so that the columns are not centred."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(BATCH, HEADS, keys, width, dtype=torch.float64, generator=generator)
    return values + torch.randn(HEADS, 1, width, dtype=torch.float64, generator=generator)


def check(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bar: float = 1e-5,
    **options: object,
) -> Tensor:
    """Compare with the reference and check that the output is preserved; return A⊥."""
    found = effective_attention(attention, value, mask, **options)  # type: ignore[arg-type]
    expected = reference.effective_attention(
        attention, value, mask, options.get("projection"), bool(options.get("simplex"))
    )
    assert reference.relative_errors(found, expected).max() <= bar
    dense = reference.dense_mask(mask, *attention.shape)
    real = value.double().masked_fill(~dense.any(-2)[..., None], 0)
    target = attention.double() * dense @ real
    assert reference.relative_errors(found.double() @ real, target).max() <= bar
    assert (found[~dense] == 0).all()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_equals_the_scipy_loop(tokens: int, width: int, dtype: torch.dtype) -> None:
    attention = random_attention(7, tokens).to(dtype)
    found = check(attention, random_values(tokens, width).to(dtype), bar=BARS[dtype])
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(6, 8), (8, 8), (9, 8), (70, 8), (40, 1), (90, 31)])
def test_methods_agree(tokens: int, width: int, dtype: torch.dtype, method: str) -> None:
    attention, value = random_attention(5, tokens).to(dtype), random_values(tokens, width).to(dtype)
    check(attention, value, method=method, bar=BARS[dtype])


def deficient_values(tokens: int, width: int, rank: int) -> Tensor:
    """Values of a given rank, the first head of full rank."""
    value = random_values(tokens, width)
    left, right = random_values(tokens, rank, seed=2), random_values(rank, width, seed=3)
    value[:, 1:] = (left @ right)[:, 1:]
    return value


@pytest.mark.parametrize("method", ["auto", "eigh", "svd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width", "rank"), [(40, 8, 3), (6, 8, 2), (33, 32, 1)])
def test_rank_deficient_values(
    tokens: int, width: int, rank: int, dtype: torch.dtype, method: str
) -> None:
    value = deficient_values(tokens, width, rank).to(dtype)
    check(random_attention(5, tokens).to(dtype), value, method=method, bar=BARS[dtype])
    basis = value_basis(value, method=method)  # type: ignore[arg-type]
    assert basis.rank.tolist() == [[min(tokens, width), rank, rank]] * BATCH
    assert torch.equal(basis.rank, reference.ranks(value)[..., 0])


def ill_conditioned_values(tokens: int, width: int, rank: int, smallest: float) -> Tensor:
    """Values with singular values from 1 down to `smallest`."""
    left = torch.linalg.qr(random_values(tokens, rank, seed=4))[0]
    right = torch.linalg.qr(random_values(width, rank, seed=5))[0]
    exponents = torch.linspace(0, 1, rank, dtype=torch.float64)
    return left * smallest**exponents @ right.mT


@pytest.mark.parametrize("method", ["auto", "eigh", "svd"])
@pytest.mark.parametrize(
    ("dtype", "smallest"), [(torch.float64, 1e-3), (torch.float32, 1e-3), (torch.float32, 1e-4)]
)
@pytest.mark.parametrize(
    ("tokens", "width", "rank"), [(40, 8, 8), (40, 8, 5), (6, 8, 4), (6, 8, 6)]
)
def test_ill_conditioned_values(
    tokens: int, width: int, rank: int, dtype: torch.dtype, smallest: float, method: str
) -> None:
    value = ill_conditioned_values(tokens, width, rank, smallest).to(dtype)
    check(random_attention(5, tokens).to(dtype), value, method=method, bar=BARS[dtype])
    assert (value_basis(value, method=method).rank == rank).all()  # type: ignore[arg-type]


def test_values_that_are_all_zero() -> None:
    value = random_values(12, 8)
    value[0, 1] = 0
    found = check(random_attention(5, 12), value, bar=1e-12)
    assert (found[0, 1] == 0).all()
    assert value_basis(value).rank.tolist() == [[8, 0, 8], [8, 8, 8]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_tokens_without_position_leave_freedom_below_n_equal_d(dtype: torch.dtype) -> None:
    """Equal tokens have equal value rows, so rank(V) is the number of distinct tokens."""
    tokens = torch.tensor([3, 1, 4, 1, 5, 3])
    value = random_values(8, 8).to(dtype)[:, :, tokens]
    check(random_attention(6, 6).to(dtype), value, bar=BARS[dtype])
    assert (value_basis(value).rank == 4).all()
    assert (value_basis(value).nullity == 2).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_mixed_lengths_in_one_batch(dtype: torch.dtype, method: str) -> None:
    mask = torch.arange(40) < torch.tensor([[40], [5]])
    attention = random_attention(40, 40, mask).to(dtype)
    check(attention, random_values(40, 8).to(dtype), mask, method=method, bar=BARS[dtype])


def test_padding_on_the_left_and_in_the_middle() -> None:
    mask = torch.rand(BATCH, 30, generator=torch.Generator().manual_seed(5)) > 0.5
    mask[1, :20] = False
    check(random_attention(30, 30, mask), random_values(30, 8), mask, bar=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_twenty_tokens_padded_to_128_are_identifiable(method: str) -> None:
    mask = torch.zeros(BATCH, 128, dtype=torch.bool)
    mask[:, :20] = True
    attention, value = random_attention(128, 128, mask).float(), random_values(128, 32).float()
    found = check(attention, value, mask, method=method)
    assert reference.relative_errors(found, attention).max() < 1e-6
    assert (value_basis(value, mask, method=method).nullity == 0).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_an_example_of_padding_alone(method: str) -> None:
    mask = torch.ones(BATCH, 20, dtype=torch.bool)
    mask[1] = False
    found = check(
        random_attention(20, 20, mask), random_values(20, 8), mask, method=method, bar=1e-12
    )
    assert (found[1] == 0).all()
    basis = value_basis(random_values(20, 8), mask, method=method)  # type: ignore[arg-type]
    assert basis.rank[1].tolist() == basis.tokens[1].tolist() == [0] * HEADS


def test_what_stands_at_padding_does_not_matter() -> None:
    mask = torch.arange(30) < torch.tensor([[30], [11]])
    attention, value = random_attention(30, 30, mask), random_values(30, 8)
    hostile = value.masked_fill(~mask[:, None, :, None], torch.nan)
    assert torch.equal(
        effective_attention(attention, value, mask), effective_attention(attention, hostile, mask)
    )


@pytest.mark.parametrize("width", [8, 31])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simplex_variant_keeps_row_sums(dtype: torch.dtype, width: int) -> None:
    mask = torch.arange(40) < torch.tensor([[40], [9]])
    attention, value = random_attention(40, 40, mask).to(dtype), random_values(40, width).to(dtype)
    found = check(attention, value, mask, simplex=True, bar=BARS[dtype])
    sums = attention.double().sum(-1)
    assert (found.double().sum(-1) - sums).abs().max() <= BARS[dtype]


def test_simplex_null_space_does_not_depend_on_the_value_bias() -> None:
    attention, value = random_attention(40, 40), random_values(40, 8)
    shifted = value + torch.linspace(-3, 3, 8, dtype=torch.float64)
    first, second = (effective_attention(attention, v, simplex=True) for v in (value, shifted))
    assert reference.relative_errors(first, second).max() < 1e-12
    first, second = (effective_attention(attention, v) for v in (value, shifted))
    assert reference.relative_errors(first, second).min() > 1e-3


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_simplex_threshold_is_n_above_d_plus_one(extra: int) -> None:
    value = random_values(8 + extra, 8)
    assert (value_basis(value).nullity == extra).all()
    assert (value_basis(value, simplex=True).nullity == max(0, extra - 1)).all()


def test_projecting_twice_changes_nothing() -> None:
    mask = torch.arange(40) < torch.tensor([[40], [5]])
    attention, value = random_attention(40, 40, mask), random_values(40, 8)
    once = effective_attention(attention, value, mask)
    twice = effective_attention(once, value, mask)
    assert reference.relative_errors(twice, once).max() < 1e-12


def test_basis_is_orthonormal_and_made_of_values() -> None:
    value = deficient_values(40, 8, 3)
    basis = value_basis(value)
    assert isinstance(basis, ValueBasis)
    gram = basis.basis.mT @ basis.basis
    identity = torch.diag_embed((torch.arange(8) < basis.rank[..., None]).double())
    assert (gram - identity).abs().max() < 1e-12
    assert (value @ basis.whitening - basis.basis).abs().max() < 1e-12
    attention = random_attention(5, 40)
    norms = basis.coordinates(attention).square().sum(-1)
    assert torch.allclose(norms, basis.project(attention).square().sum(-1), rtol=1e-12)


@pytest.mark.parametrize("method", ["auto", "eigh", "svd"])
def test_singular_values_and_condition(method: str) -> None:
    value = deficient_values(40, 8, 3)
    basis = value_basis(value, method=method)  # type: ignore[arg-type]
    expected = np.linalg.svd(value.numpy(), compute_uv=False)
    assert isinstance(basis, ValueBasis)
    scale = expected[..., :1]
    assert np.abs((basis.singular_values.numpy() - expected) / scale).max() < 1e-12
    for example, head in np.ndindex(BATCH, HEADS):
        ratio = reference.condition(value[example, head].numpy(), 40 * reference.EPS)
        assert basis.condition[example, head].item() == pytest.approx(ratio, rel=1e-10)


def test_rtol_decides_the_rank_and_is_recorded() -> None:
    scales = torch.tensor([1.0, 1e-1, 1e-2, 1e-3], dtype=torch.float64)
    orthonormal = torch.linalg.qr(random_values(20, 4))[0]
    value = orthonormal * scales
    for rtol, rank in ((1e-4, 4), (3e-3, 3), (0.5, 1)):
        basis = value_basis(value, rtol=rtol)
        assert (basis.rank == rank).all()
        assert (basis.threshold == rtol).all()
    for rtol in (0.0, 9e-8, 1.0, float("nan")):
        with pytest.raises(InputError, match="rtol must lie in"):
            value_basis(value, rtol=rtol)


@pytest.mark.parametrize("simplex", [False, True])
def test_output_is_preserved_through_a_real_projection(simplex: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    projection = torch.randn(HEADS, 8, 24, dtype=torch.float64, generator=generator)
    attention, value = random_attention(40, 40), random_values(40, 8)
    found = check(attention, value, projection=projection, simplex=simplex, bar=1e-12)
    if not simplex:  # a projection of full rank does not change the null space
        assert torch.equal(found, effective_attention(attention, value))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rank_deficient_projection_widens_the_null_space(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    projection = torch.randn(HEADS, 8, 24, dtype=torch.float64, generator=generator)
    projection[1, 2:] = 0  # a pruned head: two of eight directions left
    projection[2] = projection[2, :, :5] @ torch.randn(5, 24, dtype=torch.float64)
    projection = projection.to(dtype)
    attention, value = random_attention(40, 40).to(dtype), random_values(40, 8).to(dtype)
    found = effective_attention(attention, value, projection=projection)
    expected = reference.effective_attention(attention, value, projection=projection)
    assert reference.relative_errors(found, expected).max() <= BARS[dtype]
    seen = value.double() @ projection.double()
    error = reference.relative_errors(found.double() @ seen, attention.double() @ seen)
    assert error.max() <= BARS[dtype]
    assert value_basis(value, projection=projection).rank.tolist() == [[8, 2, 5]] * BATCH


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_named(bad: float) -> None:
    value = random_values(12, 8)
    value[1, 2, 3, 4] = bad
    with pytest.raises(NonFiniteError, match=r"value .* batch index 1, head 2"):
        value_basis(value)
    attention = random_attention(5, 12)
    attention[0, 1, 2, 3] = bad
    with pytest.raises(NonFiniteError, match=r"attention .* batch index 0, head 1"):
        effective_attention(attention, random_values(12, 8))


def test_cholesky_refuses_what_it_cannot_do() -> None:
    with pytest.raises(InputError, match=r"batch index 0, head 1 have rank 3"):
        value_basis(deficient_values(40, 8, 3), method="cholesky")


VALUE, ATTENTION = random_values(12, 8), random_attention(5, 12)
WRONG = {
    "value of three dimensions": dict(value=VALUE[0]),
    "integer value": dict(value=VALUE.long()),
    "integer attention": dict(attention=ATTENTION.long()),
    "attention of three dimensions": dict(attention=ATTENTION[0]),
    "attention with other keys": dict(attention=ATTENTION[..., :-1]),
    "attention with other heads": dict(attention=ATTENTION[:, :2]),
    "additive mask": dict(mask=torch.zeros(BATCH, 12)),
    "mask with other keys": dict(mask=torch.ones(BATCH, 11, dtype=torch.bool)),
    "mask with other heads": dict(mask=torch.ones(BATCH, 2, 1, 12, dtype=torch.bool)),
    "mask with other queries": dict(mask=torch.ones(BATCH, 1, 6, 12, dtype=torch.bool)),
    "mask with other examples": dict(mask=torch.ones(3, 1, 1, 12, dtype=torch.bool)),
    "mask of five dimensions": dict(mask=torch.ones(1, 1, 1, 1, 12, dtype=torch.bool)),
    "projection with other heads": dict(projection=torch.ones(2, 8, 24)),
    "projection with another width": dict(projection=torch.ones(HEADS, 7, 24)),
    "unknown method": dict(method="qr"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_input_errors(change: dict[str, object]) -> None:
    arguments = {"attention": ATTENTION, "value": VALUE, **change}
    with pytest.raises(InputError, match="Got"):
        effective_attention(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape", [(12,), (5, 12), (1, 12), (HEADS, 1, 12), (HEADS, 5, 12), (BATCH, 1, 5, 12)], ids=str
)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(6)) > 0.4
    dense = (
        mask.expand(BATCH, HEADS, 5, 12)
        if len(shape) != 2
        else mask[None, None].expand(BATCH, HEADS, 5, 12)
    )
    found = effective_attention(ATTENTION, VALUE, mask)
    expected = reference.effective_attention(ATTENTION, VALUE, dense)
    assert reference.relative_errors(found, expected).max() < 1e-12


def test_integer_mask_means_the_same_as_boolean() -> None:
    mask = torch.arange(12) < torch.tensor([[12], [4]])
    assert torch.equal(
        effective_attention(ATTENTION, VALUE, mask),
        effective_attention(ATTENTION, VALUE, mask.long()),
    )
