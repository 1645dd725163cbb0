"""Cut a corpus into chunks of records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from attnlens.corpus.records import Entry, Record, Rejected


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a corpus, which are sorted by length together.

    Attributes:
        index: number of the chunk in the corpus, from 0.
        records: its records.
        line: number of lines of the corpus up to the end of the chunk, over all files.
        digest: digest of all records of the corpus up to the end of the chunk.
    """

    index: int
    records: list[Record]
    line: int
    digest: str

    def parts(self, most: int) -> list[Part]:
        """Cut the records into parts, as even as they can be, that processes share out.

        Args:
            most: most records in a part.

        Returns:
            The parts, with records of similar length, the longest first. They depend on the chunk
            alone, and not on who reads them.
        """
        order = sorted(range(len(self.records)), key=lambda place: -self.records[place].size)
        count = -(-len(order) // most)
        bounds = [len(order) * part // count for part in range(count + 1)]
        return [
            Part(start, [self.records[place] for place in order[start:end]])
            for start, end in pairwise(bounds)
        ]


class Part(NamedTuple):
    """Some records of a chunk, which one process reads.

    Attributes:
        start: number of records of the chunk in the parts before.
        records: its records.
    """

    start: int
    records: list[Record]


def chunks(
    entries: Iterable[Entry], size: int, reject: Callable[[int, Rejected], None]
) -> Iterator[Chunk]:
    """Cut a corpus into chunks of records.

    Args:
        entries: the corpus.
        size: number of records in a chunk; the last may hold fewer.
        reject: called at once with every rejected entry and the index of the chunk that is being
            filled. Rejected entries belong to no chunk.

    Yields:
        The chunks.
    """
    digest, index = blake2b(digest_size=16), 0
    source, line, before = "", 0, 0
    records: list[Record] = []
    for entry in entries:
        if entry.source != source:
            source, before = entry.source, before + line
        line = entry.line
        if isinstance(entry, Rejected):
            reject(index, entry)
            continue
        records.append(entry)
        digest.update(entry.content.encode() + b"\n")
        if len(records) == size:
            yield Chunk(index, records, before + line, digest.hexdigest())
            index, records = index + 1, []
    if records:
        yield Chunk(index, records, before + line, digest.hexdigest())
