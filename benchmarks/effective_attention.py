"""Maps of effective attention against the two usual ways to compute them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from scipy.linalg import null_space
from torch import Tensor

from attnlens.algebra.effective import effective_attention
from benchmarks.registry import Check, Comparison, Step, case, seconds

BATCH, HEADS, WIDTH = 2, 12, 64
BAR = 1e-5


@case("effective_attention")
def steps() -> Iterator[Step]:
    """Maps `[2, 12, n, n]` against a scipy loop over heads and a batched full SVD."""
    for tokens in (128, 512):
        attention, value = problem(tokens)
        exact = scipy_loop(attention.double(), value.double())
        setting = f"n = {tokens}"
        error = _error(effective_attention(attention, value), exact)
        yield Check(f"{setting}: effective_attention against scipy loop", error, BAR)
        error = _error(full_svd(attention, value), exact)
        yield Check(f"{setting}: full SVD against scipy loop", error, 1e-4)
        ways = (effective_attention, scipy_loop, full_svd)
        ours, loop, svd = seconds(
            *(partial(way, attention, value) for way in ways), repeats=3 if tokens > 128 else 5
        )
        yield Comparison(setting, "effective_attention", ours, "scipy loop", loop)
        yield Comparison(setting, "effective_attention", ours, "full SVD", svd)


def problem(tokens: int) -> tuple[Tensor, Tensor]:
    """Random attention `[B, H, n, n]` and values `[B, H, n, D]`, float32."""
    generator = torch.Generator().manual_seed(0)
    attention = torch.randn(BATCH, HEADS, tokens, tokens, generator=generator).softmax(-1)
    return attention, torch.randn(BATCH, HEADS, tokens, WIDTH, generator=generator)


def scipy_loop(attention: Tensor, value: Tensor) -> Tensor:
    """The textbook way: a null space per head."""
    result = np.empty(attention.shape, dtype=attention.numpy().dtype)
    for example in range(attention.shape[0]):
        for head in range(attention.shape[1]):
            free = null_space(value[example, head].numpy().T)
            rows = attention[example, head].numpy()
            result[example, head] = rows - rows @ free @ free.T
    return torch.from_numpy(result)


def full_svd(attention: Tensor, value: Tensor) -> Tensor:
    """The batched textbook way: all left singular vectors, without those of the rank."""
    left, sigma, _ = torch.linalg.svd(value, full_matrices=True)
    free = left[..., sigma.shape[-1] :]
    return attention - attention @ free @ free.mT


def _error(result: Tensor, exact: Tensor) -> float:
    """Largest relative Frobenius error of a head."""
    difference = (result.double() - exact).flatten(2).norm(dim=-1)
    return (difference / exact.flatten(2).norm(dim=-1)).max().item()
