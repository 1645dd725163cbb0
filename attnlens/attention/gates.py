"""How much a loss depends on each head: derivatives with respect to gates on the heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.errors import InputError


class GateSums(NamedTuple):
    """What one batch says about the gates `ξ_h` of `ξ_h O_h`, each `[B, H]` float64.

    Attributes:
        derivative: `∂L/∂ξ_h = Σ_i ⟨o_i, ∂L/∂o_i⟩` of every example, over its real positions.
        magnitude: `Σ_i |⟨o_i, ∂L/∂o_i⟩|`, the absolute value taken position by position.
        positions: number of real positions that the loss depends on.
        finite: 1 where context and gradient are finite at every real position, else 0.
    """

    derivative: Tensor
    magnitude: Tensor
    positions: Tensor
    finite: Tensor


def head_importance(
    context: Tensor,
    gradient: Tensor,
    mask: Tensor | None = None,
    *,
    loss_scale: float = 1.0,
) -> Tensor:
    """Compute `I_h = E_x |⟨O_h, ∂L/∂O_h⟩|`, the sensitivity of a loss to a gate on each head.

    No attention matrix is needed: `⟨O_h, ∂L/∂O_h⟩ = ⟨A_h, ∂L/∂A_h⟩ = ∂L/∂ξ_h`.

    Args:
        context: `[B, H, Q, D]`, the output `O = A V`.
        gradient: `[B, H, Q, D]`, `∂L/∂O`.
        mask: `[B, Q]` bool, the real positions; None means all.
        loss_scale: factor on the loss whose gradient this is, divided out.

    Returns:
        `[H]` float64, ≥ 0.

    Raises:
        InputError: on a wrong shape or scale.

    References:
        Michel et al., "Are Sixteen Heads Really Better than One?", NeurIPS 2019, section 4.1.

    Examples:
        >>> context = torch.tensor([[[[1.0, 2.0]], [[3.0, 0.0]]]])  # two heads, one token
        >>> head_importance(context, torch.tensor([[[[1.0, -1.0]], [[0.0, 4.0]]]]))
        tensor([1., 0.], dtype=torch.float64)
    """
    if context.dim() != 4 or context.shape != gradient.shape:
        raise InputError(
            f"context and gradient must have one shape [B, H, Q, D]. Got {list(context.shape)} "
            f"and {list(gradient.shape)}."
        )
    batch, _, queries, _ = context.shape
    if mask is not None and (mask.shape != (batch, queries) or mask.dtype != torch.bool):
        raise InputError(
            f"mask must be bool [B, Q] = [{batch}, {queries}]. Got {list(mask.shape)}, "
            f"{mask.dtype}."
        )
    if not loss_scale > 0:
        raise InputError(f"loss_scale must be positive. Got {loss_scale!r}.")
    active = None if mask is None else mask[:, None]
    return gate_sums(context, gradient, active).derivative.abs().mean(0) / loss_scale


def gate_sums(
    context: Tensor, gradient: Tensor, active: Tensor | None = None, windows: int = 1
) -> GateSums:
    """Reduce contexts and their gradients to derivatives per example and head.

    Args:
        context: `[B, H, Q, D]`.
        gradient: `[B, H, Q, D]`.
        active: `[B, 1 or H, Q]` bool, the real positions; None means all.
        windows: how many windows of one example are folded into B, examples first.

    Returns:
        The sums, `[B / windows, H]` each; entries that are not finite count as zero in them.
    """
    working = torch.float64 if context.dtype == torch.float64 else torch.float32
    product = context.to(working) * gradient.to(working)
    dot = product.sum(-1, dtype=torch.float64)  # [B, H, Q]
    used = (gradient != 0).any(-1).any(1, keepdim=True)
    if active is not None:
        dot = torch.where(active, dot, 0.0)
        used = used & active
    known = torch.isfinite(dot)
    dot = torch.where(known, dot, 0.0)
    sums = GateSums(
        dot.sum(-1),
        dot.abs().sum(-1),
        used.sum(-1).double().expand(dot.shape[:2]),
        known.all(-1).double(),
    )
    if windows == 1:
        return sums
    derivative, magnitude, positions, finite = (s.unflatten(0, (-1, windows)) for s in sums)
    return GateSums(derivative.sum(1), magnitude.sum(1), positions.sum(1), finite.amin(1))


def unit_layers(importance: Tensor) -> Tensor:
    """Scale the heads of every layer to unit l2 norm, so that layers can be compared.

    Args:
        importance: `[L, H]`; NaN where a head is missing.

    Returns:
        `[L, H]`; a layer without a positive entry stays as it is.

    References:
        Molchanov et al., "Pruning Convolutional Neural Networks for Resource Efficient
        Inference", ICLR 2017, section 2.2.
    """
    norm = importance.nan_to_num(0.0).norm(dim=-1, keepdim=True)
    return torch.where(norm > 0, importance / norm, importance)
