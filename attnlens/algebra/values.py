"""Values as the output reads them: `V`, or what a rank-deficient output projection leaves of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.errors import NonFiniteError
from attnlens.kernels.ranks import counts, provably_full, rank_threshold


@dataclass(frozen=True, eq=False)
class Reach:
    """What the output projection H of each head reads of its context.

    Attributes:
        factor: none where every head has full row rank, since then `LN(V H) = LN(V)`; else
            `[H, D, D]` float64 C with `LN(V H) = LN(V C)`, the identity for heads of full rank.
        root: `[H, D, D]` float64 X with `‖O H‖ = ‖O C X‖`.
        rank: `[H]` int64, the numerical rank of H.
        finite: `[H]` bool; a head whose H holds NaN or Inf reads nothing known.
    """

    factor: Tensor | None
    root: Tensor
    rank: Tensor
    finite: Tensor


def reach_of(projection: Tensor, rtol: float | None = None) -> Reach:
    """Find what each head's output projection can read.

    Args:
        projection: `[H, D, M]`.
        rtol: relative threshold for the rank of H; by default `max(D, M) · eps(float32)`.

    Returns:
        The factors; those of heads that are not finite are as for `H = 0`.
    """
    heads, width, hidden = projection.shape
    weight = projection.detach().double()
    gram = weight @ weight.mT
    finite = gram.isfinite().flatten(1).all(-1)
    gram = torch.where(finite[:, None, None], gram, 0.0)
    threshold = rank_threshold(torch.full((heads,), hidden, device=gram.device), width, rtol)
    root, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(width, dtype=gram.dtype, device=gram.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(root, identity, upper=False)
    bound = gram.diagonal(dim1=-2, dim2=-1).sum(-1) * inverse.square().sum((-2, -1))
    full = (info == 0) & provably_full(bound, threshold)
    rank = torch.full((heads,), width, device=gram.device)
    if bool(full.all()):
        return Reach(None, root, rank, finite)
    squares, axes = torch.linalg.eigh(gram)
    kept = counts(squares, squares[:, -1:], threshold[:, None])
    full, rank = full | kept.all(-1), kept.sum(-1)
    scaled = axes * torch.where(kept, squares, 0.0).sqrt()[:, None]
    if bool(full.all()):
        return Reach(None, scaled, rank, finite)
    full = full[:, None, None]
    return Reach(
        torch.where(full, identity, scaled), torch.where(full, scaled, identity), rank, finite
    )


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Precision of results: float64 for float64 input, float32 for everything narrower."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def repeated(grouped: Tensor, heads: int) -> Tensor:
    """Repeat what grouped heads share for each of them, `[B, Hkv, …]` to `[B, H, …]`."""
    if grouped.shape[1] == heads:
        return grouped
    if grouped.shape[1] == 1:
        return grouped.expand(-1, heads, *grouped.shape[2:])
    return grouped.repeat_interleave(heads // grouped.shape[1], 1)


def require_finite(tensor: Tensor, name: str, keys: Tensor | None = None) -> None:
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


def require_squares(values: Tensor, keys: Tensor) -> None:
    """Raise where real values are not finite, or too large for sums of their squares.

    Args:
        values: `[B, H, K, D]`.
        keys: `[B, 1 or H, K]` bool, the real keys.

    Raises:
        NonFiniteError: naming the first example and head at fault.
    """
    require_finite(values, "value", keys[..., None])
    if values.dtype != torch.float64:
        return
    largest = torch.where(keys[..., None], values, 0.0).abs().amax((-2, -1))
    if bool((largest > _LARGEST).any()):
        example, head = (largest > _LARGEST).nonzero()[0].tolist()
        raise NonFiniteError(
            f"value {list(values.shape)} reaches {float(largest[example, head]):.1e} at batch "
            f"index {example}, head {head}, whose square overflows. Scale the values down: A⊥ does "
            f"not depend on their size."
        )


def require_finite_reach(reach: Reach) -> Reach:
    """Raise where an output projection is not finite.

    Args:
        reach: of the projection.

    Returns:
        The same.

    Raises:
        NonFiniteError: naming the first head at fault.
    """
    if not bool(reach.finite.all()):
        head = int((~reach.finite).nonzero()[0])
        raise NonFiniteError(f"projection holds NaN or Inf at head {head}. Look at the weights.")
    return reach


# Squares of up to a hundred million numbers of this size stay within float64.
_LARGEST = 1e150
