"""Witnesses: other attention matrices that give the same head output, constructed in float64.

A simplex witness is any other row-stochastic matrix. A softmax witness is one that a head of the
same width produces, softmax(Q'K'ᵀ·s), found by walking along the fibre {(Q, K) : AV unchanged}.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnlens.algebra.factors import SharedFactor
from attnlens.algebra.problem import Problem, plain_problem
from attnlens.algebra.values import repeated, require_finite
from attnlens.errors import InputError
from attnlens.identifiability.dimensions import check_heads, identifiability_of
from attnlens.identifiability.fibre import TINY, Heads, polish, relative_change, walk
from attnlens.kernels.ranks import rank_threshold
from attnlens.kernels.torch_gram import selected_rows
from attnlens.results import Result
from attnlens.saving import storable

_ROUNDS = 10  # affine-scaling steps, after which a row is near a far vertex
_BLOCK = 2**24  # float64 numbers held for one block of rows: 128 MiB
_ROUNDING = 1e-15  # of 1, up to which a row attends to a single key
_LEAST_MOVE = 0.01  # of the distance asked for, below which a head has not moved


@storable()
@dataclass(frozen=True, repr=False)
class SimplexWitness(Result):
    """Another row-stochastic matrix with the same output.

    Attributes:
        attention: a', float64 `[B, H, Q, K]`, rows on the boundary of the simplex where they moved.
        residual: ‖A'T − AT‖ / ‖AT‖ over the rows that count, `[B, H]`.
        total_variation: ½ Σ_j |a'_ij − a_ij|, `[B, H, Q]`, in `[0, 1]`.
        exists: true where `[T, 1]` has a left null space for some row, bool `[B, H]`.
    """

    attention: Tensor
    residual: Tensor
    total_variation: Tensor
    exists: Tensor

    axes: ClassVar = {"example": "", "head": ""}


@storable()
@dataclass(frozen=True, repr=False)
class SoftmaxWitness(Result):
    """Other queries and keys of the same width whose attention gives the same output.

    Attributes:
        attention: a' = softmax(Q'K'ᵀ·s) under the mask, float64 `[B, H, Q, K]`; padded rows zero.
        query: q', float64 `[B, H, Q, R]`; padded rows as given.
        key: k', float64 `[B, H, K, R]`; padded rows as given.
        residual: `‖A'T − AT‖ / ‖AT‖` over the rows that count, `[B, H]`; of V where the output
            projection is not known, or has full rank, which makes no difference.
        distance: `‖A' − A‖ / ‖A‖` over the rows that count, `[B, H]`.
        converged: true where `residual` is within tolerance and A moved by at least a hundredth
            of the distance asked for, bool `[B, H]`. Sharp heads may stop short: see `distance`.
        exists: true where the family of alternatives has positive dimension, bool `[B, H]`.
        single: share of the rows that attend to a single key, to rounding; no small change of
            queries and keys moves them, `[B, H]` in `[0, 1]`.
    """

    attention: Tensor
    query: Tensor
    key: Tensor
    residual: Tensor
    distance: Tensor
    converged: Tensor
    exists: Tensor
    single: Tensor

    def verdict(self, example: int, head: int) -> str:
        """Say in words what was found for one head, and if nothing, why.

        Args:
            example: index into B.
            head: index into H.

        Returns:
            A sentence.
        """
        residual, distance, single = (
            float(part[example, head]) for part in (self.residual, self.distance, self.single)
        )
        if bool(self.converged[example, head]):
            return f"A' differs from A by {distance:.3g} of ‖A‖, and its output by {residual:.1e}."
        if not bool(self.exists[example, head]):
            return "No head of this width has other attention near A with the same output."
        if single == 1:
            return (
                "Every row attends to a single key, to rounding, so no small change of queries and "
                "keys moves A."
            )
        sharp = f" {single:.0%} of its rows attend to a single key." if single else ""
        return (
            f"A family exists, but the walk ended {distance:.1e} of ‖A‖ from A with the output off "
            f"by {residual:.1e}.{sharp}"
        )

    axes: ClassVar = {"example": "", "head": ""}


@storable()
@dataclass(frozen=True, repr=False)
class RealisabilityRank(Result):
    """Ranks of row-centred logarithms, to compare with the width of a head.

    Attributes:
        rank: rank of the row-centred log of a simplex witness, `[B, H]`.
        attention_rank: the same for A itself, at most `query_width` if A is a softmax, `[B, H]`.
        query_width: width R of queries and keys.
    """

    rank: Tensor
    attention_rank: Tensor
    query_width: int

    axes: ClassVar = {"example": "", "head": ""}


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

    A row first moves within the left null space of `[T, 1]` towards higher entropy plus a random
    direction, then uphill in total variation. Directions are projected in the metric of the row's
    own entries (affine scaling), so that small probabilities do not block the way; the last step
    ends where an entry reaches zero. Entries that are zero stay zero.

    Args:
        attention: attention probabilities A, `[B, H, Q, K]`.
        value: values V, `[B, H, K, D]`.
        mask: bool, True = may attend, broadcastable to `[B, H, Q, K]`; may vary by row.
        projection: output projection per head, `[H, D, M]`; matters only if its rank is below D.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`.
        cross: whether queries and keys are different tokens, even where there are as many.
        generator: source of the first direction; a fixed seed by default.

    Returns:
        A' with its residual and distances; A' = A where none exists.

    Raises:
        InputError: if shapes do not fit together.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1.
        Dikin, "Iterative solution of problems of linear and quadratic programming", 1967.

    Examples:
        >>> attention = torch.tensor([[[[0.5, 0.3, 0.2]]]])
        >>> value = torch.tensor([[[[1.0], [1.0], [0.0]]]])  # the first two values are equal
        >>> found = simplex_witness(attention, value)
        >>> found.exists, found.total_variation  # what went to the second goes to the first
        (tensor([[True]]), tensor([[[0.3000]]], dtype=torch.float64))
    """
    if attention.ndim != 4 or attention.shape[:2] + attention.shape[3:] != value.shape[:3]:
        raise InputError(
            "attention and value must be [B, H, Q, K] and [B, H, K, D]. Got "
            f"{list(attention.shape)} and {list(value.shape)}."
        )
    posed = plain_problem(
        value, attention.shape[2], mask=mask, projection=projection, rtol=rtol, cross=cross
    )
    return simplex_witness_of(posed, attention, generator)


