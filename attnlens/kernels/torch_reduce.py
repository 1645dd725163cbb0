"""Reductions of effective attention, tile by tile: the PyTorch twin."""

import torch
from torch import Tensor

from attnlens.kernels.returned import EffectiveReduction
from attnlens.kernels.tiles import blocks, row_tiles


def effective_reduce(
    coordinates: Tensor, basis: Tensor, *, top_k: int, maps: bool
) -> EffectiveReduction:
    """Return the reductions of C Uᵀ; see `attnlens.kernels.effective_reduce`."""
    batch, heads, queries, _ = coordinates.shape
    keys = basis.shape[-2]
    column_sums = coordinates.new_zeros((batch, heads, keys))
    written = coordinates.new_empty((batch, heads, queries, keys)) if maps else None
    largest = coordinates.new_full((batch, heads, top_k), -1.0)
    places = torch.zeros((batch, heads, top_k), dtype=torch.int64, device=basis.device)
    for example in range(batch):
        for group, rows in row_tiles(heads, queries, keys):
            for block in blocks(keys):
                tile = coordinates[example, group, rows] @ basis[example, group, block].mT
                if written is not None:
                    written[example, group, rows, block] = tile
                magnitude = tile.abs_()
                column_sums[example, group, block] += magnitude.sum(-2)
                if top_k:
                    width = magnitude.shape[-1]
                    found, at = magnitude.flatten(1).topk(min(top_k, magnitude[0].numel()))
                    place = (rows.start + at // width) * keys + block.start + at % width
                    _keep_largest(found, place, largest[example, group], places[example, group])
    if not top_k:
        return EffectiveReduction(column_sums, None, None, None, None, written)
    return EffectiveReduction(column_sums, None, *entries(coordinates, basis, places), written)


def _keep_largest(found: Tensor, place: Tensor, largest: Tensor, places: Tensor) -> None:
    """Merge what a tile found, [h, ≤ k] with flat places, into the k largest so far, [h, k]."""
    merged, order = torch.cat([largest, found], -1).topk(largest.shape[-1])
    largest.copy_(merged)
    places.copy_(torch.cat([places, place], -1).gather(-1, order))


def entries(coordinates: Tensor, basis: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, rows and columns of the entries of C Uᵀ at flat places, each `[B, H, k]`."""
    queries = places // basis.shape[-2]
    keys = places % basis.shape[-2]
    rows = coordinates.gather(-2, queries[..., None].expand(*places.shape, basis.shape[-1]))
    columns = basis.gather(-2, keys[..., None].expand(*places.shape, basis.shape[-1]))
    return (rows * columns).sum(-1), queries, keys
