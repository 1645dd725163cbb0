"""Closed forms: what can be said of A and A⊥ without building either.

`P` is an orthogonal projector, so `⟨A, A⊥⟩ = ‖A⊥‖²`. With `O = A V` and `W Wᵀ = (VᵀV)⁺`,
`‖A⊥‖ = ‖O W‖`, and the sum of all entries of A⊥ is `(1ᵀO) W Wᵀ (Vᵀ1)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.factors import factor_values
from attnlens.algebra.rowwise import RowwiseBasis
from attnlens.algebra.supports import Support
from attnlens.algebra.values import row_moments, selected_rows, square_sums

# Squared sine of the angle under which the constant vector counts as inside the value space.
_INSIDE = 1e-8
# Share of the square sum below which the variance of a matrix's entries is rounding.
_CONSTANT = 1e-12


class NullSpaceSums(NamedTuple):
    """Null-space quantities per example and head, all `[B, H]` float64.

    Attributes:
        rank: numerical rank of T; the mean over real rows where the mask differs by row.
        nullity: `n − rank`, likewise.
        nullity_min: smallest nullity of a real row.
        nullity_max: largest nullity of a real row.
        simplex_nullity: `n − rank([T, 1])`, likewise the mean.
        condition: largest over smallest kept singular value of T over all real keys.
        effective_square: `‖A⊥‖²_F` over real rows.
        effective_total: sum of the entries of A⊥ over real rows.
        output_square: `‖A T‖²_F` over real rows.
        finite: 1 where every input was finite, else 0; the other fields then are meaningless.
    """

    rank: Tensor
    nullity: Tensor
    nullity_min: Tensor
    nullity_max: Tensor
    simplex_nullity: Tensor
    condition: Tensor
    effective_square: Tensor
    effective_total: Tensor
    output_square: Tensor
    finite: Tensor


class RowSums(NamedTuple):
    """Sums over attention rows, each `[B, H, Q]` float64.

    Attributes:
        total: row sums of A.
        square: `Σ_j p_ij²`.
        entropy: `−Σ_j p_ij log p_ij` in nats.
    """

    total: Tensor
    square: Tensor
    entropy: Tensor


def row_sums(attention: Tensor) -> RowSums:
    """Sum attention rows that are at hand.

    Args:
        attention: `[B, H, Q, K]` probabilities, 0 where masked.

    Returns:
        The sums, in float64.
    """
    entropy = torch.special.entr(attention).sum(-1, dtype=torch.float64)
    square = attention.square().sum(-1, dtype=torch.float64)
    return RowSums(attention.sum(-1, dtype=torch.float64), square, entropy)


def null_space_sums(
    values: Tensor,
    context: Tensor,
    support: Support,
    rtol: float,
    output_root: Tensor | None = None,
    active: Tensor | None = None,
    whitening: tuple[Tensor, Tensor] | None = None,
) -> NullSpaceSums:
    """Compute the null-space quantities from values and outputs alone.

    Args:
        values: `[B, Hv, K, E]`; rows at masked keys may hold anything; Hv divides H (grouped
            heads).
        context: `[B, H, Q, E]` outputs `O = A V`; rows that are not real may hold anything.
        support: the keys of every row.
        rtol: relative threshold for the numerical rank.
        output_root: `[H, E, E]` float64 regular matrix X with `‖A T‖ = ‖O X‖`, that is
            `X Xᵀ = H Hᵀ`; the identity when None.
        active: `[B, 1 or H, Q]` bool, the real rows; by default those of :meth:`Support.active`.
        whitening: factor `[B, Hv, E, E]` float64 and rank `[B, Hv]` over all real keys, where
            they are known already.

    Returns:
        The quantities, over real rows and keys only.
    """
    active = support.active(context.shape[-2]) if active is None else active
    groups = context.shape[1] // values.shape[1]
    keys = _keys_of_heads(support, values.shape[1])
    gram, value_total = row_moments(values, keys)
    finite = torch.isfinite(gram.diagonal(dim1=-2, dim2=-1)).all(-1)  # sums of squares
    if not bool(finite.all()):  # an eigensolver may hang or raise on NaN
        kept = finite[..., None, None]
        values, gram = torch.where(kept, values, 0.0), torch.where(kept, gram, 0.0)
        value_total = torch.where(finite[..., None], value_total, 0.0)
    root = None if output_root is None else output_root.to(gram)
    factor, rank = whitening or _whitening(values, gram, keys, rtol)
    active = active.expand(context.shape[:3])
    if support.shared:
        coordinates = factor.repeat_interleave(groups, 1) if groups > 1 else factor
        (effective, output), context_total = square_sums(context, active, [coordinates, root])
        parts = _shared_parts(value_total, context_total, factor, rank, support)
        parts["effective_square"] = effective
    else:
        (output,), _ = square_sums(context, active, [root])
        values = selected_rows(values, keys, torch.float64)
        context = selected_rows(context, active, torch.float64)
        parts = _rowwise_parts(values, context, active, support, rtol, groups)
    finite = finite.repeat_interleave(groups, 1) & torch.isfinite(output)
    condition = _condition(gram, rank, root, groups)
    return NullSpaceSums(**parts, condition=condition, output_square=output, finite=finite.double())


def pearson(
    count: Tensor, total: Tensor, square: Tensor, effective_total: Tensor, effective_square: Tensor
) -> Tensor:
    """Correlate all entries of A and A⊥ from their sums (Brunner et al., Fig. 1a).

    Args:
        count: number of entries N.
        total: sum of A.
        square: sum of squares of A.
        effective_total: sum of A⊥.
        effective_square: sum of squares of A⊥, which is also `⟨A, A⊥⟩`.

    Returns:
        Pearson's r in `[−1, 1]`, NaN where either is constant.
    """
    count = count.clamp(min=1)
    covariance = effective_square - total * effective_total / count
    variance = square - total.square() / count
    effective_variance = effective_square - effective_total.square() / count
    varies = (variance > _CONSTANT * square) & (effective_variance > _CONSTANT * effective_square)
    spread = torch.where(varies, variance * effective_variance, torch.nan).sqrt()
    return (covariance / spread).clamp(-1, 1)


def _keys_of_heads(support: Support, heads: int) -> Tensor:
    """The real keys of value heads, `[B, 1 or Hv, K]`, which the heads of a group share."""
    keys = support.keys
    return keys if keys.shape[1] in (1, heads) else keys.unflatten(1, (heads, -1))[:, :, 0]


def _whitening(values: Tensor, gram: Tensor, keys: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """W with `W Wᵀ = G⁺` and the rank over all real keys, `[B, Hv, E, E]` and `[B, Hv]`."""
    batch, heads, tokens, width = values.shape
    whitening = factor_values(values, gram, keys.expand(batch, heads, tokens), rtol)
    factor = whitening.factor.reshape(batch, heads, width, width)
    return factor, whitening.rank.reshape(batch, heads)


def _condition(gram: Tensor, rank: Tensor, root: Tensor | None, groups: int) -> Tensor:
    """Condition number of T, `[B, H]`, from `VᵀV` `[B, Hv, E, E]` and a root of `H Hᵀ`."""
    if root is None:
        return _gram_condition(gram, rank).repeat_interleave(groups, 1)
    gram, rank = (tensor.repeat_interleave(groups, 1) for tensor in (gram, rank))
    return _gram_condition(root.mT @ gram @ root, rank)


def _gram_condition(gram: Tensor, rank: Tensor) -> Tensor:
    sigma = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1)
    last = (rank - 1).clamp(min=0)[..., None]
    return sigma[..., 0] / sigma.gather(-1, last)[..., 0]


def _shared_parts(
    value_total: Tensor, context_total: Tensor, factor: Tensor, rank: Tensor, support: Support
) -> dict[str, Tensor]:
    """Null-space fields where all rows of an example share their keys."""
    tokens = support.tokens.double().expand(context_total.shape[:2])
    ones = torch.einsum("bhe,bhef->bhf", value_total, factor)  # 1ᵀU: [B, Hv, R]
    seen = torch.einsum("bhf,bhef->bhe", ones, factor)  # G⁺ Vᵀ1: [B, Hv, E]
    groups = tokens.shape[1] // rank.shape[1]
    if groups > 1:
        ones, seen, rank = (t.repeat_interleave(groups, 1) for t in (ones, seen, rank))
    outside = (rank < tokens) & (tokens - ones.square().sum(-1) > _INSIDE * tokens)
    nullity = tokens - rank
    return {
        "rank": rank.double(),
        "nullity": nullity,
        "nullity_min": nullity,
        "nullity_max": nullity,
        "simplex_nullity": nullity - outside.double(),
        "effective_total": torch.linalg.vecdot(context_total, seen),
    }


def _rowwise_parts(
    values: Tensor, context: Tensor, active: Tensor, support: Support, rtol: float, groups: int
) -> dict[str, Tensor]:
    """Null-space fields where the keys differ by row: means over real rows."""
    batch, heads, queries, _ = context.shape
    values = values.repeat_interleave(groups, 1)
    basis = RowwiseBasis(values, support, rtol, False, torch.float64)
    rank = context.new_zeros(batch, heads, queries)
    outside, square, total = (torch.zeros_like(rank) for _ in range(3))
    for chunk in basis.groups():
        output = chunk.take(context)
        keys = chunk.keys.to(values.dtype)
        column = keys @ chunk.values
        ones = torch.einsum("hge,hgef->hgf", column, chunk.whitening.factor)
        coordinates = chunk.coordinates(output)
        size = keys.sum(-1)
        found = chunk.whitening.rank
        escapes = (found < size) & (size - ones.square().sum(-1) > _INSIDE * size)
        chunk.scatter(rank, chunk.per_row(found))
        chunk.scatter(outside, chunk.per_row(escapes))
        chunk.scatter(square, coordinates.square().sum(-1))
        chunk.scatter(total, (coordinates * chunk.per_row(ones)).sum(-1))
    real = active.to(rank.dtype).expand_as(rank)
    count = real.sum(-1).clamp(min=1)
    nullity = (basis.tokens - rank) * real

    def mean(quantity: Tensor) -> Tensor:
        return (quantity * real).sum(-1) / count

    return {
        "rank": mean(rank),
        "nullity": mean(nullity),
        "nullity_min": nullity.masked_fill(real == 0, torch.inf).amin(-1),
        "nullity_max": nullity.amax(-1),
        "simplex_nullity": mean(nullity - outside),
        "effective_square": (square * real).sum(-1),
        "effective_total": (total * real).sum(-1),
    }
