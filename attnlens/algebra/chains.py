"""Rows that see nearly the same keys, put together: what row factors are shared by.

Causal rows gain a key from one to the next, those of a sliding window gain one and lose one; with
holes, global tokens, or a prefix that all see, it is the same. A chain is a run of rows in which
few keys change; it has one factor. Which rows form chains depends on the mask alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnlens.algebra.supports import Support

Index = NDArray[np.int64]

# Rows of a chain, and keys that change in it, at most.
_LONGEST = 64
# Supports of a chain, at least: fewer are factored one by one.
_FEWEST = 4


class Chain(NamedTuple):
    """Rows that share a factor: that of the keys of one of them, the base, and what changes.

    Attributes:
        rows: `[r]` query rows, the base first.
        keys: `[m]` keys that enter or leave, in the order of the rows.
        signs: `[m]`, 1 for a key that enters and −1 for one that leaves.
        applied: `[r]`, how many of these changes lead from the base to each row.
        sizes: `[r]`, number of keys of each row.
        added: keys of the base; with `continues`, those that the base before does not have.
        continues: whether the base has all keys of that of the chain before.
        span: range of the keys that its rows see.
    """

    rows: Index
    keys: Index
    signs: Index
    applied: Index
    sizes: Index
    added: Index
    continues: bool
    span: tuple[int, int]


class ShortChain(NamedTuple):
    """Rows that see no more keys together than the values have dimensions.

    Attributes:
        rows: `[r]` query rows.
        keys: `[k]` all keys that they see, in the order in which they appear.
        reach: `[r]`, how many of the first keys contain those of each row.
        sizes: `[r]`, number of keys of each row.
    """

    rows: Index
    keys: Index
    reach: Index
    sizes: Index


class Plan(NamedTuple):
    """How the rows of one example and one mask are factored.

    Attributes:
        chains: chains with more keys than dimensions.
        short: chains with at most as many.
        separate: the other rows that see a key.
    """

    chains: list[Chain]
    short: list[ShortChain]
    separate: Index


class _Changes(NamedTuple):
    """Keys that differ between neighbouring rows, in order; `place` counts rows that see a key."""

    place: Index
    key: Index
    sign: Index

    def between(self, start: int, stop: int) -> _Changes:
        """Changes on the way from one place to a later one."""
        first, last = np.searchsorted(self.place, [start + 1, stop + 1])
        return _Changes(*(part[first:last] for part in self))


def plan_rows(support: Support, example: int, index: int, width: int) -> Plan:
    """Put the rows of one example and one mask into chains.

    Args:
        support: the mask, which differs by row.
        example: batch index.
        index: index of the mask.
        width: head dimension D.

    Returns:
        The plan; every row that counts and sees a key is in one of its parts.
    """
    sizes = _numbers(support.sizes[example, index])
    rows = np.flatnonzero(_numbers(support.active[example, index]) & (sizes > 0))
    sizes = sizes[rows]
    changes = _changes(support, example, index, rows)
    count = np.bincount(changes.place, minlength=len(rows))
    moved = np.cumsum(count)
    entered = np.cumsum(
        np.bincount(changes.place, weights=changes.sign > 0, minlength=len(rows))
    ).astype(np.int64)
    plan = Plan([], [], np.zeros(len(rows), dtype=np.int64))
    few = sizes <= width
    turns = np.append(np.flatnonzero(few[1:] != few[:-1]) + 1, len(rows))
    start, before = 0, None
    while start < len(rows):
        stop = min(start + _LONGEST, int(turns[np.searchsorted(turns, start, "right")]))
        steps, most = (entered, width - sizes[start]) if few[start] else (moved, np.int64(_LONGEST))
        stop = min(stop, int(np.searchsorted(steps, steps[start] + most, "right")))
        stop = max(stop, start + 1)
        if np.count_nonzero(count[start + 1 : stop]) < _FEWEST - 1:
            plan.separate[start:stop] = 1
        elif few[start]:
            plan.short.append(_short(support, example, index, rows, sizes, changes, start, stop))
        else:
            base = stop - 1 if sizes[stop - 1] > sizes[start] else start
            since = None if before is None else changes.between(before, base)
            plan.chains.append(
                _chain(support, example, index, rows, sizes, changes, start, stop, since)
            )
            before = base
        start = stop
    return plan._replace(separate=rows[plan.separate > 0])


def _chain(
    support: Support,
    example: int,
    index: int,
    rows: Index,
    sizes: Index,
    changes: _Changes,
    start: int,
    stop: int,
    since: _Changes | None,
) -> Chain:
    """The chain of the rows `start:stop`; its base is the end that sees more."""
    place, key, sign = changes.between(start, stop - 1)
    places = np.arange(start, stop)
    applied = np.searchsorted(place, places, "right")
    if sizes[stop - 1] > sizes[start]:
        places, key, sign = places[::-1], key[::-1], -sign[::-1]
        applied = len(key) - applied[::-1]
    seen = _keys_of(support, example, index, int(rows[places[0]]))
    continues = since is not None and bool((since.sign > 0).all())
    added = since.key if since is not None and continues else seen
    ends = [int(part.min()) for part in (seen, key)], [int(part.max()) for part in (seen, key)]
    return Chain(
        rows[places],
        key,
        sign,
        applied,
        sizes[places],
        added,
        continues,
        (min(ends[0]), max(ends[1]) + 1),
    )


def _short(
    support: Support,
    example: int,
    index: int,
    rows: Index,
    sizes: Index,
    changes: _Changes,
    start: int,
    stop: int,
) -> ShortChain:
    first = _keys_of(support, example, index, int(rows[start]))
    place, key, sign = changes.between(start, stop - 1)
    place, key = place[sign > 0], key[sign > 0]
    reach = len(first) + np.searchsorted(place, np.arange(start, stop), "right")
    # a key that comes back stands where it appeared first
    keys, where = np.unique(np.concatenate([first, key]), return_index=True)
    order = np.argsort(where)
    reach = np.searchsorted(where[order], reach, "left")
    return ShortChain(rows[start:stop], keys[order], reach, sizes[start:stop])


def _changes(support: Support, example: int, index: int, rows: Index) -> _Changes:
    """Keys that differ between neighbours of some rows."""
    if support.rows is not None:
        seen = support.rows[example, index][torch.from_numpy(rows).to(support.rows.device)]
        place, key = (seen[1:] ^ seen[:-1]).nonzero(as_tuple=True)
        entered = seen[1:][place, key]
        return _Changes(_numbers(place) + 1, _numbers(key), 2 * _numbers(entered).astype(int) - 1)
    assert support.first is not None and support.last is not None
    first, last = (_numbers(bound[example, index])[rows] for bound in (support.first, support.last))
    parts = []
    for begin, end, sign in (
        (last[:-1], last[1:], 1),
        (first[1:], first[:-1], 1),
        (last[1:], last[:-1], -1),
        (first[:-1], first[1:], -1),
    ):
        count = (end - begin).clip(min=0)
        within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        keys = np.repeat(begin, count) + within
        places = np.repeat(np.arange(1, len(count) + 1), count)
        parts.append((places, keys, np.full_like(keys, sign)))
    whole = _Changes(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    real = _numbers(support.keys[example, index])[whole.key]
    order = np.argsort(whole.place[real], kind="stable")
    return _Changes(*(part[real][order] for part in whole))


def _keys_of(support: Support, example: int, index: int, row: int) -> Index:
    """Keys that one row sees, ascending."""
    return np.flatnonzero(_numbers(support.seen(example, index, torch.tensor([row]))[0]))


def _numbers(tensor: torch.Tensor) -> Index:
    numbers: Index = tensor.cpu().numpy()
    return numbers
