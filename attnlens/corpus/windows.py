"""Cut a corpus into windows of records, and a window into batches of similar length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from attnlens.corpus.records import Entry, Record, Rejected


@dataclass(frozen=True)
class Window:
    """Consecutive records of a corpus, which are sorted by length and go to one process.

    Attributes:
        index: number of the window in the corpus, from 0.
        records: its records; none in a last window that holds nothing but what was rejected.
        rejected: what stood between them and was none.
        line: number of lines of the corpus up to here, all files together.
        digest: of all records of the corpus up to here.
    """

    index: int
    records: list[Record]
    rejected: list[Rejected]
    line: int
    digest: str


@dataclass
class _Position:
    """Where a reader is among the lines of several files."""

    source: str = ""
    line: int = 0
    before: int = 0

    def advance(self, entry: Entry) -> None:
        if entry.source != self.source:
            self.before += self.line
            self.source = entry.source
        self.line = entry.line


@dataclass
class _Open:
    """A window that is being filled."""

    records: list[Record] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


def windows(entries: Iterable[Entry], size: int) -> Iterator[Window]:
    """Cut a corpus into windows of records; what is rejected does not shift them.

    Args:
        entries: the corpus.
        size: records in a window; the last may hold fewer.

    Yields:
        The windows.
    """
    digest, position, index = blake2b(digest_size=16), _Position(), 0
    current = _Open()
    for entry in entries:
        position.advance(entry)
        if isinstance(entry, Rejected):
            current.rejected.append(entry)
            continue
        current.records.append(entry)
        digest.update(entry.content.encode() + b"\n")
        if len(current.records) == size:
            line = position.before + position.line
            yield Window(index, current.records, current.rejected, line, digest.hexdigest())
            index, current = index + 1, _Open()
    if current.records or current.rejected:
        line = position.before + position.line
        yield Window(index, current.records, current.rejected, line, digest.hexdigest())


def batches(lengths: Sequence[int], most: int, most_tokens: int) -> Iterator[list[int]]:
    """Put texts of similar length together, the longest first.

    Args:
        lengths: number of tokens of each text.
        most: most texts in a batch.
        most_tokens: most tokens in a batch, padding included; a longer text is a batch of its own.

    Yields:
        Indices of texts.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) == most or lengths[batch[0]] * (len(batch) + 1) > most_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
