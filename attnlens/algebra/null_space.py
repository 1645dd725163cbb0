"""Everything that statistics need of one call: null spaces, and sums over rows of A and A⊥."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.closed_forms import (
    HeadSums,
    Outputs,
    RowForms,
    head_sums,
    output_squares,
    row_forms,
    shared_forms,
)
from attnlens.algebra.factors import SharedFactor
from attnlens.algebra.problem import Problem
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.softmax import RowSums
from attnlens.algebra.values import repeated

# Up to this variance of raw or effective attention, relative to its square, outputs and sums are
# computed again: float32 loses the differences.
_NEARLY_UNIFORM = 1e-3
_EPS64 = torch.finfo(torch.float64).eps


class NullSpace(NamedTuple):
    """Null-space quantities per example and head, all `[B, H]` float64.

    Attributes:
        rank: numerical rank of T; the mean over the rows that count where the mask differs by row.
        nullity: `n − rank`, likewise.
        nullity_min: smallest nullity of a row.
        nullity_max: largest nullity of a row.
        simplex_nullity: `n − rank(`[T, 1]`)`, likewise the mean.
        effective_square: `‖A⊥‖²_F`.
        output_square: `‖A T‖²_F`.
        finite: 1 where every input was finite, else 0; the other fields then are meaningless.
    """

    rank: Tensor
    nullity: Tensor
    nullity_min: Tensor
    nullity_max: Tensor
    simplex_nullity: Tensor
    effective_square: Tensor
    output_square: Tensor
    finite: Tensor


class _Rows(NamedTuple):
    """Ranks and forms of every row, `[B, H, Q]`, and `‖A T‖²_F`, `[B, H]`."""

    rank: Tensor
    simplex_rank: Tensor
    forms: RowForms
    output_square: Tensor


def null_space(problem: Problem, with_rows: bool) -> tuple[NullSpace, HeadSums | None]:
    """Compute what is summed over the rows of every head.

    Args:
        problem: the call.
        with_rows: whether sums of A are wanted, which takes a pass over the logits.

    Returns:
        The null-space quantities, and the sums if they are wanted.
    """
    short = problem.independent
    if bool(short.all()):
        return _null_space_of_short(problem, with_rows)
    if bool(short.any()):
        return _joined(problem, short, with_rows)
    sizes = problem.sizes
    raw = problem.row_sums if with_rows else None
    doubtful = problem.ill_conditioned & problem.support.shared
    if raw is not None:
        doubtful = doubtful | _nearly_uniform(raw, sizes)
    outputs, raw = problem.again(doubtful, raw, problem.shift)
    rows = _rows(problem, outputs, raw)
    if raw is not None:
        even = rows.forms.centred.sum(-1) < _NEARLY_UNIFORM * rows.forms.square.sum(-1)
        if bool((even & ~doubtful).any()):
            doubtful = doubtful | even
            outputs, raw = problem.again(doubtful, raw, problem.shift)
            rows = _rows(problem, outputs, raw)
    free = (rows.rank == sizes) & (sizes > 0)
    whole = _sums_of(problem, free) if raw is None else raw
    forms = RowForms.of_raw(whole, sizes).where(free, rows.forms)
    varies = rows.simplex_rank > 1  # else the values are constant, and so is A⊥ along a row
    forms = forms._replace(
        centred=torch.where(varies, forms.centred, 0.0),
        covariance=torch.where(varies, forms.covariance, 0.0),
    )
    return _collected(problem, rows._replace(forms=forms), free, doubtful, raw)


def _null_space_of_short(problem: Problem, with_rows: bool) -> tuple[NullSpace, HeadSums | None]:
    """The same where nothing is null: rows of A⊥ are those of A."""
    sizes, raw = problem.sizes, problem.row_sums
    doubtful = _nearly_uniform(raw, sizes)
    outputs, sums = problem.again(doubtful, raw)
    raw = raw if sums is None else sums
    square = output_squares(outputs, problem.active, raw.total, problem.root)
    rows = _Rows(sizes, sizes, RowForms.of_raw(raw, sizes), square)
    return _collected(problem, rows, sizes > 0, doubtful, raw if with_rows else None)


def _joined(problem: Problem, short: Tensor, with_rows: bool) -> tuple[NullSpace, HeadSums | None]:
    """The same for short examples among others."""
    if with_rows:
        problem.row_sums  # noqa: B018 - one pass for all of them
    parts = [(~short).nonzero()[:, 0], short.nonzero()[:, 0]]
    found = [null_space(problem.part(examples), with_rows) for examples in parts]
    order = torch.cat(parts).argsort()
    spaces, sums = zip(*found, strict=True)

    def join(pieces: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(pieces)[order]

    space = NullSpace(*map(join, zip(*spaces, strict=True)))
    if not with_rows:
        return space, None
    return space, HeadSums(*map(join, zip(*sums, strict=True)))


def _nearly_uniform(raw: RowSums, sizes: Tensor) -> Tensor:
    """Heads in whose sums float32 loses the differences between entries, `[B, H]` bool."""
    even = (raw.total.square() / sizes.clamp(min=1)).sum(-1)
    return raw.centred.sum(-1) < _NEARLY_UNIFORM * even


def _collected(
    problem: Problem, rows: _Rows, free: Tensor, doubtful: Tensor, raw: RowSums | None
) -> tuple[NullSpace, HeadSums | None]:
    """Sum the rows of every head that count."""
    sizes, forms = problem.sizes, rows.forms
    effective_square = forms.square.sum(-1)
    finite = problem.finite & rows.output_square.isfinite() & effective_square.isfinite()
    sums = None
    if raw is not None:
        eps = torch.where(doubtful & problem.can_refine, _EPS64, problem.output_eps)
        sums = head_sums(raw, forms, sizes, free, eps)
        finite = finite & sums.centred.isfinite() & sums.entropy.isfinite()
    nullity = (sizes - rows.rank).double()
    count = problem.active.sum(-1).clamp(min=1)
    outside = torch.where(problem.active, nullity, torch.inf).amin(-1)

    def mean(quantity: Tensor) -> Tensor:
        return torch.where(problem.active, quantity, 0).sum(-1).double() / count

    return NullSpace(
        rank=mean(rows.rank),
        nullity=mean(sizes - rows.rank),
        nullity_min=outside,
        nullity_max=torch.where(problem.active, nullity, -torch.inf).amax(-1),
        simplex_nullity=mean(sizes - rows.simplex_rank),
        effective_square=effective_square,
        output_square=rows.output_square,
        finite=finite.double(),
    ), sums


def _rows(problem: Problem, outputs: Outputs, raw: RowSums | None) -> _Rows:
    """Ranks and forms of every row, from its output."""
    total = torch.ones_like(problem.sizes, dtype=torch.float64) if raw is None else raw.total
    if isinstance(problem.factor, SharedFactor):
        return _shared_rows(problem, problem.factor, outputs, total)
    return _separate_rows(problem, problem.factor, outputs, total)


def _shared_rows(problem: Problem, factor: SharedFactor, outputs: Outputs, total: Tensor) -> _Rows:
    forms, output_square = shared_forms(factor, outputs, total, problem.root)
    rank, simplex_rank = (
        repeated(rank, problem.heads)[..., None].expand(problem.sizes.shape)
        for rank in (factor.rank, factor.simplex_rank)
    )
    return _Rows(rank, simplex_rank, forms, output_square)


def _separate_rows(problem: Problem, factor: RowFactor, outputs: Outputs, total: Tensor) -> _Rows:
    """Solve for every row in the values that it sees."""
    sizes = problem.sizes
    rank, simplex_rank = torch.zeros_like(sizes), torch.zeros_like(sizes)
    outside, along, apart = (torch.zeros_like(total) for _ in range(3))
    for chunk in factor.groups():
        values, mass = chunk.per_row(chunk.total), chunk.take(total)[..., None]
        mean = chunk.per_row(chunk.total / chunk.sizes.double()[:, None])
        shift = chunk.of_heads(outputs.shift)[:, :, None]
        rest = problem.outputs_of(chunk, outputs, total) - mass * (mean - shift)
        solution = chunk.refined(rest)
        chunk.scatter(rank, chunk.per_row(chunk.whitening.rank))
        chunk.scatter(simplex_rank, chunk.per_row(chunk.simplex_rank))
        chunk.scatter(outside, chunk.per_row(chunk.outside))
        chunk.scatter(along, torch.linalg.vecdot(values, solution))
        chunk.scatter(apart, torch.linalg.vecdot(rest, solution))
    forms = row_forms(sizes, outside, along, apart, total, total)
    forms = RowForms(*(torch.where(problem.active, part, 0.0) for part in forms))
    square = output_squares(outputs, problem.active, total, problem.root)
    return _Rows(rank, simplex_rank, forms, square)


def _sums_of(problem: Problem, rows: Tensor) -> RowSums:
    """Sums of some rows of A; zero elsewhere."""
    examples = rows.flatten(1).any(-1).nonzero()[:, 0]
    blank = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    sums = RowSums(*(blank.clone() for _ in RowSums._fields))
    if not len(examples):
        return sums
    whole = problem.support
    last = int(rows.flatten(0, 1).any(0).nonzero()[-1]) + 1
    keys = whole.keys.shape[-1]
    if whole.last is not None:
        keys = int(torch.where(rows, whole.last, 0).amax())
    elif whole.rows is not None:
        keys = int((whole.rows & rows[..., None]).flatten(0, 2).any(0).nonzero()[-1]) + 1
    part = whole.part(examples, last, keys)
    found, _ = problem.rows.part(examples, last, keys).sums(part)
    for target, source in zip(sums, found, strict=True):
        target[examples, :, :last] = source
    return RowSums(*(torch.where(rows, part, 0.0) for part in sums))
