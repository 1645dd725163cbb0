"""Which singular values count: the one decision of rank, for every backend and every caller."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.errors import InputError

EPS32 = torch.finfo(torch.float32).eps

# Ranks are decided on squares, as a float64 Gram matrix holds them.
LEAST_RTOL = 1e-7


def rank_threshold(tokens: Tensor, width: int, rtol: float | None = None) -> Tensor:
    """Return the relative threshold at and below which a singular value counts as zero.

    It is `max(n, D) · eps(float32)` whatever the storage type: bfloat16 values are exact numbers,
    and their own eps would erase every direction. n counts real keys only, so that padding
    changes nothing.

    Args:
        tokens: the number n of keys, integer, any shape.
        width: head dimension D.
        rtol: a threshold to use instead, in `[1e-7, 1)`.

    Returns:
        The threshold, relative to the largest singular value; float64, the shape of `tokens`.

    Raises:
        InputError: if `rtol` is out of range.
    """
    if require_rtol(rtol) is None:
        return tokens.clamp(min=max(width, 1)).double() * EPS32
    return torch.full(tokens.shape, float(rtol or 0.0), dtype=torch.float64, device=tokens.device)


def require_rtol(rtol: float | None) -> float | None:
    """Refuse a relative threshold that squares in float64 cannot resolve.

    Args:
        rtol: the threshold, or None for the default one.

    Returns:
        The same.

    Raises:
        InputError: if it lies outside `[1e-7, 1)`.
    """
    if rtol is not None and not LEAST_RTOL <= rtol < 1:
        raise InputError(f"rtol must lie in [{LEAST_RTOL:g}, 1). Got {rtol!r}.")
    return rtol


def counts(squares: Tensor, largest: Tensor, threshold: Tensor) -> Tensor:
    """Tell which squared singular values count.

    Args:
        squares: squared singular values; rounding may have made them negative.
        largest: the largest one of the values, broadcastable.
        threshold: from :func:`rank_threshold`, broadcastable.

    Returns:
        Bool, True where a singular value exceeds the threshold times the largest.
    """
    return (squares > threshold.square() * largest) & (squares > 0)


def provably_full(bound: Tensor, threshold: Tensor) -> Tensor:
    """Tell where all singular values count, without knowing them.

    Args:
        bound: at least the squared condition number, such as `tr(G) tr(G⁻¹)`.
        threshold: from :func:`rank_threshold`.

    Returns:
        Bool; False means undecided.
    """
    return bound * threshold.square() < 1
