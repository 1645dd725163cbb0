"""Witnesses: other attention matrices that give the same head output, constructed in float64.

A simplex witness is any other row-stochastic matrix. A softmax witness is one that a head of the
same width produces, softmax(Q'K'ᵀ·s), found by walking along the fibre {(Q, K) : AV unchanged}.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.algebra.moments import (
    check_finite,
    check_heads,
    output_values,
    value_moments,
    visibility,
)
from attnlens.errors import InputError
from attnlens.identifiability.dimensions import softmax_dimension
from attnlens.identifiability.fibre import TINY, Heads, polish, relative_change, walk
from attnlens.saving import storable

_ROUNDS = 10  # affine-scaling steps, after which a row is near a far vertex
_BLOCK = 2**24  # float64 numbers held for one block of rows: 128 MiB
_LEAST_MOVE = 0.01  # of the distance asked for, below which a head has not moved


@storable()
@dataclass(frozen=True)
class SimplexWitness:
    """Another row-stochastic matrix with the same output.

    Attributes:
        attention: A', float64 [B, H, Q, K], rows on the boundary of the simplex where they moved.
        residual: ‖A'T − AT‖ / ‖AT‖ over the rows that count, [B, H].
        total_variation: ½ Σ_j |a'_ij − a_ij|, [B, H, Q], in [0, 1].
        exists: True where [T, 1] has a left null space for some row, bool [B, H].
    """

    attention: Tensor
    residual: Tensor
    total_variation: Tensor
    exists: Tensor


@storable()
@dataclass(frozen=True)
class SoftmaxWitness:
    """Other queries and keys of the same width whose attention gives the same output.

    Attributes:
        attention: A' = softmax(Q'K'ᵀ·s) under the mask, float64 [B, H, Q, K]; padded rows zero.
        query: Q', float64 [B, H, Q, R]; padded rows as given.
        key: K', float64 [B, H, K, R]; padded rows as given.
        residual: ‖A'V − AV‖ / ‖AV‖ over the rows that count, [B, H].
        distance: ‖A' − A‖ / ‖A‖ over the rows that count, [B, H].
        converged: True where ``residual`` is within tolerance and A moved by at least a hundredth
            of the distance asked for, bool [B, H]. Sharp heads may stop short: see ``distance``.
        exists: True where the family of alternatives has positive dimension, bool [B, H].
    """

    attention: Tensor
    query: Tensor
    key: Tensor
    residual: Tensor
    distance: Tensor
    converged: Tensor
    exists: Tensor


@storable()
@dataclass(frozen=True)
class RealisabilityRank:
    """Ranks of row-centred logarithms, to compare with the width of a head.

    Attributes:
        rank: Rank of the row-centred log of a simplex witness, [B, H].
        attention_rank: The same for A itself, at most ``query_width`` if A is a softmax, [B, H].
        query_width: Width R of queries and keys.
    """

    rank: Tensor
    attention_rank: Tensor
    query_width: int


@torch.no_grad()
def simplex_witness(
    attention: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    rtol: float | None = None,
    cross: bool = False,
    generator: torch.Generator | None = None,
) -> SimplexWitness:
    """Construct a row-stochastic A' with A'T = AT, far from A.

    A row first moves within the left null space of [T, 1] towards higher entropy plus a random
    direction, then uphill in total variation. Directions are projected in the metric of the row's
    own entries (affine scaling), so that small probabilities do not block the way; the last step
    ends where an entry reaches zero. Entries that are zero stay zero.

    Args:
        attention: Attention probabilities A, [B, H, Q, K].
        value: Values V, [B, H, K, D].
        mask: Boolean, True = may attend, broadcastable to [B, H, Q, K]; may vary by row.
        projection: Output projection per head, [H, D, M]; matters only if its rank is below D.
        rtol: Relative tolerance of the numerical rank, in [1e-7, 1).
        cross: Queries and keys are different tokens, even where there are as many.
        generator: Source of the first direction; a fixed seed by default.

    Returns:
        A' with its residual and distances; A' = A where none exists.

    Raises:
        InputError: If shapes do not fit together.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1.
        Dikin, "Iterative solution of problems of linear and quadratic programming", 1967.
    """
    if attention.ndim != 4 or attention.shape[:2] + attention.shape[3:] != value.shape[:3]:
        raise InputError(
            "attention and value must be [B, H, Q, K] and [B, H, K, D], got "
            f"{list(attention.shape)} and {list(value.shape)}"
        )
    groups, rows = visibility(mask, attention, value, cross=cross)
    values = output_values(value, groups, projection)
    counted = attention.double().masked_fill(~(groups & rows[..., None]), 0.0)
    check_finite(attention=counted)
    moved, free = counted.clone(), torch.zeros_like(rows)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    for block in _row_blocks(attention.shape[2], counted[:, :, 0].numel() * value.shape[-1]):
        seen = groups if groups.shape[-2] == 1 else groups[..., block, :]
        basis, freedom = _constraint_basis(values, seen, rtol)
        free[..., block] = (freedom > 0) & rows[..., block]
        moved[..., block, :] = _farthest_rows(
            counted[..., block, :], basis, free[..., block], generator
        )
    change = moved - counted
    return SimplexWitness(
        attention=attention.double() + change,
        residual=relative_change(change @ values, counted @ values),
        total_variation=change.abs().sum(-1) / 2,
        exists=free.any(-1),
    )


@torch.no_grad()
def realisability_rank(
    attention: Tensor,
    value: Tensor,
    *,
    query_width: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    rtol: float | None = None,
    cross: bool = False,
    generator: torch.Generator | None = None,
) -> RealisabilityRank:
    """Compare the rank of a simplex witness's logits with the width of a head.

    The logits of softmax(QKᵀ·s) are log A up to a constant per row, so the row-centred logarithm
    of a matrix that a head of width R produces has rank at most R. The witness tested lies halfway
    to the boundary of the simplex. Its rank is normally far above R. **That alone does not show
    identifiability**: it says that this witness cannot be produced, not that none can;
    :func:`softmax_witness` constructs some that can.

    Args:
        attention: Attention probabilities A, [B, H, Q, K].
        value: Values V, [B, H, K, D].
        query_width: Width R of queries and keys.
        mask: Boolean padding mask, True = may attend, broadcastable to [B, H, Q, K].
        bias: Position bias added to the logits, broadcastable to [B, H, Q, K]; it is held fixed.
        rtol: Singular values up to ``rtol`` times the largest count as zero; by default
            max(n, R) · eps(float32).
        cross: Queries and keys are different tokens, even where there are as many.
        generator: Source of the witness's direction; a fixed seed by default.

    Returns:
        Ranks of the witness and of A.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1 and its
        public reviews.
    """
    groups, rows = visibility(mask, attention, value, cross=cross)
    _require_shared_keys(groups)
    witness = simplex_witness(attention, value, mask=mask, cross=cross, generator=generator)
    visible = groups & rows[..., None]
    original = attention.double()
    halfway = (original + witness.attention) / 2
    tolerance = groups.sum((-1, -2)).clamp_min(query_width) * torch.finfo(torch.float32).eps
    cut = tolerance if rtol is None else torch.full_like(tolerance, rtol)
    rank, attention_rank = (
        torch.linalg.matrix_rank(_centred_logits(matrix, bias, visible), rtol=cut.double())
        for matrix in (halfway, original)
    )
    return RealisabilityRank(rank, attention_rank, query_width)


@torch.no_grad()
def softmax_witness(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scaling: float | None = None,
    cross: bool = False,
    distance: float = 0.1,
    tolerance: float = 1e-10,
    max_iterations: int = 30,
    generator: torch.Generator | None = None,
) -> SoftmaxWitness:
    """Construct queries and keys of the same width with another A' but the same output.

    Each head walks along its fibre {(Q, K) : softmax(QKᵀ·s)V unchanged}: a step in the null space
    of the output's derivative that climbs ‖A' − A‖, then damped Gauss-Newton steps back to the
    fibre. Steps are shortest in the Fisher metric of the rows, token by token, so they are
    orthogonal to every change of (Q, K) that leaves A alone. No Jacobian is formed. Sharp heads
    have little room (their rows sit near vertices of the simplex) and may stop short.

    Args:
        query: Queries, [B, H, Q, R].
        key: Keys, [B, H, K, R], grouped-query heads repeated.
        value: Values, [B, H, K, D].
        mask: Boolean padding mask, True = may attend, broadcastable to [B, H, Q, K].
        bias: Position bias added to the logits, broadcastable to [B, H, Q, K]; it is held fixed.
        scaling: Factor s of the logits; R^-½ by default.
        cross: Queries and keys are different tokens, even where there are as many.
        distance: Wanted ‖A' − A‖ / ‖A‖, reached to a few per cent where there is room.
        tolerance: Largest accepted ‖A'V − AV‖ / ‖AV‖.
        max_iterations: Largest number of steps of the walk.
        generator: Source of the first direction; a fixed seed by default.

    Returns:
        Q', K' and A' with residual and distance; those given where no witness exists.

    Raises:
        InputError: If shapes do not fit, ``distance`` is not positive or the mask varies by row.
    """
    check_heads(query, key, value)
    if distance <= 0:
        raise InputError(f"distance must be positive, got {distance}")
    groups, rows = visibility(mask, query, key, cross=cross)
    _require_shared_keys(groups)
    real = torch.cat([rows, groups.squeeze(-2)], dim=-1)[..., None]
    given = torch.cat([query, key], dim=-2).double()
    queries, keys = given.masked_fill(~real, 0.0).split([query.shape[-2], key.shape[-2]], dim=-2)
    check_finite(query=queries, key=keys)
    values = output_values(value, groups, None)
    exists = _realisable(values, groups, rows, query.shape[-1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    visible = groups & rows[..., None]
    tensors = [queries, keys, values, visible]
    if bias is not None:
        tensors.append(bias.double().expand_as(visible))
    origin = Heads(*(tensor.flatten(0, 1) for tensor in tensors), scale=scale)
    attention = origin.attention.view_as(visible)
    far = simplex_witness(attention, values, mask=mask, cross=cross, generator=generator)
    moving = exists.flatten().nonzero().squeeze(-1)
    part, start = origin.take(moving), far.attention.flatten(0, 1)[moving]
    walked = walk(part, start - part.attention, distance, max_iterations)
    point = origin.point.index_copy(0, moving, polish(part, walked, tolerance))
    found = origin.at(point)
    moved = relative_change(found.attention - origin.attention, origin.attention).view_as(exists)
    residual = found.miss(origin).view_as(exists)
    new = torch.where(real, point.view_as(given), given)
    return SoftmaxWitness(
        attention=found.attention.view_as(visible),
        query=new[..., : query.shape[-2], :],
        key=new[..., query.shape[-2] :, :],
        residual=residual,
        distance=moved,
        converged=exists & (residual <= tolerance) & (moved >= _LEAST_MOVE * distance),
        exists=exists,
    )


def _realisable(values: Tensor, groups: Tensor, rows: Tensor, width: int) -> Tensor:
    """Return where heads of this width have a family of alternatives, bool [B, H]."""
    moments = value_moments(values, groups, None)
    tokens, contrasts = moments.tokens.squeeze(-1), moments.rank_with_ones.squeeze(-1) - 1
    return softmax_dimension(tokens, width, contrasts, queries=rows.sum(-1)) > 0


def _require_shared_keys(groups: Tensor) -> None:
    if groups.shape[-2] != 1:
        raise InputError(
            "the mask varies by row (causal, window or packed); only padding masks are supported "
            "here. simplex_witness and identifiability accept any mask"
        )


def _centred_logits(attention: Tensor, bias: Tensor | None, visible: Tensor) -> Tensor:
    """Return each row's logits less the bias and their mean over visible keys; 0 where hidden."""
    logits = attention.clamp_min(TINY).log()
    if bias is not None:
        logits = logits - bias.double()
    logits = logits.masked_fill(~visible, 0.0)
    mean = logits.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    return (logits - mean).masked_fill(~visible, 0.0)


