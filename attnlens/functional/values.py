"""Values as a null space sees them: real rows, float64, and only what the output can read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.errors import NonFiniteError
from attnlens.functional.factor import default_rtol, provably_regular

_BLOCK_BYTES = 2 << 20


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
    if not bool(keep.all()):
        copy.masked_fill_(~keep[..., None], 0.0)
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
    batch, heads, rows, width = tensor.shape
    gram = tensor.new_zeros((batch * heads, width, width), dtype=torch.float64)
    total = tensor.new_zeros((batch, heads, width), dtype=torch.float64)
    # a block that stays in the cache: the conversion of all rows at once costs as much as the sums
    size = rows if tensor.is_cuda else max(_BLOCK_BYTES // max(batch * heads * width * 8, 1), 64)
    for block, kept in zip(tensor.split(size, 2), keep.split(size, 2), strict=True):
        part = block.new_empty(block.shape, dtype=torch.float64).copy_(block)
        if not bool(kept.all()):
            part.masked_fill_(~kept[..., None], 0.0)
        total += part.sum(-2)
        part = part.flatten(0, 1)
        gram.baddbmm_(part.mT, part)
    return RowMoments(gram.unflatten(0, (batch, heads)), total)


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
