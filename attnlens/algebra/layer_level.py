"""Attention of all heads of a layer as its output sees it: the sum of the heads, not each of them.

A row of the layer's attention is `[a_1 … a_H]`, its values are `T = [V_1 H_1; …; V_H H_H]`, and
what can be taken from it without any change of the layer's output is its part in `LN(T)`. With the
Gram matrix `Γ = Σ_h H_hᵀ (V_hᵀ V_h) H_h` and the output less its bias y, `‖a⊥_i‖² = y_i Γ⁺ y_iᵀ`
and `a⊥_i = y_i Γ⁺ Tᵀ`. Where the stacked `W_O`, `[H·D, M]`, has full row rank, that is what every
head sees by itself. Where it has not, heads can make up for each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.softmax import AttentionRows
from attnlens.algebra.supports import Support
from attnlens.kernels.ranks import counts, rank_threshold
from attnlens.kernels.torch_gram import selected_rows


class LayerLevel(NamedTuple):
    """What the output of a layer sees of the attention of its heads.

    Attributes:
        solution: `y Γ⁺` in the coordinates of `reads`, `[B, Q, R]` float64.
        reads: `[H, D, R]` float64, `W_O` in an orthonormal basis of what it writes.
        values: `[B, H, K, D]` float64, zero at masked keys.
        square: `‖a⊥_i‖²`, `[B, Q]` float64; zero in rows that do not count.
        nullity: dimension in which all heads together are free, `Σ_h n_h − rank(Γ)`, `[B, Q]`
            int64; likewise.
    """

    solution: Tensor
    reads: Tensor
    values: Tensor
    square: Tensor
    nullity: Tensor

    def maps(self, support: Support) -> Tensor:
        """Build `A⊥` of the layer, `[B, H, Q, K]` float64, zero outside the mask."""
        images = torch.einsum("hdr,bhkd->bhkr", self.reads, self.values)
        return (self.solution[:, None] @ images.mT) * support.mask()


def layer_level(
    rows: AttentionRows,
    value: Tensor,
    support: Support,
    reads: Tensor,
    rtol: float | None = None,
) -> LayerLevel:
    """Look at the attention of a layer as the sum of its heads does.

    Args:
        rows: how A comes about.
        value: `[B, H, K, D]`, grouped heads repeated.
        support: the keys of every row, and the rows that count.
        reads: `[H, D, R]` from :func:`layer_reads`.
        rtol: relative threshold for the numerical rank; by default `max(n, R) · eps(float32)`.

    Returns:
        The projection of the attention onto what the output sees.
    """
    batch, heads, queries, _ = rows.shape
    values = selected_rows(value, support.keys, torch.float64)
    solution = values.new_zeros(batch, queries, reads.shape[-1])
    square = values.new_zeros(batch, queries)
    nullity = torch.zeros_like(square, dtype=torch.int64)
    for example in range(batch):
        active = support.active[example].any(0).nonzero()[:, 0]
        if not len(active):
            continue
        outputs = torch.stack([_outputs(rows, values, example, head) for head in range(heads)])
        written = torch.einsum("hqd,hdr->qr", outputs[:, active], reads)
        for group, keys in _groups(support, example, active):
            seen = values[example] * keys[..., None]
            gram = seen.mT @ seen
            whole = torch.einsum("hdr,hde,hes->rs", reads, gram, reads)
            place = (example, active[group])
            if not bool(whole.isfinite().all()):
                solution[place] = square[place] = torch.nan
                continue
            squares, axes = torch.linalg.eigh(whole)
            size = keys.expand(heads, -1).sum(-1)
            threshold = rank_threshold(size.amax()[None], whole.shape[0], rtol)
            counted = counts(squares[None], squares[None, -1:], threshold[:, None])[0]
            inverse = torch.where(counted, 1 / squares.where(counted, 1.0), 0.0)
            found = ((written[group] @ axes) * inverse) @ axes.mT
            solution[place] = found
            square[place] = torch.linalg.vecdot(found, written[group])
            nullity[place] = size.sum() - counted.sum()
    return LayerLevel(solution, reads, values, square, nullity)


def _outputs(rows: AttentionRows, values: Tensor, example: int, head: int) -> Tensor:
    """`A V` of one head in float64, `[Q, D]`."""
    place = torch.tensor([example]), torch.tensor([head])
    return rows.taken(*place).context(values[place][:, None])[0, 0]


def layer_reads(projection: Tensor) -> Tensor:
    """Leave out of `W_O` the directions that it does not write.

    Args:
        projection: `[H, D, M]`.

    Returns:
        `[H, D, R]` float64, in an orthonormal basis of what it writes; `R = H·D` where the stacked
        `W_O` has full row rank, and then heads cannot make up for each other.
    """
    heads, width, _ = projection.shape
    left, sigma, _ = torch.linalg.svd(projection.double().flatten(0, 1), full_matrices=False)
    rtol = max(projection.flatten(0, 1).shape) * torch.finfo(torch.float32).eps
    kept = sigma > rtol * sigma[0]
    reads: Tensor = left[:, kept] * sigma[kept]
    shaped: Tensor = reads.unflatten(0, (heads, width))
    return shaped


def _groups(support: Support, example: int, active: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rows with equal keys in every head: places in `active`, and `[1 or H, K]` bool."""
    if support.shared:
        return [(torch.arange(len(active), device=active.device), support.keys[example])]
    masks = support.mask()[example][:, active].transpose(0, 1)  # [q, 1 or H, K]
    distinct, group = torch.unique(masks, dim=0, return_inverse=True)
    return [((group == index).nonzero()[:, 0], keys) for index, keys in enumerate(distinct)]
