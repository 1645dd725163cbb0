"""Norm-weighted attention: how much of what a token writes comes from which token.

Kobayashi et al., "Attention Is Not Only a Weight", EMNLP 2020: attention to a value of length
near zero does nothing, so `p_ij ‖T_j‖` is looked at instead of `p_ij`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlens.algebra.problem import Problem
from attnlens.attention.health import mean_of
from attnlens.errors import InputError


def norm_fields(problem: Problem) -> dict[str, Tensor]:
    """Say of every example and head how long what it writes is, and how much of it cancels.

    Args:
        problem: the call.

    Returns:
        `[B, H]` float64 by the name of the field in the result; NaN where an example has none.
    """
    norms = problem.value_norms
    column = pad(norms[..., None].to(problem.dtype), (0, problem.values.shape[-1] - 1))
    written = problem.rows.context(column)[..., 0].double()  # Σ_j p_ij τ_j
    outputs = problem.outputs.double()
    if problem.root is not None:
        outputs = outputs @ problem.root
    left = torch.linalg.vector_norm(outputs, dim=-1)
    ratio = (left / written).clamp(max=1)
    return {
        "value_norm": mean_of(norms, problem.support.keys),
        "norm_weighted": mean_of(written, problem.active),
        "cancellation": mean_of(ratio, problem.active & (written > 0)),
    }


def rollout(maps: Sequence[Tensor], residual: float = 0.5, *, normalise: bool = False) -> Tensor:
    """Follow attention through the layers: `Ã_l = Â_l Ã_{l−1}` with `Â = r I + (1 − r) A`.

    Args:
        maps: one map for each layer, first to last: `[B, K, K]`, or `[B, H, K, K]` of which the
            mean over heads is taken. Raw, effective or norm-weighted.
        residual: r, the share of a token that the residual stream passes on.
        normalise: divide every row by the sum of its absolute entries first, as norm-weighted
            maps need it; a row of zeros stays one.

    Returns:
        `[B, L, K, K]`, row i of layer l: what of the input tokens is in token i after it. Rows sum
        to one where those of the maps do.

    Raises:
        InputError: if there is no map, the shapes differ, or the share is not in `[0, 1]`.

    References:
        Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, section 3.

    Examples:
        >>> swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> rollout([swap, swap])[0, 1]
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    shapes = [list(layer.shape) for layer in maps]
    fits = bool(shapes) and all(s == shapes[0] for s in shapes) and len(shapes[0]) in (3, 4)
    if not fits or shapes[0][-1] != shapes[0][-2]:
        raise InputError(
            f"maps must be square, [B, K, K] or [B, H, K, K], one shape for every layer. "
            f"Got {shapes}."
        )
    if not 0 <= residual <= 1:
        raise InputError(f"residual must lie in [0, 1]. Got {residual!r}.")
    layers = []
    passed = torch.eye(shapes[0][-1], dtype=maps[0].dtype, device=maps[0].device)
    identity = passed
    for layer in maps:
        mixing = layer.mean(1) if layer.dim() == 4 else layer
        if normalise:
            total = mixing.abs().sum(-1, keepdim=True)
            mixing = mixing / torch.where(total > 0, total, 1.0)
        passed = (residual * identity + (1 - residual) * mixing) @ passed
        layers.append(passed)
    return torch.stack(layers, 1)


def mixing_ratio(stays: Tensor, mixed: Tensor) -> Tensor:
    """Compare what other tokens add to a token with what it keeps.

    Args:
        stays: `x_i + Σ_h p^h_ii T^h_i`, `[..., M]`.
        mixed: `Σ_h Σ_{j ≠ i} p^h_ij T^h_j`, `[..., M]`.

    Returns:
        `‖mixed‖ / (‖mixed‖ + ‖stays‖)`, `[...]` in `[0, 1]`; NaN where both are zero.

    References:
        Kobayashi et al., "Incorporating Residual and Normalization Layers into Analysis of Masked
        Language Models", EMNLP 2021, section 3.

    Examples:
        >>> mixing_ratio(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(0.2500)
    """
    added, kept = (torch.linalg.vector_norm(part, dim=-1) for part in (mixed, stays))
    ratio: Tensor = added / (added + kept)
    return ratio
