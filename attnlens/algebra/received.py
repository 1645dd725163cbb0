"""How much attention every key receives: column sums of A, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnlens.algebra.problem import Problem
from attnlens.algebra.softmax import AttentionRows
from attnlens.algebra.supports import row_chunks
from attnlens.algebra.values import repeated, working_dtype


def received_sums(problem: Problem) -> tuple[Tensor, Tensor]:
    """Sum A over the rows that count, key by key.

    Where A follows from queries and keys, `p_ij = exp(s_ij − lse_i)` with the log-sum-exp of the
    row sums: no row is normalised twice.

    Args:
        problem: the call.

    Returns:
        `Σ_i p_ij`, `[B, H, K]` float64, and the number of rows that see each key,
        `[B, 1 or H, K]` int64.
    """
    rows, support = problem.rows, problem.support
    batch, heads, _, keys = rows.shape
    columns = torch.zeros(batch, heads, keys, dtype=torch.float64, device=problem.active.device)
    seen = torch.zeros_like(support.keys, dtype=torch.int64)
    if support.shared:
        seen += support.active.sum(-1, keepdim=True) * support.keys
    for start, stop, entries in _blocks(rows, problem.row_sums.logsumexp, problem.active):
        if not support.shared:
            visible = support.mask(start, stop) & support.active[:, :, start:stop, None]
            seen += visible.sum(-2)
            entries = entries.masked_fill_(~visible, 0.0)
        columns += entries.sum(-2)
    return torch.where(support.keys, columns, 0.0), seen


def _blocks(
    rows: AttentionRows, logsumexp: Tensor, active: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """Visit A block by block; zero in rows that do not count, masked keys hold anything.

    Yields:
        First and last row, exclusive, and `[B, H, q, K]`, which may be overwritten.
    """
    batch, heads, queries, keys = rows.shape
    cut = row_chunks(queries, batch * heads * keys)
    if not rows.streams or rows.bias is not None:
        for start, stop in cut:
            part = slice(start, stop)
            yield start, stop, torch.where(active[:, :, part, None], rows.attention(part), 0.0)
        return
    assert rows.query is not None and rows.key is not None
    dtype = working_dtype(rows.query)
    query = rows.query.to(dtype).flatten(0, 1)
    key = repeated(rows.key, heads).to(dtype).flatten(0, 1).mT
    offset = torch.where(active, -logsumexp, -torch.inf).to(dtype).flatten(0, 1)[..., None]
    for start, stop in cut:
        part = slice(start, stop)
        block = torch.baddbmm(offset[:, part], query[:, part], key, alpha=rows.scale)
        yield start, stop, block.exp_().unflatten(0, (batch, heads))
