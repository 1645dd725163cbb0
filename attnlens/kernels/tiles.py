"""Tiles of attention logits that stay in the cache: nothing quadratic is ever allocated."""

from collections.abc import Iterator
from math import isqrt

# A tile is four heads of 512 rows by 512 keys: wide enough in both directions for a fast matrix
# product, and two float32 buffers of it fit the last-level cache of any current CPU.
TILE_ELEMENTS = 1 << 20
_HEADS = 4


def row_tiles(heads: int, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Split attention rows into tiles whose blocks of keys have at most TILE_ELEMENTS elements.

    Rows run fastest, so that the keys of a head are used while they are at hand.

    Args:
        heads: number of heads H.
        queries: number of rows Q.
        keys: number of keys K, to be split by :func:`blocks`.

    Yields:
        Slices of the heads and of the query rows.
    """
    group = _heads(heads, queries, keys)
    for head in range(0, heads, group):
        for rows in blocks(queries):
            yield slice(head, min(head + group, heads)), rows


def tile_elements(heads: int, queries: int, keys: int) -> int:
    """Number of elements of the largest block of the tiles of :func:`row_tiles`."""
    return _heads(heads, queries, keys) * _size(queries) * _size(keys)


def blocks(length: int, stop: int | None = None) -> Iterator[slice]:
    """Split rows or keys evenly into blocks of about a tile's edge.

    Args:
        length: number of rows or keys.
        stop: where to end before that; blocks are those of the whole length, the last is cut.

    Yields:
        Slices in ascending order.
    """
    stop = length if stop is None else stop
    size = _size(length)
    for start in range(0, stop, size):
        yield slice(start, min(start + size, stop))


def _heads(heads: int, queries: int, keys: int) -> int:
    return min(heads, max(1, TILE_ELEMENTS // (_size(queries) * _size(keys))))


def _size(length: int) -> int:
    """Rows or keys in a block: the edge of a tile, give or take a half of it."""
    edge = max(1, isqrt(TILE_ELEMENTS // _HEADS))
    count = max(1, round(length / edge))
    return max(1, -(-length // count))
