"""Walks along the fibre of a head: the queries and keys whose attention gives the same output.

The fibre of (Q, K) is {(Q', K') : softmax(Q'K'ᵀ·s)V = softmax(QKᵀ·s)V}. Everything is batched over
N heads, float64 and matrix-free: the Jacobian of the output is never formed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny
_RADIUS = 0.3  # of the first step: standard deviation under A of a row's change of logits
_SMALLEST_RADIUS = 1e-3
_ALLOWANCE = 0.01  # residual kept during the walk, relative to the distance walked
_CORRECTIONS = 3  # Gauss-Newton steps after each step of the walk
_POLISHES = 6  # rounds of Gauss-Newton steps at the end, each with a fresh metric
_DAMPING = 1e-4  # of the metric, relative to the head's largest curvature
_RIDGE = 1e-11  # of the normal equations, relative to the head's largest block
_SOLVE_TOLERANCE = 0.05
_SOLVE_LIMIT = 100


class Heads:
    """N heads with A, AV and the derivative of A in closed form.

    Points and steps stack queries and keys in one tensor, `[N, Q + K, R]`.

    Args:
        query: queries, `[N, Q, R]`.
        key: keys, `[N, K, R]`.
        value: values, `[N, K, D]`.
        visible: true where a row that counts may attend, bool `[N, Q, K]`.
        bias: added to the logits, `[N, Q, K]`, or zero.
        scale: factor of the logits.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.visible, self.bias, self.scale = visible, bias, scale
        logits = scale * query @ key.mT if bias is None else scale * query @ key.mT + bias
        logits = logits.masked_fill(~visible, -torch.inf)
        # Rows that do not count see nothing; softmax makes them NaN.
        self.attention = torch.softmax(logits, dim=-1).masked_fill(~visible, 0.0)
        self.context = self.attention @ value

    @property
    def point(self) -> Tensor:
        """Queries and keys, `[N, Q + K, R]`."""
        return torch.cat([self.query, self.key], dim=-2)

    def split(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and the keys of a point."""
        query, key = point.split(list(self.visible.shape[-2:]), dim=-2)
        return query, key

    def at(self, point: Tensor) -> "Heads":
        """Return these heads with other queries and keys."""
        query, key = self.split(point)
        return Heads(query, key, self.value, self.visible, self.bias, scale=self.scale)

    def take(self, index: Tensor) -> "Heads":
        """Return some of the heads."""
        return Heads(
            self.query[index],
            self.key[index],
            self.value[index],
            self.visible[index],
            None if self.bias is None else self.bias[index],
            scale=self.scale,
        )

    def centred_logits(self, step: Tensor) -> Tensor:
        """Return the change of logits along a step, less its mean under A, `[N, Q, K]`."""
        query, key = self.split(step)
        change = self.scale * (query @ self.key.mT + self.query @ key.mT)
        return change - (self.attention * change).sum(-1, keepdim=True)

    def push(self, step: Tensor) -> Tensor:
        """Return the change of A along a step, `[N, Q, K]`."""
        return self.attention * self.centred_logits(step)

    def pull(self, cotangent: Tensor) -> Tensor:
        """Return the adjoint of `push` at a cotangent of A, `[N, Q + K, R]`."""
        weighted = self.attention * cotangent
        weighted = self.scale * (weighted - self.attention * weighted.sum(-1, keepdim=True))
        return torch.cat([weighted @ self.key, weighted.mT @ self.query], dim=-2)

    def deviation(self, step: Tensor) -> Tensor:
        """Return the largest standard deviation under A of a row's change of logits, `[N]`."""
        return (self.push(step) * self.centred_logits(step)).sum(-1).amax(-1).sqrt()

    def miss(self, origin: "Heads") -> Tensor:
        """Return the change of AV since the origin, relative to AV, `[N]`."""
        return relative_change(self.context - origin.context, origin.context)


class Metric(NamedTuple):
    """Fisher metric of the rows, per token, and what the normal equations need from it.

    Attributes:
        inverse: of the metric M, `[N, Q + K, R, R]`.
        block: Cholesky factors of the diagonal blocks of J M⁻¹ Jᵀ with J the derivative of AV,
            `[N, Q, D, D]`.
        ridge: added to the normal equations, `[N, 1, 1]`.
    """

    inverse: Tensor
    block: Tensor
    ridge: Tensor

    def take(self, index: Tensor) -> "Metric":
        """Return the metric of some of the heads."""
        return Metric(*(entry[index] for entry in self))

    def gradient(self, heads: Heads, cotangent: Tensor) -> Tensor:
        """Return the steepest step for ⟨cotangent, A⟩, `[N, Q + K, R]`."""
        # A row times a symmetric matrix reads memory twice as fast as the matrix times a column.
        return (heads.pull(cotangent)[..., None, :] @ self.inverse).squeeze(-2)


def fisher_metric(heads: Heads) -> Metric:
    """Return the metric in which changes of (Q, K) that leave A alone have length zero.

    Args:
        heads: N heads.

    Returns:
        Its damped inverse, and what solving with it takes.
    """
    attention, query = heads.attention, heads.query
    # Both enter through covariances only; centring avoids cancellation.
    key = heads.key - heads.key.mean(-2, keepdim=True)
    value = heads.value - heads.value.mean(-2, keepdim=True)
    width, depth = key.shape[-1], value.shape[-1]
    mean_key, mean_value = attention @ key, attention @ value
    squares = _outer(query, query)
    by_query = attention @ _outer(key, key) - _outer(mean_key, mean_key)
    by_key = attention.mT @ squares
    inverse_query, inverse_key = (
        _damped_inverse(heads.scale**2 * entry.unflatten(-1, (width, width)))
        for entry in (by_query, by_key)
    )
    cross = attention @ _outer(value, key) - _outer(mean_value, mean_key)
    cross = heads.scale * cross.unflatten(-1, (depth, width))
    # Σ_j w_ij (v_j − o_i)(v_j − o_i)ᵀ with w_ij = (s a_ij)² q_iᵀ M_j⁻¹ q_i, expanded.
    weight = (heads.scale * attention) ** 2 * (squares @ inverse_key.flatten(-2).mT)
    total, moment = weight.sum(-1, keepdim=True), weight @ value
    spread = weight @ _outer(value, value) + total * _outer(mean_value, mean_value)
    spread = spread - _outer(moment, mean_value) - _outer(mean_value, moment)
    block = cross @ inverse_query @ cross.mT + spread.unflatten(-1, (depth, depth))
    traces = block.diagonal(dim1=-2, dim2=-1).sum(-1)
    ridge = _RIDGE * traces.amax(-1)[:, None, None]
    rounding = 1e-14 * total * (value**2).sum(-1).amax(-1)[:, None, None]
    shift = (ridge + rounding).clamp_min(TINY)[..., None]
    identity = torch.eye(depth, dtype=block.dtype, device=block.device)
    # A head whose factorisation fails gets steps that do not help it, and is left where it is.
    factor, _ = torch.linalg.cholesky_ex(block + shift * identity)
    return Metric(torch.cat([inverse_query, inverse_key], dim=1), factor, ridge)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Return outer products of rows: `[N, T, I]`, `[N, T, J]` → `[N, T, I·J]`."""
    return (left[..., :, None] * right[..., None, :]).flatten(-2)


def _damped_inverse(curvature: Tensor) -> Tensor:
    """Return inverses of `[N, T, R, R]`, damped relative to the head's largest mean curvature."""
    width = curvature.shape[-1]
    mean = curvature.diagonal(dim1=-2, dim2=-1).mean(-1).amax(-1)[:, None, None, None]
    identity = torch.eye(width, dtype=curvature.dtype, device=curvature.device)
    factor, _ = torch.linalg.cholesky_ex(curvature + (_DAMPING * mean).clamp_min(TINY) * identity)
    return torch.cholesky_inverse(factor)


def _solve(heads: Heads, metric: Metric, target: Tensor) -> Tensor:
    """Return y with (J M⁻¹ Jᵀ + ridge) y ≈ target, `[N, Q, D]`, by conjugate gradients."""
    solution = torch.zeros_like(target)
    live = torch.arange(len(target), device=target.device)
    found, residual = solution.clone(), target
    direction = _by_blocks(metric, residual)
    energy = first = _inner(residual, direction)
    for _ in range(_SOLVE_LIMIT):
        step = metric.gradient(heads, direction @ heads.value.mT)
        image = heads.push(step) @ heads.value + metric.ridge * direction
        length = energy / _inner(direction, image).clamp_min(TINY)
        found, residual = found + length * direction, residual - length * image
        preconditioned = _by_blocks(metric, residual)
        new = _inner(residual, preconditioned)
        direction = preconditioned + new / energy.clamp_min(TINY) * direction
        energy = new
        late = (new > _SOLVE_TOLERANCE**2 * first).flatten()
        if 2 * int(late.sum()) <= len(late):  # the others are solved and only cost time
            solution[live] = found
            if not late.any():
                return solution
            live = live[late]
            heads, metric = heads.take(late), metric.take(late)
            found, residual, direction = found[late], residual[late], direction[late]
            energy, first = energy[late], first[late]
    solution[live] = found
    return solution


def _by_blocks(metric: Metric, residual: Tensor) -> Tensor:
    return torch.cholesky_solve(residual[..., None], metric.block).squeeze(-1)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum((-2, -1), keepdim=True)


def _lift(heads: Heads, metric: Metric, change: Tensor) -> Tensor:
    """Return the smallest step that changes AV by `change` to first order, `[N, Q + K, R]`."""
    return metric.gradient(heads, _solve(heads, metric, change) @ heads.value.mT)


def _climb(heads: Heads, metric: Metric, away: Tensor) -> Tensor:
    """Return the steepest step for ⟨away, A⟩ that keeps AV to first order, with ‖dA‖ = 1."""
    step = metric.gradient(heads, away)
    step = step - _lift(heads, metric, heads.push(step) @ heads.value)
    length: Tensor = heads.push(step).norm(dim=(-2, -1))
    return step / length.clamp_min(TINY)[:, None, None]


def _step_length(
    heads: Heads, step: Tensor, gone: Tensor, target: Tensor, radius: Tensor
) -> Tensor:
    """Return how far to go: to ‖A' − A‖ = target, or as far as the radius allows, `[N]`."""
    along = (gone * heads.push(step)).sum((-2, -1))
    gap = target**2 - (gone**2).sum((-2, -1))
    meeting = (along**2 + gap).clamp_min(0.0).sqrt() - along
    return torch.minimum(meeting, radius / heads.deviation(step).clamp_min(TINY))


def walk(origin: Heads, far: Tensor, distance: float, max_iterations: int) -> Tensor:
    """Carry heads along their fibres until ‖A' − A‖ = distance · ‖A‖ or no step succeeds.

    Args:
        origin: N heads where they start.
        far: first direction to climb, `[N, Q, K]`.
        distance: relative distance wanted.
        max_iterations: largest number of steps.

    Returns:
        Points near the fibres, `[N, Q + K, R]`.
    """
    point = origin.point.clone()
    norm = origin.attention.norm(dim=(-2, -1))
    reached = torch.zeros_like(norm)
    radius = torch.full_like(norm, _RADIUS)
    active = torch.arange(len(norm), device=norm.device)
    for _ in range(max_iterations):
        if not len(active):
            break
        start = origin.take(active)
        heads = start.at(point[active])
        metric = fisher_metric(heads)
        gone = heads.attention - start.attention
        away = torch.where((reached[active] > 0)[:, None, None], gone, far[active])
        step = _climb(heads, metric, away)
        length = _step_length(heads, step, gone, distance * norm[active], radius[active])
        ahead = heads.point + length[:, None, None] * step
        allowance = _ALLOWANCE * relative_change(
            heads.at(ahead).attention - start.attention, start.attention
        )
        landed, miss = _correct(start, ahead, metric, allowance)
        new = relative_change(start.at(landed).attention - start.attention, start.attention)
        better = (miss <= allowance) & (new > reached[active]) & (new <= 1.05 * distance)
        point[active[better]], reached[active[better]] = landed[better], new[better]
        radius[active] *= torch.where(better, 1.5, 0.3)
        active = active[(reached[active] < 0.98 * distance) & (radius[active] > _SMALLEST_RADIUS)]
    return point


def polish(origin: Heads, point: Tensor, tolerance: float) -> Tensor:
    """Return points to their fibres within the tolerance where possible, `[N, Q + K, R]`."""
    point = point.clone()
    for _ in range(_POLISHES):
        late = (origin.at(point).miss(origin) > tolerance).nonzero().squeeze(-1)
        if not len(late):
            break
        start = origin.take(late)
        metric = fisher_metric(start.at(point[late]))
        allowance = torch.full_like(late, tolerance, dtype=point.dtype)
        point[late], _ = _correct(start, point[late], metric, allowance)
    return point


def _correct(
    origin: Heads, point: Tensor, metric: Metric, allowance: Tensor
) -> tuple[Tensor, Tensor]:
    """Take Gauss-Newton steps towards the output of the origin while they help.

    Args:
        origin: N heads with the output wanted.
        point: where to start, `[N, Q + K, R]`.
        metric: metric and preconditioner, of a point nearby.
        allowance: relative residual at which a head is done, `[N]`.

    Returns:
        Points, `[N, Q + K, R]`, and their relative residuals, `[N]`.
    """
    point, miss = point.clone(), origin.at(point).miss(origin)
    live = (miss > allowance).nonzero().squeeze(-1)
    for _ in range(_CORRECTIONS):
        if not len(live):
            break
        start, nearby = origin.take(live), metric.take(live)
        heads = start.at(point[live])
        step = _lift(heads, nearby, start.context - heads.context)
        damping = heads.deviation(step).clamp_min(1.0)[:, None, None]
        ahead = heads.at(heads.point + step / damping)
        new = ahead.miss(start)
        better = new < 0.6 * miss[live]
        live = live[better]
        point[live], miss[live] = ahead.point[better], new[better]
        live = live[miss[live] > allowance[live]]
    return point, miss


def relative_change(change: Tensor, reference: Tensor) -> Tensor:
    """Return ‖change‖ / ‖reference‖ over the last two axes; 0 where nothing changed."""
    size: Tensor = torch.linalg.matrix_norm(reference)
    moved: Tensor = torch.linalg.matrix_norm(change)
    return moved / size.clamp_min(TINY)
