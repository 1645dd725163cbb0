"""Gradient norm and gradient × input of tokens, and their sums over a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlens.observer import Sums


class TokenGradients(NamedTuple):
    """What a loss has to do with each token; `[B, K]` float64, zero at padding.

    Attributes:
        norm: `‖∂loss/∂e_i‖`, at least 0.
        product: gradient × input, `⟨∂loss/∂e_i, e_i⟩`.
    """

    norm: Tensor
    product: Tensor


def token_saliency(hidden: Tensor, gradient: Tensor, mask: Tensor | None = None) -> TokenGradients:
    """Measure how much a loss depends on each token.

    Args:
        hidden: hidden states e, `[B, K, M]`.
        gradient: `∂loss/∂e`, `[B, K, M]`.
        mask: `[B, K]` bool, the real tokens; None: every token is real.

    Returns:
        Gradient norm and gradient × input; NaN or Inf at tokens where an argument is.

    Examples:
        >>> saliency = token_saliency(torch.ones(1, 1, 2), torch.tensor([[[3.0, -4.0]]]))
        >>> saliency.norm.item(), saliency.product.item()
        (5.0, -1.0)

    References:
        Shrikumar et al., "Not Just a Black Box: Learning Important Features Through Propagating
        Activation Differences", 2016, for gradient × input.
    """
    hidden, gradient = hidden.double(), gradient.double()
    norm, product = gradient.norm(dim=-1), (gradient * hidden).sum(-1)
    if mask is None:
        return TokenGradients(norm, product)
    return TokenGradients(norm.where(mask, 0.0), product.where(mask, 0.0))


def saliency_sums(gradients: TokenGradients, mask: Tensor, members: Tensor, positions: int) -> Sums:
    """Sum gradient norm, gradient × input and its absolute value by label and by position.

    Args:
        gradients: of the tokens of a batch; examples with NaN or Inf are left out and counted.
        mask: `[B, K]` bool, the real tokens.
        members: `[B, K, G]` bool, the tokens of each label.
        positions: P, the number of positions from the first to tell apart.

    Returns:
        Sums `by_label`, `[3, G]`, and `by_position`, `[3, P]`, with the numbers of `tokens`,
        `[G]`, and `positions`, `[P]`; the number of examples `skipped`, a scalar. All float64.
    """
    norm, product = gradients
    finite = (norm.isfinite() & product.isfinite()).all(1)[:, None]  # [B, 1]
    mask, members = mask & finite, (members & finite[..., None]).double()
    quantities = torch.stack([norm, product, product.abs()]).where(mask, 0.0)
    counted = min(mask.shape[1], positions)
    room = (0, positions - counted)
    # The first real token has position 0, on whichever side an example is padded.
    first = (mask.cumsum(1) == 0).sum(1, keepdim=True)
    column = first + torch.arange(counted, device=mask.device)
    inside = column < mask.shape[1]
    column = column.clamp(max=mask.shape[1] - 1)
    placed = quantities.gather(2, column.expand(3, -1, -1)).where(inside, 0.0)
    present = mask.gather(1, column) & inside
    return {
        "by_label": torch.einsum("qbk,bkg->qg", quantities, members),
        "by_position": pad(placed.sum(1), room),
        "tokens": members.sum((0, 1)),
        "positions": pad(present.sum(0).double(), room),
        "skipped": (~finite).sum().double(),
    }


def saliency_means(sums: Sums) -> Sums:
    """Turn the sums of a layer into fields of the result.

    Args:
        sums: of :func:`saliency_sums`, or their sums over batches.

    Returns:
        Means by label, `[G]`, and by position, `[P]`, by the name of the field; `skipped` is a
        scalar.
    """
    names = ("norm", "product", "magnitude")
    by_label = sums["by_label"] / sums["tokens"]
    by_position = sums["by_position"] / sums["positions"]
    return {
        "tokens": sums["tokens"],
        "skipped": sums["skipped"],
        **dict(zip(names, by_label, strict=True)),
        **{f"position_{name}": mean for name, mean in zip(names, by_position, strict=True)},
    }
