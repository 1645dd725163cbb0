"""Attention probabilities from queries and keys, as the implementation that ran computes them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from attnlens.algebra.values import working_dtype

EmptyRows = Literal["zero", "uniform"]


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    empty_rows: EmptyRows = "zero",
) -> Tensor:
    """Compute `softmax(cap(QKᵀ · s) + bias)` over the keys each row may attend to.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, H, K, D]`.
        scaling: factor s on the logits; by default `D**-0.5`.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        bias: additive, broadcastable to `[B, H, Q, K]`.
        softcap: c in `c · tanh(x / c)`, applied before the bias.
        sinks: `[H]` or broadcastable to `[B, H, Q, 1]`; logits of an extra column that takes
            probability and is dropped, so that rows sum to less than one.
        empty_rows: what a row with nothing to attend to becomes: all zero (scaled dot-product
            attention with a boolean mask) or uniform (a finite additive mask). With sinks, zero.

    Returns:
        `[B, H, Q, K]` in `[0, 1]`; float64 for float64 queries, else float32.
    """
    working = working_dtype(query)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = (query.to(working) * scaling) @ key.to(working).mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(working)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        column = column.to(working).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    if mask is None:
        return logits.softmax(-1)
    empty = ~mask.any(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(-1)
    return weights if empty_rows == "uniform" else weights.masked_fill(empty, 0.0)
