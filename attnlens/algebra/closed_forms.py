"""Closed forms: what can be said of A and A⊥ row by row without building either.

`P` is an orthogonal projector, so `⟨A, A⊥⟩ = ‖A⊥‖²`. With `O = A V` and `W Wᵀ = (VᵀV)⁺`,
`‖a⊥_i‖ = ‖o_i W‖`, and the sum of the entries of `a⊥_i` is `o_i W Wᵀ (Vᵀ1)`. Outputs are taken
less the mean value, which is what even attention gives: then rows that are nearly uniform keep
their differences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.factors import SharedFactor
from attnlens.algebra.softmax import RowSums
from attnlens.algebra.values import repeated, working_dtype
from attnlens.kernels.torch_gram import blocks_of_rows, selected_rows

# Roundings of the entries of an output, within which effective attention counts as constant.
_ROUNDINGS = 16


class RowForms(NamedTuple):
    """What is known of each effective row, `[B, H, Q]` float64; 0 in rows that do not count.

    Attributes:
        total: `1ᵀa⊥_i`, its row sum.
        square: `‖a⊥_i‖²`.
        centred: `Σ_j (a⊥_ij − total_i / n_i)²` over the keys that the row sees.
        covariance: `Σ_j (a_ij − mean of the row) a⊥_ij`.
    """

    total: Tensor
    square: Tensor
    centred: Tensor
    covariance: Tensor

    @classmethod
    def of_raw(cls, raw: RowSums, size: Tensor) -> RowForms:
        """Return the forms of rows in which nothing is null: those of A itself."""
        square = raw.centred + raw.total.square() / size.clamp(min=1)
        return cls(raw.total, square, raw.centred, raw.centred)

    def where(self, condition: Tensor, other: RowForms) -> RowForms:
        """Take these forms where a condition holds, and others elsewhere."""
        pairs = zip(self, other, strict=True)
        return RowForms(*(torch.where(condition, one, two) for one, two in pairs))


def row_forms(
    size: Tensor, outside: Tensor, along: Tensor, apart: Tensor, raw: Tensor, mass: Tensor
) -> RowForms:
    """Combine the parts of effective rows.

    A row of A⊥ has the coordinates `c = t w / n + d`: those of even attention of the mass t, with
    `w = Uᵀ1`, and what the row has besides.

    Args:
        size: n, the number of keys.
        outside: `1 − ‖w‖² / n`, squared sine of the angle of 1 to the value space.
        along: `⟨w, d⟩`.
        apart: `‖d‖²`.
        raw: row sums of A.
        mass: t; near `raw`, so that little is left besides.

    Returns:
        The forms.
    """
    size = size.clamp(min=1)
    outside = outside.clamp(min=0)
    total = mass * (1 - outside) + along
    even = mass * (total + along) / size
    return RowForms(
        total=total,
        square=even + apart,
        centred=(outside * even + apart - along.square() / size).clamp(min=0),
        covariance=(mass - raw) * total / size + mass * along / size + apart,
    )


class SharedForms(NamedTuple):
    """What the outputs of rows with shared keys tell.

    Attributes:
        forms: of every row that counts.
        output_square: `‖A T‖²_F` over those rows, `[B, H]` float64.
    """

    forms: RowForms
    output_square: Tensor


def shared_forms(
    factor: SharedFactor, outputs: Outputs, raw: Tensor, root: Tensor | None
) -> SharedForms:
    """Compute the forms of all rows where they share their keys, in the outputs' precision.

    Args:
        factor: of the values, `[B, Hv, …]`.
        outputs: of all heads.
        raw: row sums of A, `[B, H, Q]`.
        root: `[H, D, D]` float64 X with `‖A T‖ = ‖O X‖`; the identity when None.

    Returns:
        The forms.
    """
    heads, width = outputs.context.shape[1], outputs.context.shape[3]
    size = factor.tokens.clamp(min=1).double()
    mean = factor.total / size[..., None]
    columns = repeated(torch.cat([factor.whitening, factor.ones[..., None]], -1), heads)
    # the shift is representable, the mean need not be
    tail = torch.einsum("bhe,bhef->bhf", outputs.shift - repeated(mean, heads), columns)
    tail, tail_along = tail[..., None, :width], tail[..., width:]
    active = factor.support.active.expand(outputs.context.shape[:3])
    blocks = _Blocks(outputs, active, raw, root)
    result = raw.new_empty((*raw.shape, 3), dtype=torch.float64)
    inside = torch.cat([columns, columns[..., :width] @ tail.mT], -1).to(blocks.dtype)
    for some, rows, block in blocks:
        image = block @ inside[some].flatten(0, 1)
        parts = (
            torch.linalg.vector_norm(image[..., :width], dim=-1).square_(),
            *image[..., width:].unbind(-1),
        )
        result[some, :, rows] = torch.stack(parts, -1).double().view(*result[some, :, rows].shape)
    apart, along, beside = result.unbind(-1)
    mass = blocks.mass
    apart = apart + 2 * mass * beside + mass.square() * tail.square().sum(-1)
    along = along + mass * tail_along
    size, outside = (repeated(part, heads)[..., None] for part in (size, factor.outside))
    forms = row_forms(size, outside, along, apart, raw, mass)
    forms = RowForms(*(torch.where(active, part, 0.0) for part in forms))
    return SharedForms(forms, blocks.squares())


class Outputs(NamedTuple):
    """The outputs of all heads of a call.

    Attributes:
        context: `[B, H, Q, D]`, `O = A V`; rows that do not count may hold anything.
        shift: `[B, H, D]` float64 m, about the mean value, representable in float32.
        shifted: `[B, H]` bool, where `context` is `A (V − 1 m)`.
    """

    context: Tensor
    shift: Tensor
    shifted: Tensor


def output_squares(outputs: Outputs, active: Tensor, raw: Tensor, root: Tensor | None) -> Tensor:
    """Compute `‖A T‖²_F` from the outputs.

    Args:
        outputs: of all heads.
        active: `[B, H, Q]` bool, the rows that count.
        raw: row sums of A, `[B, H, Q]`.
        root: `[H, D, D]` float64 X with `‖A T‖ = ‖O X‖`; the identity when None.

    Returns:
        `[B, H]` float64.
    """
    blocks = _Blocks(outputs, active, raw, root)
    deque(blocks, maxlen=0)
    return blocks.squares()


class _Blocks:
    """Outputs less `t m`, block by block, and `Σ ‖o X‖²` of the blocks that were seen.

    That is `‖(o − t m) X‖² + 2 ⟨(o − t m) X, t m X⟩ + ‖t m X‖²`.

    Attributes:
        dtype: working precision of the blocks.
        mass: `[B, H, Q]` float64 t, the row sums of A in this precision.
    """

    def __init__(self, outputs: Outputs, active: Tensor, raw: Tensor, root: Tensor | None) -> None:
        self.dtype = working_dtype(outputs.context)
        self.mass = torch.where(active, raw, 0.0).to(self.dtype).double()
        self._outputs = outputs
        self._active = active
        # contiguous, so that products round alike whatever examples they are batched with
        self._root = None if root is None else root.to(self.dtype).contiguous()
        shift = outputs.shift[..., None, :]
        self._image = shift if root is None else shift @ root  # [B, H, 1, D]
        self._sums = outputs.shift.new_zeros(active.shape[:2])

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Copy outputs less a shift block by block; rows that do not count stay zero.

        Yields:
            The examples, the rows, and `o − t m` of all their heads, `[b·H, q, D]`.
        """
        context, shift, shifted = self._outputs
        column = torch.where(shifted[..., None], 0.0, self.mass).to(self.dtype)[..., None]
        shift = shift.to(self.dtype)[..., None, :]
        for some, rows in blocks_of_rows(context):
            kept = self._active[some, :, rows]
            block = selected_rows(context[some, :, rows], kept, self.dtype).flatten(0, 1)
            block.baddbmm_(column[some, :, rows].flatten(0, 1), shift[some].flatten(0, 1), alpha=-1)
            self._add(some, rows, block)
            yield some, rows, block

    def squares(self) -> Tensor:
        """`Σ ‖o X‖²`, `[B, H]` float64."""
        common = self._image.square().sum((-1, -2))
        return self._sums + self.mass.square().sum(-1) * common

    def _add(self, some: slice, rows: slice, block: Tensor) -> None:
        mass = self.mass[some, :, rows]
        image = block.view(*mass.shape, block.shape[-1])
        if self._root is not None:
            image = image @ self._root
        norms = torch.linalg.vector_norm(image, dim=-1).double().square_()
        along = mass.to(self.dtype)[..., None, :] @ image
        common = torch.linalg.vecdot(along.double(), self._image[some])[..., 0]
        self._sums[some] += norms.sum(-1) + 2 * common


