"""Attention weighted by the lengths of what is attended to, and attention of a token to itself."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.algebra.softmax import AttentionRows
from attnlens.algebra.supports import row_chunks
from attnlens.errors import InputError


def summed_norms(rows: AttentionRows, value: Tensor, projection: Tensor) -> Tensor:
    """Compute `‖Σ_h p^h_ij T^h_j‖`, block by block of query rows.

    With the Gram matrix `Γ_j` of the H vectors `T^h_j` this is `√(p_ij Γ_j p_ijᵀ)`: no vector of
    the residual stream is built for any pair of tokens.

    Args:
        rows: how A comes about.
        value: `[B, H, K, D]`, zero at masked keys.
        projection: `[H, D, M]`.

    Returns:
        `[B, Q, K]` float64, ≥ 0.
    """
    batch, heads, queries, keys = rows.shape
    value, projection = value.double(), projection.double()
    grams = []
    for head in range(heads):
        crossed = projection @ projection[head].T  # [H, D, D]
        grams.append(((value @ crossed) * value[:, head, None]).sum(-1))
    gram = torch.stack(grams, -1).permute(0, 2, 1, 3)  # [B, K, H, H]
    result = value.new_zeros(batch, queries, keys)
    for start, stop in row_chunks(queries, batch * heads * keys):
        attention = rows.attention(slice(start, stop)).double().permute(0, 3, 2, 1)  # [B, K, q, H]
        square = ((attention @ gram) * attention).sum(-1)
        result[:, start:stop] = square.clamp(min=0).sqrt().mT
    return result


def own_attention(rows: AttentionRows) -> Tensor:
    """The attention of every token to itself, `p_ii`, `[B, H, Q]` float64."""
    _, _, queries, keys = rows.shape
    if queries != keys:
        raise InputError(
            f"{rows.site} has {queries} queries and {keys} keys: no token attends to itself there."
        )
    parts = [attention.diagonal(part.start, -2, -1).double() for part, attention in rows.chunks()]
    return torch.cat(parts, -1)
