"""Reductions of effective attention on the fly: the Triton kernel."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlens.kernels.returned import EffectiveReduction
from attnlens.kernels.torch_reduce import entries

BLOCK_Q, BLOCK_K = 64, 64

# Beyond every place in the map.
NOWHERE = tl.constexpr(1 << 62)


def effective_reduce(
    coordinates: Tensor, basis: Tensor, *, top_k: int, maps: bool
) -> EffectiveReduction:
    """Return the reductions of one kernel launch; see `attnlens.kernels.effective_reduce`.

    Each program keeps the top_k entries of its own key columns; the best of those are chosen
    here.
    """
    batch, heads, queries, rank = coordinates.shape
    keys = basis.shape[2]
    coordinates, basis = coordinates.contiguous(), basis.contiguous()
    column_sums = basis.new_empty((batch, heads, keys))
    written = basis.new_empty((batch, heads, queries, keys)) if maps else None
    key_blocks = triton.cdiv(keys, BLOCK_K)
    magnitudes = basis.new_empty((batch, heads, key_blocks * top_k))
    places = basis.new_empty((batch, heads, key_blocks * top_k), dtype=torch.int64)
    grid = (batch * heads, key_blocks)
    effective_reduce_kernel[grid](
        coordinates=coordinates,
        basis=basis,
        column_sums=column_sums,
        maps=column_sums if written is None else written,
        magnitudes=magnitudes,
        places=places,
        queries=queries,
        keys=keys,
        RANK=rank,
        TOP=top_k,
        MAPS=maps,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        BLOCK_TOP=triton.next_power_of_2(max(top_k, 1)),
        num_warps=8,
        num_stages=2,
    )
    if not top_k:
        return EffectiveReduction(column_sums, None, None, None, None, written)
    chosen = places.gather(-1, magnitudes.topk(top_k).indices)
    return EffectiveReduction(column_sums, None, *entries(coordinates, basis, chosen), written)


@triton.jit
def effective_reduce_kernel(
    coordinates,
    basis,
    column_sums,
    maps,
    magnitudes,
    places,
    queries,
    keys,
    RANK: tl.constexpr,
    TOP: tl.constexpr,
    MAPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """All rows of C Uᵀ for BLOCK_K keys of one head, one tile at a time."""
    program = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ranks, slots = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_TOP)
    real_token = token < keys
    vectors = tl.load(
        basis + (program * keys + token)[:, None] * RANK + ranks[None, :],
        mask=real_token[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )
    sums = tl.zeros((BLOCK_K,), tl.float32)
    # Slots beyond TOP never give way.
    kept = tl.where(slots < TOP, -1.0, float("inf"))
    kept_place = tl.zeros((BLOCK_TOP,), tl.int64)
    for start in range(0, queries, BLOCK_Q):
        row = start + tl.arange(0, BLOCK_Q)
        real = (row < queries)[:, None] & real_token[None, :]
        rows = tl.load(
            coordinates + (program * queries + row)[:, None] * RANK + ranks[None, :],
            mask=(row < queries)[:, None] & (ranks < RANK)[None, :],
            other=0.0,
        )
        tile = tl.dot(rows, tl.trans(vectors), input_precision="tf32x3")
        place = row[:, None].to(tl.int64) * keys + token[None, :]
        if MAPS:
            tl.store(maps + program * queries * keys + place, tile, mask=real)
        magnitude = tl.abs(tile)
        sums += tl.sum(magnitude, axis=0)  # rows and keys beyond the end are zero
        if TOP > 0:
            waiting = tl.where(real, magnitude, -1.0)
            largest = tl.max(tl.max(waiting, axis=1), axis=0)
            least = tl.min(kept, axis=0)
            while largest > least:
                slot = tl.min(tl.where(kept == least, slots, BLOCK_TOP), axis=0)
                found = tl.where(waiting == largest, place, NOWHERE)
                first = tl.min(tl.min(found, axis=1), axis=0)
                kept = tl.where(slots == slot, largest, kept)
                kept_place = tl.where(slots == slot, first, kept_place)
                waiting = tl.where(place == first, -1.0, waiting)
                largest = tl.max(tl.max(waiting, axis=1), axis=0)
                least = tl.min(kept, axis=0)
    tl.store(column_sums + program * keys + token, sums, mask=real_token)
    if TOP > 0:
        out = (program * tl.num_programs(1) + tl.program_id(1)) * TOP + slots
        tl.store(magnitudes + out, kept, mask=slots < TOP)
        tl.store(places + out, kept_place, mask=slots < TOP)
