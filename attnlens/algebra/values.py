"""Values as a null space sees them: real rows, float64, and only what the output can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.factors import default_rtol, provably_regular
from attnlens.errors import NonFiniteError

_BLOCK_ELEMENTS = 1 << 19


def prepare_values(
    value: Tensor, keys: Tensor, factor: Tensor | None = None, simplex: bool = False
) -> Tensor:
    """Select the real value rows, in float64, as the null space sees them.

    Args:
        value: `[B, H, K, D]`.
        keys: `[B, G, K]` bool, the real keys; rows elsewhere may hold anything and become zero.
        factor: `[H, D, D]` from :func:`deficiency_factor`, or None.
        simplex: append a constant column, scaled to the mean norm of the other columns (the
            span does not depend on the scale, the conditioning does).

    Returns:
        `[B, H, K, E]` float64, E = D or D + 1.
    """
    values = selected_rows(value, keys, torch.float64)
    if factor is not None:
        values = values @ factor.to(values)
    if not simplex:
        return values
    count = keys.sum(-1).clamp(min=1)[..., None, None] * value.shape[-1]
    scale = (values.square().sum((-2, -1), keepdim=True) / count).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    return torch.cat([values, keys[..., None].to(values) * scale], -1)


def selected_rows(tensor: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy rows in one pass, with zeros in place of those that do not count.

    Args:
        tensor: `[B, H, N, D]`, in any layout.
        keep: `[B, G, N]` bool; rows elsewhere may hold anything, NaN included.
        dtype: of the copy.

    Returns:
        `[B, H, N, D]`, contiguous.
    """
    copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)
    left_out = (~keep.expand(copy.shape[:-1])).flatten().nonzero()[:, 0]
    if len(left_out):  # by row: a mask that is broadcast along them takes five times as long
        copy.flatten(0, 2).index_fill_(0, left_out, 0.0)
    return copy


class RowMoments(NamedTuple):
    """Sums over the rows that count.

    Attributes:
        gram: `[B, H, E, E]` float64, `Σ x xᵀ`.
        total: `[B, H, E]` float64, `Σ x`.
    """

    gram: Tensor
    total: Tensor


def row_moments(tensor: Tensor, keep: Tensor) -> RowMoments:
    """Sum rows and their outer products in float64, without a float64 copy of them all.

    Args:
        tensor: `[B, H, N, E]`, in any layout and precision.
        keep: `[B, G, N]` bool; rows elsewhere may hold anything, NaN included.

    Returns:
        The sums.
    """
    batch, heads, _, width = tensor.shape
    gram = tensor.new_zeros((batch, heads, width, width), dtype=torch.float64)
    total = tensor.new_zeros((batch, heads, width), dtype=torch.float64)
    for some, rows in _blocks(tensor):
        block = selected_rows(tensor[some, :, rows], keep[some, :, rows], torch.float64)
        total[some] += block.sum(-2)
        block = block.flatten(0, 1)
        gram[some].flatten(0, 1).baddbmm_(block.mT, block)
    return RowMoments(gram, total)


class SquareSums(NamedTuple):
    """Sums over the rows that count.

    Attributes:
        squares: `Σ ‖x X‖²` for each X, `[B, H]` float64.
        total: `[B, H, E]` float64, `Σ x`.
    """

    squares: list[Tensor]
    total: Tensor


