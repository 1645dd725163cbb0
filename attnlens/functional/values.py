"""Values as a null space sees them: real rows, float64, and only what the output can read."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.errors import NonFiniteError
from attnlens.functional.factor import default_rtol, provably_regular


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


def deficiency_factor(projection: Tensor, rtol: float | None = None) -> Tensor | None:
    """Reduce a rank-deficient output projection to a `D × D` factor.

    Args:
        projection: `[H, D, M]`.
        rtol: relative threshold for the rank of H; by default `max(D, M) · eps(float32)`.

    Returns:
        None where every head has rank D, since then `LN(V H) = LN(V)`; else C `[H, D, D]`
        float64 with `H Hᵀ = C Cᵀ`, so that `LN(V H) = LN(V C)`.
    """
    width, hidden = projection.shape[-2:]
    rtol = default_rtol(hidden, width) if rtol is None else rtol
    weight = projection.detach().double()
    gram = weight @ weight.mT
    if bool(provably_regular(gram, rtol).all()):
        return None
    eigenvalues, vectors = torch.linalg.eigh(gram)
    sigma = eigenvalues.clamp(min=0).sqrt()
    kept = sigma > rtol * sigma[..., -1:]
    return None if bool(kept.all()) else vectors * (sigma * kept)[..., None, :]


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
    if keys is not None:
        bad = bad & keys
    if bool(bad.any()):
        example, head = bad.flatten(2).any(-1).nonzero()[0].tolist()
        raise NonFiniteError(
            f"{name} {list(tensor.shape)} holds NaN or Inf at batch index {example}, head {head}. "
            f"Mask that position, or look at the model's inputs and weights."
        )
