"""Cut a corpus into chunks of records, and a chunk into batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from attnlens.corpus.records import Entry, Record, Rejected


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a corpus, which one process sorts by length and reads.

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


def batches(lengths: Sequence[int], most: int, most_tokens: int) -> Iterator[list[int]]:
    """Group texts of similar length, the longest first.

    Args:
        lengths: number of tokens of each text.
        most: most texts in a batch.
        most_tokens: most tokens in a batch, padding included; a longer text is a batch by itself.

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