class HeadSums(NamedTuple):
    """Sums over the rows of A and A⊥ that count, `[B, H]` float64.

    Squares are about the mean of all entries.

    Attributes:
        entries: number of entries N, the keys that rows see.
        total: sum of A.
        square: `‖A‖²_F`.
        centred: `Σ (a − mean)²`.
        resolution: what `centred` may be by rounding alone.
        entropy: sum of the entropies of the rows, in nats.
        effective_total: sum of A⊥.
        effective_square: `‖A⊥‖²_F`.
        effective_centred: `Σ (a⊥ − mean)²`.
        effective_resolution: what `effective_centred` may be by rounding alone.
        covariance: `Σ (a − mean) (a⊥ − mean)`.
    """

    entries: Tensor
    total: Tensor
    square: Tensor
    centred: Tensor
    resolution: Tensor
    entropy: Tensor
    effective_total: Tensor
    effective_square: Tensor
    effective_centred: Tensor
    effective_resolution: Tensor
    covariance: Tensor


def head_sums(raw: RowSums, forms: RowForms, size: Tensor, free: Tensor, eps: Tensor) -> HeadSums:
    """Add the rows of every head up.

    Args:
        raw: of A, zero in rows that do not count.
        forms: of A⊥, likewise.
        size: `[B, H, Q]`, the number of keys of each row, zero in rows that do not count.
        free: `[B, H, Q]` bool, the rows in which nothing is null.
        eps: `[B, H]`, relative rounding of the outputs that the forms come from.

    Returns:
        The sums.
    """
    rounding = (_ROUNDINGS * eps[..., None]).square() * forms.square
    size = size.double()
    count = size.clamp(min=1)
    entries = size.sum(-1)

    means = [part / count for part in (raw.total, forms.total)]
    apart = [
        mean - part.sum(-1, keepdim=True) / entries.clamp(min=1)[..., None]
        for mean, part in zip(means, (raw.total, forms.total), strict=True)
    ]

    def between(one: int, two: int) -> Tensor:
        """What the means of rows add to products about the mean of all entries."""
        return (size * apart[one] * apart[two]).sum(-1)

    return HeadSums(
        entries=entries,
        total=raw.total.sum(-1),
        square=(raw.centred + raw.total.square() / count).sum(-1),
        centred=raw.centred.sum(-1) + between(0, 0),
        resolution=raw.resolution.sum(-1),
        entropy=raw.entropy.sum(-1),
        effective_total=forms.total.sum(-1),
        effective_square=forms.square.sum(-1),
        effective_centred=forms.centred.sum(-1) + between(1, 1),
        effective_resolution=torch.where(free, raw.resolution, rounding).sum(-1),
        covariance=forms.covariance.sum(-1) + between(0, 1),
    )


def pearson(centred: Tensor, effective_centred: Tensor, covariance: Tensor) -> Tensor:
    """Correlate all entries of A and A⊥ from sums about their means (Brunner et al., Fig. 1a).

    Args:
        centred: `Σ (a − mean)²`; NaN or 0 where A is constant.
        effective_centred: the same of A⊥.
        covariance: `Σ (a − mean) (a⊥ − mean)`.

    Returns:
        Pearson's r in `[−1, 1]`, NaN where either is constant.
    """
    spread = (centred * effective_centred).sqrt()
    ratio = covariance / torch.where(spread > 0, spread, torch.nan)
    return ratio.clamp(-1, 1)
