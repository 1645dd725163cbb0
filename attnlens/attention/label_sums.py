"""Attention to labels: sums of raw and effective attention over the keys of each label.

`A⊥ M`, with M the membership of keys in labels, needs no attention matrix: a row is `c_i (UᵀM)`
with the coordinates `c_i` of its output in the basis U of the values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from opt_einsum import contract
from torch import Tensor

from attnlens.algebra.nullspace import ValueBasis
from attnlens.algebra.rowwise import RowwiseBasis
from attnlens.algebra.values import selected_rows
from attnlens.errors import InputError


class LabelMeans(NamedTuple):
    """Attention to the keys of each label, the mean over query rows; `[B, H, G]` float64.

    Attributes:
        raw: of A, in `[0, 1]`.
        effective: of A⊥; entries may be negative.
    """

    raw: Tensor
    effective: Tensor


def label_members(labels: Tensor | None, keys: Tensor, num_labels: int) -> Tensor:
    """Tell which real keys have which label.

    Args:
        labels: integer label of every key, `[B, K]`; keys whose label is not in 0 … G − 1 are
            left out. None: all keys share label 0.
        keys: `[B, H or 1, K]` bool, the real keys.
        num_labels: G.

    Returns:
        `[B, K, G]` bool, True where any head has a real key of that label.

    Raises:
        InputError: if the labels are not integers `[B, K]`.
    """
    real = keys.any(1)
    labels = torch.zeros_like(real, dtype=torch.int64) if labels is None else labels
    if labels.shape != real.shape or labels.is_floating_point() or labels.is_complex():
        raise InputError(
            f"labels must be integers, one for each key, [B, K] = {list(real.shape)}. Got "
            f"{list(labels.shape)}, {labels.dtype}."
        )
    every = torch.arange(num_labels, device=real.device)
    return (labels.to(real.device)[..., None] == every) & real[..., None]


def label_means(
    basis: ValueBasis | RowwiseBasis,
    context: Tensor,
    received: Tensor,
    members: Tensor,
    active: Tensor,
) -> LabelMeans:
    """Average raw and effective attention to each label over query rows.

    Where nothing is hidden from the output, `rank = n`, both are the same to the last bit.

    Args:
        basis: of the values, as :func:`~attnlens.algebra.nullspace.value_basis` finds it.
        context: `[B, H, Q, E]` outputs `O = A V` in the space of the basis.
        received: `[B, H, Q, G]`, raw attention of each row to the keys of each label, `A M`.
        members: `[B, K, G]` bool M, from :func:`label_members`.
        active: `[B, H, Q]` bool, the rows to count; the others may hold anything.

    Returns:
        The means; NaN for examples without such a row.
    """
    received = selected_rows(received, active, torch.float64)
    context = selected_rows(context, active, torch.float64)
    total = received.sum(-2)
    if isinstance(basis, ValueBasis):
        effective = _shared_sums(basis, context, members)
        effective = torch.where(basis.nullity[..., None] == 0, total, effective)
    else:
        effective = _row_sums(basis, context, received, members).sum(-2)
    count = active.sum(-1)[..., None]
    return LabelMeans(total / count, effective / count)


def _shared_sums(basis: ValueBasis, context: Tensor, members: Tensor) -> Tensor:
    """Sums over rows where all rows of an example share their keys, `[B, H, G]`."""
    coordinates = contract("bhe,bher->bhr", context.sum(-2), basis.whitening)  # 1ᵀC
    columns = contract("bhkr,bkg->bhrg", basis.basis.double(), members.double())  # UᵀM
    return contract("bhr,bhrg->bhg", coordinates, columns)


def _row_sums(basis: RowwiseBasis, context: Tensor, received: Tensor, members: Tensor) -> Tensor:
    """The same where the keys differ by row, `[B, H, Q, G]`."""
    result = torch.zeros_like(received)
    for chunk in basis.groups():
        there = members[chunk.example, chunk.span]
        of_label = (chunk.keys & member for member in there.T)  # [g, k]
        columns = torch.stack([keys.double() @ chunk.values for keys in of_label], -1)
        sums = contract("hre,hrel->hrl", chunk.solve(chunk.take(context)), chunk.per_row(columns))
        free = chunk.per_row(chunk.whitening.rank) == chunk.keys.sum(-1)[chunk.group]
        chunk.scatter(result, torch.where(free[..., None], chunk.take(received), sums))
    return result
