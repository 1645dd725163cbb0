"""Attention to labels: sums of raw and effective attention over the keys of each label.

`A⊥ M`, with M the membership of keys in labels, needs no attention matrix: a row of it is
`o_i G⁺ (V_Sᵀ M)` with the row's output `o_i` and the Gram matrix G of the values that it sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from opt_einsum import contract
from torch import Tensor

from attnlens.algebra.factors import SharedFactor
from attnlens.algebra.problem import Problem
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.values import repeated
from attnlens.kernels.torch_gram import selected_rows


class LabelMeans(NamedTuple):
    """Attention to the keys of each label, the mean over query rows; `[B, H, G]` float64.

    Attributes:
        raw: of A, in `[0, 1]`.
        effective: of A⊥; entries may be negative.
    """

    raw: Tensor
    effective: Tensor


def label_means(problem: Problem, members: Tensor, received: Tensor | None = None) -> LabelMeans:
    """Average raw and effective attention to each label over query rows.

    Where nothing is hidden from the output, `rank = n`, both are the same to the last bit.

    Args:
        problem: the call.
        members: `[B, K, G]` bool M, from :func:`~attnlens.observer.label_members`.
        received: `[B, H, K]`, the sums of A over the rows that count, where they are at hand.

    Returns:
        The means; NaN for examples without a row that counts.
    """
    active, factor = problem.active, problem.factor
    if isinstance(factor, SharedFactor) and received is not None:
        total = received @ members.double()
    else:
        rows = selected_rows(problem.rows.product(members), active, torch.float64)
        total = rows.sum(-2)
    if isinstance(factor, SharedFactor):
        outputs, _ = problem.again(problem.ill_conditioned)
        effective = _shared_sums(
            factor, selected_rows(outputs.context, active, torch.float64), members
        )
        free = repeated(factor.free, problem.heads)[..., None]
        effective = torch.where(free, total, effective)
    else:
        effective = _row_sums(problem, factor, rows, members).sum(-2)
    count = active.sum(-1)[..., None]
    return LabelMeans(total / count, effective / count)


def _shared_sums(factor: SharedFactor, outputs: Tensor, members: Tensor) -> Tensor:
    """Sums over rows where all rows of an example share their keys, `[B, H, G]`."""
    heads = outputs.shape[1]
    values = selected_rows(
        factor.values, factor.support.keys & factor.finite[..., None], torch.float64
    )
    columns = contract("bhkd,bkg->bhdg", values, members.double())
    solved = contract("bhde,bhfe,bhfg->bhdg", factor.whitening, factor.whitening, columns)
    sums: Tensor = contract("bhd,bhdg->bhg", outputs.sum(-2), repeated(solved, heads))
    return sums


def _row_sums(problem: Problem, factor: RowFactor, received: Tensor, members: Tensor) -> Tensor:
    """The same where the keys differ by row, `[B, H, Q, G]`."""
    result = torch.zeros_like(received)
    for chunk in factor.groups():
        there = members[chunk.example, chunk.span]
        of_label = (chunk.keys & member for member in there.T)  # [n, k]
        columns = torch.stack([keys.double() @ chunk.values for keys in of_label], -1)
        solution = chunk.refined(problem.outputs_of(chunk, problem.plain(), received[..., 0]))
        sums = contract("hgrd,hrdl->hgrl", solution, columns[:, chunk.group])
        free = chunk.per_row(chunk.whitening.rank == chunk.sizes)
        chunk.scatter(result, torch.where(free[..., None], chunk.take(received), sums))
    return result
