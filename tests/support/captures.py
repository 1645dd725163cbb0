"""Captures made by hand, with every tensor known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlens import Capture
from attnlens.capture import Kind, Masking, OutputProjection
from tests.support import reference


def synthetic_capture(
    *,
    batch: int = 3,
    heads: int = 4,
    groups: int = 1,
    queries: int = 26,
    keys: int = 26,
    width: int = 8,
    mask: Tensor | None = None,
    causal: bool = False,
    projection: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    kind: Kind = "encoder",
    **fields: Any,
) -> Capture:
    """A call with random queries, keys and biased values, and the context they give.

    `groups` query heads share a key head. `projection` is `[H, D, M]`; without it H is unknown.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(count: int, tokens: int) -> Tensor:
        tensor = torch.randn(batch, count, tokens, width, generator=generator)
        return (tensor + torch.randn(count, 1, width, generator=generator)).to(dtype)

    query, key = random(heads, queries), random(heads // groups, keys)
    value = random(heads // groups, keys)
    seen = mask
    if causal:
        rule = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()
        seen = rule if mask is None else rule & mask
    attention = reference.attention(query, key.repeat_interleave(groups, 1), seen)
    context = attention @ value.double().repeat_interleave(groups, 1)
    return Capture(
        site="layer.0.attention",
        layer=0,
        stack="layer.*.attention",
        kind=kind,
        call=0,
        query=query,
        grouped_key=key,
        grouped_value=value,
        context=context.to(dtype),
        masking=Masking(mask, causal=causal),
        scaling=width**-0.5,
        output_projection=None
        if projection is None
        else OutputProjection("layer.0.output", projection),
        **fields,
    )


def dense_statistics(capture: Capture, mask: Tensor | None, real: Tensor) -> dict[str, Tensor]:
    """Every field of `HeadStatistics` for a call, from its queries, keys and values alone."""
    assert capture.query is not None and capture.key is not None
    attention = reference.attention(
        capture.query, capture.key, mask, capture.scaling, capture.masking.bias
    )
    return reference.head_statistics(attention, capture.value, mask, real, capture.projection)