@torch.no_grad()
def simplex_witness_of(
    problem: Problem, attention: Tensor, generator: torch.Generator | None = None
) -> SimplexWitness:
    """Construct a witness as :func:`simplex_witness` does.

    Args:
        problem: the call.
        attention: A, `[B, H, Q, K]`.
        generator: source of the first direction; a fixed seed by default.

    Returns:
        A' with its residual and distances; A' = A where none exists.
    """
    visible = problem.support.mask() & problem.active[..., None]
    counted = attention.double().masked_fill(~visible, 0.0)
    require_finite(counted, "attention")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    moved, free = counted.clone(), torch.zeros_like(problem.active)
    factor = problem.factor
    if isinstance(factor, SharedFactor):
        basis = factor.basis(simplex=True).for_heads(problem.heads, torch.float64)
        free |= (basis.rank < basis.tokens)[..., None] & problem.active
        columns = basis.basis[:, :, None]
        for some in _row_blocks(attention.shape[2], counted[:, :, 0].numel() * columns.shape[-1]):
            moved[:, :, some] = _farthest_rows(
                counted[:, :, some], columns, free[:, :, some], generator
            )
    else:
        for chunk in factor.groups():
            roomy = chunk.per_row(chunk.simplex_rank < chunk.sizes)
            chunk.scatter(free, roomy)
            rows = chunk.take(counted[..., chunk.span])  # [h, g, r, k]
            columns = chunk.per_row(chunk.simplex_basis())
            far = _farthest_rows(rows, columns, roomy.expand(rows.shape[:3]), generator)
            chunk.scatter(moved[..., chunk.span], far)
    values = repeated(
        selected_rows(problem.values, problem.support.keys, torch.float64), problem.heads
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
        attention: A, `[B, H, Q, K]`.
        value: `[B, H, K, D]`.
        query_width: width R of queries and keys.
        mask: bool padding mask, True = may attend, broadcastable to `[B, H, Q, K]`.
        bias: position bias added to the logits, broadcastable to `[B, H, Q, K]`; it is held fixed.
        rtol: singular values up to `rtol` times the largest count as zero; by default
            `max(n, R) · eps(float32)`.
        cross: whether queries and keys are different tokens, even where there are as many.
        generator: source of the witness's direction; a fixed seed by default.

    Returns:
        Ranks of the witness and of A.

    Raises:
        InputError: if shapes do not fit together, or the mask varies by row.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1 and its
        public reviews.

    Examples:
        >>> generator = torch.Generator().manual_seed(0)
        >>> query, key, value = torch.randn(3, 1, 1, 9, 2, generator=generator).double()
        >>> attention = torch.softmax(query @ key.mT, -1)
        >>> found = realisability_rank(attention, value, query_width=2)
        >>> found.attention_rank.item(), found.rank.item() > 2
        (2, True)
    """
    posed = plain_problem(value, attention.shape[2], mask=mask, cross=cross)
    return realisability_rank_of(
        posed, attention, query_width=query_width, bias=bias, rtol=rtol, generator=generator
    )


@torch.no_grad()
def realisability_rank_of(
    problem: Problem,
    attention: Tensor,
    *,
    query_width: int,
    bias: Tensor | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
) -> RealisabilityRank:
    """Compare as :func:`realisability_rank` does.

    Args:
        problem: the call.
        attention: A, `[B, H, Q, K]`.
        query_width: width R of queries and keys.
        bias: position bias added to the logits, broadcastable to `[B, H, Q, K]`.
        rtol: singular values up to `rtol` times the largest count as zero.
        generator: source of the witness's direction; a fixed seed by default.

    Returns:
        Ranks of the witness and of A.
    """
    _require_shared_keys(problem)
    witness = simplex_witness_of(problem, attention, generator)
    visible = problem.support.mask() & problem.active[..., None]
    original = attention.double()
    halfway = (original + witness.attention) / 2
    tokens = problem.support.tokens.expand(original.shape[:2])
    cut = rank_threshold(tokens, query_width, rtol)
    rank, attention_rank = (
        torch.linalg.matrix_rank(_centred_logits(matrix, bias, visible), rtol=cut)
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
    projection: Tensor | None = None,
    scaling: float | None = None,
    cross: bool = False,
    distance: float = 0.1,
    tolerance: float = 1e-10,
    max_iterations: int = 30,
    generator: torch.Generator | None = None,
) -> SoftmaxWitness:
    """Construct queries and keys of the same width with another A' but the same output.

    Each head walks along its fibre {(Q, K) : softmax(QKᵀ·s)T unchanged}: a step in the null space
    of the output's derivative that climbs ‖A' − A‖, then damped Gauss-Newton steps back to the
    fibre. Steps are shortest in the Fisher metric of the rows, token by token, so they are
    orthogonal to every change of (Q, K) that leaves A alone. No Jacobian is formed. Sharp heads
    have little room (their rows sit near vertices of the simplex) and may stop short;
    :meth:`SoftmaxWitness.verdict` says what happened.

    Args:
        query: `[B, H, Q, R]`.
        key: `[B, H, K, R]`, grouped heads repeated.
        value: `[B, H, K, D]`.
        mask: bool padding mask, True = may attend, broadcastable to `[B, H, Q, K]`.
        bias: position bias added to the logits, broadcastable to `[B, H, Q, K]`; it is held fixed.
        projection: `[H, D, M]` output projection per head, which matters only where its rank is
            below D: more of A is then free, and the residual is that of `T = V H`.
        scaling: factor s of the logits; `R^-½` by default.
        cross: whether queries and keys are different tokens, even where there are as many.
        distance: wanted `‖A' − A‖ / ‖A‖`, reached to a few per cent where there is room.
        tolerance: largest accepted `‖A'T − AT‖ / ‖AT‖`.
        max_iterations: largest number of steps of the walk.
        generator: source of the first direction; a fixed seed by default.

    Returns:
        Q', K' and A' with residual and distance; those given where no witness exists.

    Raises:
        InputError: if shapes do not fit, `distance` is not positive or the mask varies by row.
        NonFiniteError: if a query, key or value that takes part is not finite.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1, whose
        argument covers row-stochastic matrices only.

    Examples:
        >>> generator = torch.Generator().manual_seed(0)
        >>> query, key, value = torch.randn(3, 1, 1, 8, 3, generator=generator).double()
        >>> found = softmax_witness(query, key, value)
        >>> found.converged.item(), found.distance.item() > 0.09
        (True, True)
    """
    check_heads(query, key, value)
    posed = plain_problem(value, query.shape[2], mask=mask, projection=projection, cross=cross)
    return softmax_witness_of(
        posed,
        query,
        key,
        bias=bias,
        scaling=scaling,
        distance=distance,
        tolerance=tolerance,
        max_iterations=max_iterations,
        generator=generator,
    )


@torch.no_grad()
def softmax_witness_of(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: float | None = None,
    distance: float = 0.1,
    tolerance: float = 1e-10,
    max_iterations: int = 30,
    generator: torch.Generator | None = None,
) -> SoftmaxWitness:
    """Construct a witness as :func:`softmax_witness` does.

    Args:
        problem: the call.
        query: `[B, H, Q, R]`.
        key: `[B, H, K, R]`, grouped heads repeated.
        bias: position bias added to the logits, broadcastable to `[B, H, Q, K]`.
        scaling: factor s of the logits; `R^-½` by default.
        distance: wanted `‖A' − A‖ / ‖A‖`.
        tolerance: largest accepted `‖A'T − AT‖ / ‖AT‖`.
        max_iterations: largest number of steps of the walk.
        generator: source of the first direction; a fixed seed by default.

    Returns:
        Q', K' and A' with residual and distance; those given where no witness exists.

    Raises:
        InputError: if `distance` is not positive or the mask varies by row.
    """
    if distance <= 0:
        raise InputError(f"distance must be positive. Got {distance}.")
    _require_shared_keys(problem)
    rows, keys = problem.active, problem.support.keys.expand(*query.shape[:2], -1)
    real = torch.cat([rows, keys], dim=-1)[..., None]
    given = torch.cat([query, key], dim=-2).double()
    taken = given.masked_fill(~real, 0.0)
    queries, others = taken[..., : query.shape[-2], :], taken[..., query.shape[-2] :, :]
    require_finite(queries, "query")
    require_finite(others, "key")
    values = repeated(selected_rows(problem.values, keys, torch.float64), problem.heads)
    found = identifiability_of(problem, query.shape[-1])
    assert found.softmax_dimension is not None
    exists = found.softmax_dimension > 0
    # equal values give every softmax the same output; their rounding must not stand in the way
    equal = found.tokens - found.simplex_nullity <= 1
    felt = values.masked_fill(equal[..., None, None], 0.0)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    visible = keys[..., None, :] & rows[..., None]
    tensors = [queries, others, felt, visible]
    if bias is not None:
        tensors.append(bias.double().expand_as(visible))
    origin = Heads(*(tensor.flatten(0, 1) for tensor in tensors), scale=scale)
    attention = origin.attention.view_as(visible)
    far = simplex_witness_of(problem, attention, generator)
    moving = exists.flatten().nonzero().squeeze(-1)
    part, start = origin.take(moving), far.attention.flatten(0, 1)[moving]
    walked = walk(part, start - part.attention, distance, max_iterations)
    point = origin.point.index_copy(0, moving, polish(part, walked, tolerance))
    new_attention = origin.at(point).attention.view_as(visible)
    moved = relative_change(new_attention - attention, attention)
    residual = relative_change((new_attention - attention) @ values, attention @ values)
    new = torch.where(real, point.view_as(given), given)
    single = (attention.amax(-1) >= 1 - _ROUNDING) & rows
    return SoftmaxWitness(
        attention=new_attention,
        query=new[..., : query.shape[-2], :],
        key=new[..., query.shape[-2] :, :],
        residual=residual,
        distance=moved,
        converged=exists & (residual <= tolerance) & (moved >= _LEAST_MOVE * distance),
        exists=exists,
        single=single.sum(-1) / rows.sum(-1).clamp(min=1),
    )


def _require_shared_keys(problem: Problem) -> None:
    if not problem.support.shared:
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


def _farthest_rows(
    attention: Tensor, basis: Tensor, free: Tensor, generator: torch.Generator
) -> Tensor:
    """Move rows far from where they are, keeping their products with the basis.

    Args:
        attention: rows A, `[B, H, Q, K]`.
        basis: columns to stay orthogonal to, `[B, H, G, K, R]`.
        free: rows that may move, `[B, H, Q]`.
        generator: source of the first direction.

    Returns:
        Rows A' ≥ 0, `[B, H, Q, K]`.
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
    """Return `uphill` projected onto {δ : δᵀ·basis = 0} in the metric diag(rows)⁻²."""
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
    """Return the largest multiple of the step that keeps rows ≥ 0, `[B, H, Q, 1]`; 0 for none."""
    limits = torch.where(step < 0, rows / -step, torch.inf).amin(-1, keepdim=True)
    return limits.masked_fill(limits.isinf(), 0.0)
