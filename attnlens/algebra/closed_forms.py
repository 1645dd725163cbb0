"""Closed forms: what can be said of A and A⊥ row by row without building either.

`P` is an orthogonal projector, so `⟨A, A⊥⟩ = ‖A⊥‖²`. With `O = A V` and `W Wᵀ = (VᵀV)⁺`,
`‖a⊥_i‖ = ‖o_i W‖`, and the sum of the entries of `a⊥_i` is `o_i W Wᵀ (Vᵀ1)`. Outputs are taken
less the mean value, which is what even attention gives: then rows that are nearly uniform keep
their differences.
"""

from __future__ import annotations

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


def row_forms(size: Tensor, ones: Tensor, along: Tensor, apart: Tensor, raw: Tensor) -> RowForms:
    """Combine the parts of effective rows.

    A row of A⊥ has the coordinates `c = w / n + d`: those of even attention, with `w = Uᵀ1`, and
    what the row has besides.

    Args:
        size: n, the number of keys.
        ones: `‖w‖²`.
        along: `⟨w, d⟩`.
        apart: `‖d‖²`.
        raw: row sums of A.

    Returns:
        The forms.
    """
    size = size.clamp(min=1)
    even = ones / size
    outside = (1 - even).clamp(min=0)  # squared sine of the angle of 1 to the value space
    mixed = even / size + along / size
    return RowForms(
        total=even + along,
        square=mixed + along / size + apart,
        centred=(outside * (mixed + along / size) + apart - along.square() / size).clamp(min=0),
        covariance=(1 - raw) * mixed + along / size + apart,
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
    factor: SharedFactor, context: Tensor, raw: Tensor, root: Tensor | None
) -> SharedForms:
    """Compute the forms of all rows where they share their keys, in the outputs' precision.

    Args:
        factor: of the values, `[B, Hv, …]`.
        context: `[B, H, Q, D]` outputs `O = A V`; rows that do not count may hold anything.
        raw: row sums of A, broadcastable to `[B, H, Q]`.
        root: `[H, D, D]` float64 X with `‖A T‖ = ‖O X‖`; the identity when None.

    Returns:
        The forms.
    """
    batch, heads, _, width = context.shape
    dtype = working_dtype(context)
    size = factor.tokens.clamp(min=1).double()
    mean = factor.total / size[..., None]
    shift = mean.nan_to_num(0.0, 0.0, 0.0).to(dtype)
    rest = shift.double() - mean  # the shift is representable, the mean need not be
    tail = torch.einsum("bhe,bhef,bhgf->bhg", rest, factor.whitening, factor.whitening)
    columns = [factor.whitening, factor.ones[..., None], tail[..., None]]
    maps = repeated(torch.cat(columns, -1), heads).to(dtype)
    active = factor.support.active.expand(context.shape[:3])
    result = context.new_empty((*context.shape[:3], 3), dtype=torch.float64)
    output_square = context.new_zeros((batch, heads), dtype=torch.float64)
    squares = _OutputSquares(repeated(shift, heads), root)
    for some, rows, block in _less_shift(context, active, squares.shift):
        image = block @ maps[some].flatten(0, 1)
        parts = (
            torch.linalg.vector_norm(image[..., :width], dim=-1).square_(),
            *image[..., width:].unbind(-1),
        )
        result[some, :, rows] = torch.stack(parts, -1).double().view(*result[some, :, rows].shape)
        output_square[some] += squares.of(some, block)
    apart, along, beside = result.unbind(-1)

    def of_heads(tensor: Tensor) -> Tensor:
        return repeated(tensor, heads)[..., None]

    # from the representable shift to the mean: d + (shift − mean) W
    apart = apart + 2 * beside + of_heads(torch.linalg.vecdot(rest, tail))
    along = along + of_heads(torch.linalg.vecdot(rest, factor.ones))
    ones = of_heads(torch.linalg.vecdot(factor.total, factor.ones))
    forms = row_forms(of_heads(size), ones, along, apart, raw)
    forms = RowForms(*(torch.where(active, part, 0.0) for part in forms))
    return SharedForms(forms, output_square + squares.common(active.sum(-1)))


def output_squares(context: Tensor, active: Tensor, root: Tensor | None) -> Tensor:
    """Compute `‖A T‖²_F` from the outputs.

    Args:
        context: `[B, H, Q, D]` outputs `O = A V`; rows that do not count may hold anything.
        active: `[B, H, Q]` bool, the rows that count.
        root: `[H, D, D]` float64 X with `‖A T‖ = ‖O X‖`; the identity when None.

    Returns:
        `[B, H]` float64.
    """
    batch, heads, _, width = context.shape
    shift = context.new_zeros((batch, heads, width), dtype=working_dtype(context))
    squares = _OutputSquares(shift, root)
    result = context.new_zeros((batch, heads), dtype=torch.float64)
    for some, _, block in _less_shift(context, active, shift):
        result[some] += squares.of(some, block)
    return result


class _OutputSquares:
    """`Σ ‖o X‖²` from outputs less a shift: `‖(o − m) X‖² + 2 ⟨(o − m) X, m X⟩`, and `‖m X‖²`."""

    def __init__(self, shift: Tensor, root: Tensor | None) -> None:
        self.shift = shift
        image = shift.double()[..., None, :]  # [B, H, 1, D]
        self._image = image if root is None else image @ root
        self._root = None if root is None else root.to(shift.dtype)

    def of(self, some: slice, block: Tensor) -> Tensor:
        """What the rows of a block `[b·H, q, D]` add, `[b, H]` float64."""
        image = block
        own = self._image[some].to(block.dtype)
        if self._root is not None:
            shape = (*own.shape[:2], *block.shape[1:])
            image = (block.view(shape) @ self._root).flatten(0, 1)
        norms = torch.linalg.vector_norm(image, dim=-1).double().square_()
        common = self._image[some].flatten(0, 1)[:, 0]
        along: Tensor = torch.linalg.vecdot(image.sum(-2).double(), common)
        return (norms.sum(-1) + 2 * along).view(own.shape[:2])

    def common(self, count: Tensor) -> Tensor:
        """What `count` rows have in common, `[B, H]`."""
        return count * self._image.square().sum((-1, -2))


def _less_shift(
    context: Tensor, active: Tensor, shift: Tensor
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Copy outputs less a shift block by block; rows that do not count stay zero.

    Yields:
        The examples, the rows, and `o − m` of all their heads, `[b·H, q, D]`.
    """
    for some, rows in blocks_of_rows(context):
        kept = active[some, :, rows]
        block = selected_rows(context[some, :, rows], kept, shift.dtype).flatten(0, 1)
        column = kept.flatten(0, 1)[..., None].to(block.dtype)
        block.baddbmm_(column, shift[some].flatten(0, 1)[:, None], alpha=-1)
        yield some, rows, block


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
