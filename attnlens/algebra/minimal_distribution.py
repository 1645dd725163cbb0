"""The distribution of least norm that gives the same output as a row of attention.

For every row `a` of A the quadratic program

    minimise ½ ‖x‖²   subject to   x ≥ 0,   x_j = 0 where j ∉ S_i,   Σ x = Σ a,   x T = a T

is feasible (`a` itself) and strictly convex, so its solution is one. With U an orthonormal basis of
`[T, 1]` over the real keys and `b = a U` the conditions are `x U = b`, and `x = max(U λ, 0)` for a
λ that maximises the dual `⟨b, λ⟩ − ½ ‖max(U λ, 0)‖²`. A primal-dual interior-point method solves
it (Mehrotra 1992), whose systems stay regular where rows are nearly one-hot and Newton's method on
the dual stalls; Newton steps on the dual then find exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.factors import SharedFactor
from attnlens.algebra.problem import Problem
from attnlens.algebra.values import repeated

# Largest residual and duality gap, relative to the row, of a row that counts as solved.
CERTIFIED = 1e-9
_ENOUGH = 1e-12  # where the interior-point method stops
_STEPS = 60
_POLISHING = 4
_CHUNK_ELEMENTS = 1 << 23


class MinimalDistributions(NamedTuple):
    """The simplest attention with the same output, and what certifies it.

    Attributes:
        distribution: x, `[B, H, Q, K]` float64, ≥ 0 exactly, zero at masked keys and in rows that
            do not count.
        residual: `‖x U − a U‖ / ‖a U‖`, `[B, H, Q]`: how far output and sum are kept.
        gap: duality gap relative to `½ ‖x‖²`, `[B, H, Q]`; `‖x − x*‖² ≤ gap ‖x‖²` for the exact
            solution x*.
        unique: `[B, H, Q]` bool, rows where A is the only member: as many independent conditions
            as keys. There x = a.
        converged: `[B, H, Q]` bool, residual and gap are at most 1e-9; true where nothing counts.
    """

    distribution: Tensor
    residual: Tensor
    gap: Tensor
    unique: Tensor
    converged: Tensor


class SolvedRows(NamedTuple):
    """Some rows of one head.

    Attributes:
        example: batch index.
        head: head index.
        rows: `[R]` int64, the query rows.
        attention: a, `[R, K]` float64.
        distribution: x, `[R, K]` float64.
        residual: `[R]`.
        gap: `[R]`.
        unique: `[R]` bool.
    """

    example: int
    head: int
    rows: Tensor
    attention: Tensor
    distribution: Tensor
    residual: Tensor
    gap: Tensor
    unique: Tensor


def solved_rows(problem: Problem) -> Iterator[SolvedRows]:
    """Solve for every row that counts, block by block; heads that are not finite are left out.

    Args:
        problem: the call.

    Yields:
        Rows of one head, in order.
    """
    basis = repeated(problem.over_all_keys.basis(simplex=True).basis, problem.heads)
    unique = _simplex_ranks(problem) == problem.sizes
    size = max(1, _CHUNK_ELEMENTS // max(1, basis.shape[-1] * basis.shape[-2]))
    counted = problem.active & problem.finite[..., None]
    for example, head in counted.any(-1).nonzero().tolist():
        place = torch.tensor([example]), torch.tensor([head])
        support = problem.support.of_heads(*place)
        for part in counted[example, head].nonzero()[:, 0].split(size):
            first, stop = int(part[0]), int(part[-1]) + 1
            seen = support.mask(first, stop)[0, 0, part - first]
            rows = problem.rows.taken(*place, part).attention()[0, 0]
            rows = torch.where(seen, rows, 0.0).double()
            single = unique[example, head, part]
            none = torch.zeros(len(part), dtype=torch.float64, device=rows.device)
            solved = _Certified(rows.clone(), none, none.clone())
            if not bool(single.all()):
                some = ~single
                for whole, found in zip(
                    solved, _solve(basis[example, head], rows[some], seen[some]), strict=True
                ):
                    whole[some] = found
            yield SolvedRows(example, head, part, rows, *solved, single)


def minimal_distributions(problem: Problem) -> MinimalDistributions:
    """Find the distribution of least norm for every row that counts.

    Args:
        problem: the call.

    Returns:
        The distributions with their certificates; NaN in heads whose values are not finite.
    """
    shape = problem.rows.shape
    blank = torch.zeros(shape[:3], dtype=torch.float64, device=problem.active.device)
    distribution = blank.new_zeros(shape)
    residual, gap, unique = blank, blank.clone(), blank.bool()
    for part in solved_rows(problem):
        place = (part.example, part.head, part.rows)
        distribution[place] = part.distribution
        residual[place], gap[place], unique[place] = part.residual, part.gap, part.unique
    finite = problem.finite[..., None]
    converged = (residual <= CERTIFIED) & (gap <= CERTIFIED) & finite
    distribution = torch.where(finite[..., None], distribution, torch.nan)
    return MinimalDistributions(distribution, residual, gap, unique, converged)


def _simplex_ranks(problem: Problem) -> Tensor:
    """Rank of `[T, 1]` over the keys of every row, `[B, H, Q]`; 0 in rows that do not count."""
    factor = problem.factor
    if isinstance(factor, SharedFactor):
        rank = repeated(factor.simplex_rank, problem.heads)[..., None]
        return torch.where(problem.active, rank, 0)
    ranks = torch.zeros_like(problem.sizes)
    for chunk in factor.groups():
        chunk.scatter(ranks, chunk.per_row(chunk.simplex_rank))
    return ranks


class _Certified(NamedTuple):
    """x, `[R, K]`, its relative residual and duality gap, `[R]`."""

    point: Tensor
    residual: Tensor
    gap: Tensor


def _solve(basis: Tensor, rows: Tensor, visible: Tensor) -> _Certified:
    """Solve for some rows of one head.

    Args:
        basis: U, `[K, E]`.
        rows: a, `[R, K]`.
        visible: `[R, K]` bool.

    Returns:
        The solutions.
    """
    target = rows @ basis
    point, dual, slack = _interior_point(basis, target, visible)
    best = _certified(basis, target, visible, point, dual)
    best = _better(best, _certified(basis, target, visible, point.where(point > slack, 0.0), dual))
    for _ in range(_POLISHING):  # x = max(U λ, 0)
        value = torch.where(visible, dual @ basis.T, 0.0)
        rest = value.relu() @ basis - target
        factor = _factor(basis, (value > 0).double())
        dual = dual - torch.cholesky_solve(rest[..., None], factor)[..., 0]
        value = torch.where(visible, dual @ basis.T, 0.0).relu()
        best = _better(best, _certified(basis, target, visible, value, dual))
    return best


def _better(old: _Certified, new: _Certified) -> _Certified:
    """Take what has exact zeros, row by row, unless it is further from the solution."""
    errors = [torch.maximum(one.residual, one.gap) for one in (old, new)]
    take = errors[1] <= errors[0].clamp(min=_ENOUGH)
    point = torch.where(take[:, None], new.point, old.point)
    return _Certified(
        point, *(torch.where(take, n, o) for n, o in zip(new[1:], old[1:], strict=True))
    )


def _certified(
    basis: Tensor, target: Tensor, visible: Tensor, point: Tensor, dual: Tensor
) -> _Certified:
    """Compare x with its conditions, and with the lower bound that any λ gives."""
    scale = torch.linalg.vector_norm(target, dim=-1)
    residual = torch.linalg.vector_norm(point @ basis - target, dim=-1) / scale
    value = torch.where(visible, dual @ basis.T, 0.0).relu()
    square = point.square().sum(-1)
    bound = 2 * (target * dual).sum(-1) - value.square().sum(-1)
    return _Certified(point, residual, (square - bound).abs() / square)


def _factor(basis: Tensor, weights: Tensor) -> Tensor:
    """Cholesky factors of `Uᵀ diag(w) U`, `[R, E, E]`, made regular at the level of rounding."""
    gram: Tensor = (basis.T * weights[:, None]) @ basis
    gram.diagonal(dim1=-2, dim2=-1).add_(1e-13)
    factor: Tensor = torch.linalg.cholesky_ex(gram)[0]
    return factor


def _interior_point(basis: Tensor, target: Tensor, visible: Tensor) -> list[Tensor]:
    """Follow the central path from a point inside; see Nocedal and Wright 2006, section 16.6.

    Args:
        basis: U, `[K, E]`.
        target: b, `[R, E]`.
        visible: `[R, K]` bool.

    Returns:
        x, `[R, K]`, λ, `[R, E]`, and the multipliers of `x ≥ 0`, `[R, K]`.
    """
    scale = torch.linalg.vector_norm(target, dim=-1, keepdim=True)
    count = visible.sum(-1, keepdim=True).double()
    free = target @ basis.T
    margin = 0.1 * scale / count.sqrt()
    state = [
        torch.where(visible, free.clamp(min=0) + margin, 0.0),  # x
        target.clone(),  # λ
        torch.where(visible, (-free).clamp(min=0) + 2 * margin, 0.0),  # μ, the multipliers of x ≥ 0
    ]
    result = [part.clone() for part in state]
    left = torch.arange(len(target), device=target.device)
    for _ in range(_STEPS):
        x, dual, slack = state
        seen, size = visible[left], scale[left]
        primal = x @ basis - target[left]
        stationary = torch.where(seen, x - dual @ basis.T - slack, 0.0)
        mean = (x * slack).sum(-1, keepdim=True) / count[left]
        errors = [torch.linalg.vector_norm(e, dim=-1, keepdim=True) for e in (primal, stationary)]
        done = (torch.cat([*errors, (mean * count[left]) / size], -1) <= _ENOUGH * size).all(-1)
        for whole, part in zip(result, state, strict=True):
            whole[left] = part
        left, keep = left[~done], ~done
        if not len(left):
            break
        x, dual, slack, seen = x[keep], dual[keep], slack[keep], seen[keep]
        state = _step(basis, (x, dual, slack), seen, primal[keep], stationary[keep], mean[keep])
    return result


def _step(
    basis: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    seen: Tensor,
    primal: Tensor,
    stationary: Tensor,
    mean: Tensor,
) -> list[Tensor]:
    """Predict, correct, and go almost as far as signs allow."""
    x, dual, slack = state
    inverse = torch.where(seen, 1 / x, 0.0)
    weights = torch.where(seen, x / (x + slack), 0.0)
    factor = _factor(basis, weights)

    def direction(complement: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moved = stationary + complement * inverse
        right = (weights * moved) @ basis - primal
        ahead = torch.cholesky_solve(right[..., None], factor)[..., 0]
        rest = right - (weights * (ahead @ basis.T)) @ basis  # refined once
        ahead = ahead + torch.cholesky_solve(rest[..., None], factor)[..., 0]
        along = weights * (ahead @ basis.T - moved)
        return along, ahead, -(complement + slack * along) * inverse

    def reach(along: Tensor, change: Tensor) -> Tensor:
        ratios = [
            torch.where(seen & (step < 0), -whole / step, torch.inf).amin(-1, keepdim=True)
            for whole, step in ((x, along), (slack, change))
        ]
        return torch.minimum(*ratios)

    along, _, change = direction(x * slack)
    length = reach(along, change).clamp(max=1)
    count = seen.sum(-1, keepdim=True)
    predicted = ((x + length * along) * (slack + length * change)).sum(-1, keepdim=True) / count
    centre = (predicted / mean) ** 3 * mean
    along, ahead, change = direction(torch.where(seen, x * slack + along * change - centre, 0.0))
    length = (0.995 * reach(along, change)).clamp(max=1)
    return [x + length * along, dual + length * ahead, slack + length * change]
