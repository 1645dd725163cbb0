"""The attention that moves a model's answer, to first order.

For outputs `y ∈ R^C` of a model and `G_c = ∂y_c/∂O`, `[Q, D]`, the derivative with respect to
attention is `∂y_c/∂A = G_c Vᵀ` at the keys that a row sees. What counts of A is its projection on
the span of these C matrices: with `K_cc' = ⟨G_c Vᵀ, G_c' Vᵀ⟩` and `b_c = ⟨A, G_c Vᵀ⟩ = ⟨O, G_c⟩`
it is `Σ_c (K⁺ b)_c G_c Vᵀ`, of squared norm `bᵀ K⁺ b`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.supports import Support, row_chunks, support_of
from attnlens.errors import InputError
from attnlens.kernels.ranks import counts, rank_threshold
from attnlens.kernels.torch_gram import selected_rows


class AnswerLevel(NamedTuple):
    """What of the attention of every head moves an answer.

    Attributes:
        weights: `K⁺ b`, `[B, H, C]` float64: the projection is `Σ_c weights_c G_c Vᵀ`.
        square: squared norm of the projection, `[B, H]` float64.
        importance: b, `[B, H, C]` float64, the derivative of each output with respect to a gate on
            the head (Michel et al. 2019).
        rank: `[B, H]` int64, how many directions of attention the outputs depend on.
    """

    weights: Tensor
    square: Tensor
    importance: Tensor
    rank: Tensor


def answer_level(gradient: Tensor, value: Tensor, context: Tensor, support: Support) -> AnswerLevel:
    """Project attention on what moves an answer, without any `[Q, K]` tensor but blocks of rows.

    Args:
        gradient: G, `[C, B, H, Q, D]`.
        value: `[B, H, K, D]`, grouped heads repeated.
        context: `O = A V`, `[B, H, Q, D]`.
        support: the keys of every row, and the rows that count.

    Returns:
        The projection.
    """
    outputs, batch, heads, queries, width = gradient.shape
    value = selected_rows(value, support.keys, torch.float64)
    context = selected_rows(context, support.active, torch.float64)
    gram = value.new_zeros(batch, heads, outputs, outputs)
    importance = value.new_zeros(batch, heads, outputs)
    active = support.active.expand(batch, heads, -1)
    for example, head in active.any(-1).nonzero().tolist():
        rows = torch.where(active[example, head, :, None], gradient[:, example, head].double(), 0.0)
        place = (example, head)
        importance[place] = rows.flatten(1) @ context[place].flatten()
        if support.shared:
            inner = value[place].mT @ value[place]
            gram[place] = (rows @ inner).flatten(1) @ rows.flatten(1).mT
            continue
        mask = support.of_heads(torch.tensor([example]), torch.tensor([head]))
        for start, stop in row_chunks(queries, outputs * value.shape[-2]):
            part = (rows[:, start:stop] @ value[place].mT) * mask.mask(start, stop)[0]
            gram[place] += part.flatten(1) @ part.flatten(1).mT
    squares, axes = torch.linalg.eigh(gram)
    size = active.sum(-1) * width
    threshold = rank_threshold(size, outputs)
    counted = counts(squares, squares[..., -1:], threshold[..., None])
    along = (axes.mT @ importance[..., None])[..., 0]
    scaled = torch.where(counted, along / squares.where(counted, 1.0), 0.0)
    return AnswerLevel(
        weights=(axes @ scaled[..., None])[..., 0],
        square=(scaled * along).sum(-1),
        importance=importance,
        rank=counted.sum(-1),
    )


def answer_maps(gradient: Tensor, value: Tensor, weights: Tensor, support: Support) -> Tensor:
    """Build `Σ_c weights_c G_c Vᵀ`, `[B, H, Q, K]` float64, zero outside the mask."""
    value = selected_rows(value, support.keys, torch.float64)
    combined = torch.einsum("cbhqd,bhc->bhqd", gradient.double(), weights)
    seen = support.mask() & support.active[..., None]
    return torch.where(seen, combined @ value.mT, 0.0)


@torch.no_grad()
def answer_attention(
    attention: Tensor,
    value: Tensor,
    gradient: Tensor,
    mask: Tensor | None = None,
    *,
    cross: bool = False,
) -> Tensor:
    """Project attention on what moves an answer, `A_out`, to first order.

    Args:
        attention: `[B, H, Q, K]` attention probabilities before dropout.
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        gradient: `∂y_c/∂O` of C outputs, `[C, B, H, Q, D]`.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        `[B, H, Q, K]` float64: the least change to nothing, so to say: of all matrices with the
        derivatives `⟨X, ∂y_c/∂A⟩ = ⟨A, ∂y_c/∂A⟩` the one of least norm. It is a projection of A⊥.

    Raises:
        InputError: if shapes do not fit.

    References:
        Michel et al., "Are Sixteen Heads Really Better than One?", NeurIPS 2019, for `⟨A, ∂y/∂A⟩`.

    Examples:
        >>> attention = torch.tensor([[[[0.5, 0.3, 0.2]]]])
        >>> value = torch.tensor([[[[1.0], [0.0], [0.0]]]])  # the answer is the first entry
        >>> answer_attention(attention, value, torch.ones(1, 1, 1, 1, 1))
        tensor([[[[0.5000, 0.0000, 0.0000]]]], dtype=torch.float64)
    """
    batch, heads, queries, keys = attention.shape
    width = value.shape[-1]
    if value.shape != (batch, heads, keys, width) or gradient.shape[1:] != (
        batch,
        heads,
        queries,
        width,
    ):
        raise InputError(
            f"attention, value and gradient must be [B, H, Q, K], [B, H, K, D] and "
            f"[C, B, H, Q, D]. Got {list(attention.shape)}, {list(value.shape)} and "
            f"{list(gradient.shape)}."
        )
    support = support_of(mask, batch, queries, keys, device=value.device).counted(own=not cross)
    context = attention.double() @ selected_rows(value, support.keys, torch.float64)
    level = answer_level(gradient, value, context, support)
    return answer_maps(gradient, value, level.weights, support)