def square_sums(tensor: Tensor, keep: Tensor, maps: Sequence[Tensor | None]) -> SquareSums:
    """Sum the squared norms of rows under linear maps, in the precision of the rows.

    What the rows have in common is split off and added in float64, so that rows that hardly
    differ keep their differences: `Σ‖x X‖² = Σ‖(x − m) X‖² + ⟨(2 Σ(x − m) + n m) X, m X⟩` for any
    m, here the mean of the first rows that count.

    Args:
        tensor: `[B, H, N, E]`, in any layout and precision.
        keep: `[B, H, N]` bool; rows elsewhere may hold anything, NaN included.
        maps: each `[B, H, E, P]` or `[H, E, P]` float64, or None for the identity.

    Returns:
        The sums.
    """
    batch, heads, _, width = tensor.shape
    dtype = working_dtype(tensor)
    narrow = [x if x is None else x.expand(batch, *x.shape[-3:]).to(dtype) for x in maps]
    count = keep.new_zeros((batch, heads, 1), dtype=torch.int64)
    shift = tensor.new_zeros((batch, heads, width), dtype=dtype)
    rest = tensor.new_zeros((batch, heads, width), dtype=torch.float64)
    squares = [tensor.new_zeros((batch, heads), dtype=torch.float64) for _ in maps]
    for some, rows in _blocks(tensor):
        kept = keep[some, :, rows]
        size = kept.sum(-1, keepdim=True)
        block = selected_rows(tensor[some, :, rows], kept, dtype)
        mean = block.sum(-2) / size.clamp(min=1)
        shift[some] = torch.where(count[some] > 0, shift[some], mean)
        count[some] += size
        block = block.flatten(0, 1)
        # only where a row counts; the others stay zero
        column = kept.flatten(0, 1)[..., None].to(dtype)
        block.baddbmm_(column, shift[some].flatten(0, 1)[:, None], alpha=-1)
        rest[some] += block.sum(-2).view_as(mean)
        for square, x in zip(squares, narrow, strict=True):
            image = block if x is None else block @ x[some].flatten(0, 1)
            norms = torch.linalg.vector_norm(image, dim=-1)
            square[some] += norms.square_().sum(-1).view_as(square[some])
    common = shift.double()
    total = rest + count * common
    pair = torch.stack([common, total + rest], -2)
    for square, x in zip(squares, maps, strict=True):
        first, second = (pair if x is None else pair @ x).unbind(-2)
        square += torch.linalg.vecdot(first, second)
    return SquareSums(squares, total)


def _blocks(tensor: Tensor) -> Iterator[tuple[slice, slice]]:
    """Split `[B, H, N, E]` into examples and rows that stay in the cache while they are used.

    Converting all rows at once costs as much as the sums over them.

    Yields:
        Slices of the examples and of the rows.
    """
    batch, heads, rows, width = tensor.shape
    size = rows if tensor.is_cuda else max(_BLOCK_ELEMENTS // max(heads * width, 1), 64)
    count = batch if tensor.is_cuda else max(size // max(rows, 1), 1)
    for first in range(0, batch, count):
        for start in range(0, rows, size):
            yield slice(first, first + count), slice(start, start + size)


def deficiency_factor(
    projection: Tensor, rtol: float | None = None, gram: Tensor | None = None
) -> Tensor | None:
    """Reduce a rank-deficient output projection to a `D × D` factor.

    Args:
        projection: `[H, D, M]`.
        rtol: relative threshold for the rank of H; by default `max(D, M) · eps(float32)`.
        gram: `H Hᵀ`, `[H, D, D]` float64, where it is known already.

    Returns:
        None where every head has rank D, since then `LN(V H) = LN(V)`; else C `[H, D, D]`
        float64 with `H Hᵀ = C Cᵀ`, so that `LN(V H) = LN(V C)`.
    """
    width, hidden = projection.shape[-2:]
    rtol = default_rtol(hidden, width) if rtol is None else rtol
    gram = row_gram(projection) if gram is None else gram
    if bool(provably_regular(gram, rtol).all()):
        return None
    eigenvalues, vectors = torch.linalg.eigh(gram)
    sigma = eigenvalues.clamp(min=0).sqrt()
    kept = sigma > rtol * sigma[..., -1:]
    return None if bool(kept.all()) else vectors * (sigma * kept)[..., None, :]


def row_gram(projection: Tensor) -> Tensor:
    """Compute `H Hᵀ` per head, `[H, D, D]` float64, from `[H, D, M]`."""
    weight = projection.detach().double()
    return weight @ weight.mT


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Precision of results: float64 for float64 input, float32 for everything narrower."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def require_finite(tensor: Tensor, name: str, keys: Tensor | None) -> None:
    """Raise where a tensor of examples and heads is not finite.

    Args:
        tensor: `[B, H, ...]`.
        name: what to call it.
        keys: bool, broadcastable to `tensor`; entries that are False are not looked at.

    Raises:
        NonFiniteError: naming the first example and head at fault.
    """
    if bool(torch.isfinite(tensor.sum())):
        return  # one pass; only a sum that is not finite is looked into
    bad = ~torch.isfinite(tensor)
    if keys is not None:
        bad = bad & keys
    if bool(bad.any()):
        example, head = bad.flatten(2).any(-1).nonzero()[0].tolist()
        raise NonFiniteError(
            f"{name} {list(tensor.shape)} holds NaN or Inf at batch index {example}, head {head}. "
            f"Mask that position, or look at the model's inputs and weights."
        )
