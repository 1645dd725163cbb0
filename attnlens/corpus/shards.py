"""The part of a corpus that a process reads, and the exchange between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from attnlens.errors import InputError

# The fastest process waits for the slowest at the end, and a corpus may take days.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Shard:
    """A share of a corpus: every n-th part of its chunks, from the i-th.

    Attributes:
        index: i, from 0.
        count: n.
        group: process group of the processes with the other parts, or None where the parts are
            scanned by separate jobs.
    """

    index: int = 0
    count: int = 1
    group: Any = None

    def owns(self, number: int) -> bool:
        """Tell whether a part belongs to this share, by its number."""
        return number % self.count == self.index

    @property
    def complete(self) -> bool:
        """Whether this process has the result of the whole corpus at the end."""
        return self.count == 1 or self.group is not None

    @property
    def writes(self) -> bool:
        """Whether this process writes the result of the whole corpus."""
        return self.complete and self.index == 0

    def gathered(self, part: Any) -> Iterator[Any]:
        """Send an object to all processes and receive theirs, one at a time to save memory.

        Args:
            part: the object of this process.

        Yields:
            The object of each process, in the order of their shards.
        """
        for source in range(self.count if self.group is not None else 0):
            box = [part if source == self.index else None]
            distributed.broadcast_object_list(box, src=source, group=self.group)
            yield box[0]


@contextmanager
def shard_of(numbers: Sequence[int] | None) -> Iterator[Shard]:
    """Find the shard of this process: the one asked for, or that of its rank.

    Args:
        numbers: index and count, or None to use the ranks that a launcher gave.

    Yields:
        The shard. A process group that was made for it ends with the block.

    Raises:
        InputError: if the numbers are out of range, or a launcher started several processes.
    """
    if numbers is not None:
        yield _asked_for(numbers)
        return
    if not distributed.is_available() or not _several():
        yield Shard()
        return
    own = not distributed.is_initialized()
    if own:
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    group = distributed.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        yield Shard(distributed.get_rank(), distributed.get_world_size(), group)
    finally:
        distributed.destroy_process_group(None if own else group)


def _several() -> bool:
    """Whether a launcher such as torchrun started several processes."""
    if distributed.is_initialized():
        return distributed.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def _asked_for(numbers: Sequence[int]) -> Shard:
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise InputError(
            f"shard must be an index from 0 and a count above it, such as (0, 4). Got "
            f"{tuple(numbers)}."
        )
    if _several():
        raise InputError(
            "This is one of several processes, which share a corpus by themselves. Leave shard "
            "out, or start it alone."
        )
    return Shard(*numbers)