def _row_blocks(queries: int, numbers_per_row: int) -> list[slice]:
    size = max(1, _BLOCK // max(1, numbers_per_row))
    return [slice(first, first + size) for first in range(0, queries, size)]


def _constraint_basis(values: Tensor, groups: Tensor, rtol: float | None) -> tuple[Tensor, Tensor]:
    """Basis of the columns of [T, 1] on the visible keys, and the freedom left to a row.

    Returns:
        Basis, [B, H, G, K, D + 1], its last columns zero if the rank is below D + 1, and the
        dimension of the left null space, [B, H, G].
    """
    moments = value_moments(values, groups, rtol)
    squares, axes = (entry.flip(-1) for entry in torch.linalg.eigh(moments.centred))
    kept = squares > moments.cut
    scale = torch.where(kept, squares.clamp_min(TINY).rsqrt(), 0.0)
    centred = values[:, :, None] - moments.mean[..., None, :]
    ones = moments.tokens.clamp_min(1).to(values)[..., None, None].rsqrt()
    basis = torch.cat(
        [ones.expand(*groups.shape, 1), centred @ (axes * scale[..., None, :])], dim=-1
    )
    return basis * groups[..., None], moments.tokens - moments.rank_with_ones


def _farthest_rows(
    attention: Tensor, basis: Tensor, free: Tensor, generator: torch.Generator
) -> Tensor:
    """Move rows far from where they are, keeping their products with the basis.

    Args:
        attention: Rows A, [B, H, Q, K].
        basis: Columns to stay orthogonal to, [B, H, G, K, R].
        free: Rows that may move, [B, H, Q].
        generator: Source of the first direction.

    Returns:
        Rows A' ≥ 0, [B, H, Q, K].
    """
    shape, device = attention.shape, generator.device
    noise = torch.randn(shape, generator=generator, dtype=attention.dtype, device=device)
    # The gradient of entropy: sharp rows have room only towards more even ones.
    uphill = noise.to(attention.device) - attention.clamp_min(TINY).log()
    moved = attention
    for remaining in reversed(range(_ROUNDS)):
        step = _null_step(moved, basis, uphill)
        # Short of the boundary until the last step: an entry at zero would stay there.
        length = _room(moved, step) * (0.98 if remaining else 1.0)
        moved = (moved + step * length.masked_fill(~free[..., None], 0.0)).clamp_min(0.0)
        uphill = (moved - attention).sign()
    return moved


def _null_step(rows: Tensor, basis: Tensor, uphill: Tensor) -> Tensor:
    """Return ``uphill`` projected onto {δ : δᵀ·basis = 0} in the metric diag(rows)⁻²."""
    weighted = rows * uphill
    columns = torch.linalg.qr(rows[..., None] * basis)[0]
    # Columns for the zero columns of the basis are arbitrary and constrain nothing.
    columns = columns * basis.any(-2, keepdim=True)[..., : columns.shape[-1]]
    left = weighted[..., None]
    for _ in range(2):
        left = left - columns @ (columns.mT @ left)
    left = left.squeeze(-1)
    noise = left.norm(dim=-1) < 1e-12 * weighted.norm(dim=-1)
    return rows * left.masked_fill(noise[..., None], 0.0)


def _room(rows: Tensor, step: Tensor) -> Tensor:
    """Return the largest multiple of the step that keeps rows ≥ 0, [B, H, Q, 1]; 0 for none."""
    limits = torch.where(step < 0, rows / -step, torch.inf).amin(-1, keepdim=True)
    return limits.masked_fill(limits.isinf(), 0.0)
