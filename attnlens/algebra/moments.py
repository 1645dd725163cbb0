"""Ranks of T and [T, 1] from moments of the values, per group of rows that see the same keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.algebra.factors import FLOAT32_EPS
from attnlens.errors import InputError, NonFiniteError

# Singular values come from a float64 Gram matrix, which holds their squares.
_SMALLEST_RTOL = 1e-7


@dataclass(frozen=True)
class ValueMoments:
    """Moments of the values in float64, per group of rows that see the same keys.

    Attributes:
        tokens: Number of visible keys, [B, H, G].
        mean: Mean visible value, [B, H, G, D].
        spectrum: Squared singular values of T in ascending order, [B, H, G, D].
        centred: Σ (v − mean)(v − mean)ᵀ, [B, H, G, D, D].
        rtol: Relative tolerance on singular values, [B, H, G].
    """

    tokens: Tensor
    mean: Tensor
    spectrum: Tensor
    centred: Tensor
    rtol: Tensor

    @property
    def cut(self) -> Tensor:
        """Squared singular value up to which a direction counts as zero, [B, H, G, 1].

        One absolute cut serves T and its centred version, so that rank(T) and rank([T, 1]) differ
        by at most one, and rounding in nearly equal values is not taken for rank.
        """
        return self.rtol[..., None] ** 2 * self.spectrum[..., -1:].clamp_min(0)

    @property
    def rank(self) -> Tensor:
        """Number of singular values of T above the cut, [B, H, G]."""
        return (self.spectrum > self.cut).sum(-1)

    @property
    def condition(self) -> Tensor:
        """Largest singular value of T over the smallest above the cut, [B, H, G]."""
        smallest = self.spectrum.masked_fill(self.spectrum <= self.cut, torch.inf).amin(-1)
        return (self.spectrum[..., -1] / smallest).clamp_min(1).sqrt()

    @property
    def rank_with_ones(self) -> Tensor:
        """Rank of [T, 1]: one for the ones column, and that of T without its mean, [B, H, G]."""
        contrasts = (torch.linalg.eigvalsh(self.centred) > self.cut).sum(-1)
        return torch.minimum(contrasts + 1, self.tokens)


def value_moments(values: Tensor, groups: Tensor, rtol: float | None) -> ValueMoments:
    """Gather the moments that decide ranks.

    Args:
        values: Values with hidden keys zeroed, float64 [B, H, K, D].
        groups: Visible keys of each group of rows, bool [B, H, G, K].
        rtol: Relative tolerance on singular values, or None for the default.

    Returns:
        Moments per group.

    Raises:
        InputError: If ``rtol`` is outside [1e-7, 1).
    """
    if rtol is not None and not _SMALLEST_RTOL <= rtol < 1:
        raise InputError(f"rtol must lie in [{_SMALLEST_RTOL:g}, 1), got {rtol}")
    weights = groups.to(values.dtype)
    tokens = groups.sum(-1)
    mean = (weights @ values) / tokens.clamp_min(1)[..., None]
    raw = torch.einsum("bhgk,bhkd,bhke->bhgde", weights, values, values)
    centred = raw - tokens[..., None, None] * mean[..., :, None] * mean[..., None, :]
    default = tokens.clamp_min(values.shape[-1]).to(values.dtype) * FLOAT32_EPS
    tolerance = default if rtol is None else torch.full_like(default, rtol)
    return ValueMoments(tokens, mean, torch.linalg.eigvalsh(raw), centred, tolerance)


def visibility(
    mask: Tensor | None, query: Tensor, key: Tensor, *, cross: bool = False
) -> tuple[Tensor, Tensor]:
    """Split a mask into the keys that rows see and the rows that count.

    Args:
        mask: Boolean, True = may attend, broadcastable to [B, H, Q, K]; None = all.
        query: Anything of shape [B, H, Q, ·].
        key: Anything of shape [B, H, K, ·].
        cross: Queries and keys are different tokens, even where there are as many.

    Returns:
        Visible keys, bool [B, H, G, K] with G = 1 if all rows that see anything see the same keys
        and G = Q otherwise; and the rows that count, bool [B, H, Q]: those that see anything and,
        if Q = K and not ``cross``, whose own token is seen by some row.

    Raises:
        InputError: If the mask is not boolean or does not broadcast.
    """
    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=query.device)
    shape = (batch, heads, queries, keys)
    fits = mask.ndim == 4 and all(
        size in {1, wanted} for size, wanted in zip(mask.shape, shape, strict=True)
    )
    if mask.dtype != torch.bool or not fits:
        raise InputError(
            f"mask must be boolean, True = may attend, and broadcast to {list(shape)}, got "
            f"{mask.dtype} {list(mask.shape)}; a padding mask is [B, 1, 1, K]"
        )
    mask = mask.to(query.device)
    seen, sees = mask.any(-2, keepdim=True), mask.any(-1, keepdim=True)
    groups = seen if bool(((mask == seen) | ~sees).all()) else mask
    rows = sees.squeeze(-1).expand(batch, heads, queries)
    if queries == keys and not cross:
        rows = rows & seen.squeeze(-2)
    return groups.expand(batch, heads, -1, keys), rows


def output_values(value: Tensor, groups: Tensor, projection: Tensor | None) -> Tensor:
    """Return values with the left null space of T = V·projection, at most D wide.

    Args:
        value: Values, [B, H, K, D].
        groups: Visible keys, bool [B, H, G, K].
        projection: Output projection per head, [H, D, M], or None.

    Returns:
        Float64 [B, H, K, D], hidden keys zeroed: V itself for heads whose projection has rank D,
        V·C with C·Cᵀ = projection·projectionᵀ for the others.

    Raises:
        InputError: If the projection does not match the heads.
    """
    hidden = ~groups.any(-2)[..., None]
    values = value.double().masked_fill(hidden, 0.0)
    check_finite(value=values)
    if projection is None:
        return values
    heads, width = value.shape[1], value.shape[-1]
    if projection.ndim != 3 or projection.shape[:2] != (heads, width):
        raise InputError(
            f"projection must be [H, D, M] with H = {heads}, D = {width}, "
            f"got {list(projection.shape)}"
        )
    matrix = projection.to(values)
    squares, axes = torch.linalg.eigh(matrix @ matrix.mT)
    kept = squares > (max(matrix.shape[1:]) * FLOAT32_EPS) ** 2 * squares[..., -1:]
    factor = axes * squares.masked_fill(~kept, 0.0).sqrt()[..., None, :]
    identity = torch.eye(width, dtype=values.dtype, device=values.device)
    return values @ torch.where(kept.all(-1)[:, None, None], identity, factor)


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse tensors that are not one attention call with repeated key and value heads.

    Args:
        query: Queries, [B, H, Q, R].
        key: Keys, [B, H, K, R].
        value: Values, [B, H, K, D].

    Raises:
        InputError: If the shapes do not fit together.
    """
    shapes = [list(tensor.shape) for tensor in (query, key, value)]
    fits = (
        all(len(shape) == 4 for shape in shapes)
        and shapes[0][:2] == shapes[1][:2] == shapes[2][:2]
        and shapes[1][2] == shapes[2][2]
        and shapes[0][3] == shapes[1][3]
    )
    if not fits:
        raise InputError(
            "query, key and value must be [B, H, Q, R], [B, H, K, R] and [B, H, K, D], got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}; repeat grouped key and value heads first"
        )


def check_finite(**tensors: Tensor) -> None:
    """Refuse NaN and infinity, naming the argument, the example and the head.

    Args:
        **tensors: Tensors of shape [B, H, …] under their argument names.

    Raises:
        NonFiniteError: If an entry is NaN or infinite.
    """
    for name, tensor in tensors.items():
        wrong = ~torch.isfinite(tensor).flatten(2).all(-1)
        if wrong.any():
            example, head = wrong.nonzero()[0].tolist()
            raise NonFiniteError(
                f"{name} has NaN or infinite entries in example {example}, head {head}; "
                "mask the affected tokens or find where they arise"
            )
