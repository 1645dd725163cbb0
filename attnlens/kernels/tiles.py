"""Tiles of attention rows that stay in the cache: nothing quadratic is ever allocated."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Two float32 buffers of this many elements fit the last-level cache of any current CPU; smaller
# tiles pay for their launches, larger ones for main memory.
TILE_ELEMENTS = 1 << 19


def row_tiles(heads: int, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Split [heads, queries, keys] into (rows, heads) tiles of at most TILE_ELEMENTS elements.

    Heads run fastest, so that what depends on the rows alone can be kept from tile to tile. A
    single row longer than the budget is one tile.

    Yields:
        Slices of the query rows and of the heads.
    """
    tile_rows = min(queries, max(1, TILE_ELEMENTS // keys))
    tile_heads = min(heads, max(1, TILE_ELEMENTS // (keys * tile_rows)))
    for row in range(0, queries, tile_rows):
        for head in range(0, heads, tile_heads):
            yield (
                slice(row, min(row + tile_rows, queries)),
                slice(head, min(head + tile_heads, heads)),
            )


def tile_buffers(count: int, rows: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Allocate flat buffers, each for any tile of the rows ``[B, H, Q, …]`` against the keys.

    Returns:
        An uninitialised tensor ``[count, elements]`` on the device of the rows.
    """
    elements = min(max(TILE_ELEMENTS, keys), rows.shape[1] * rows.shape[2] * keys)
    return rows.new_empty((count, elements), dtype=dtype)
