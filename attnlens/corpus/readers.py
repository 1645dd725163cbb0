"""Read the examples of text, JSONL, CSV and Parquet files, and of data sets on disk."""

from __future__ import annotations

import csv
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields as fields_of
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from attnlens.corpus.records import Entry, Fields, Record, Rejected, record_of
from attnlens.errors import InputError
from attnlens.texts.reading import COMPRESSED, open_bytes, open_text, reading

Format = Literal["text", "jsonl", "csv", "tsv", "parquet", "dataset"]
_SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_STANDARD_INPUT = Path("-")
_LONGEST = 2**20  # most characters of a line that are held in memory


class Corpus:
    """Files of examples, which can be iterated over any number of times.

    An example is a line of a text file, an object of a JSONL file, or a row of a table. Only one
    line is in memory at a time. Text, JSONL and CSV are UTF-8, or UTF-16 that begins with its mark,
    and may be compressed, as `.gz` or `.zst`.

    Args:
        files: one file, or several that are read in this order. A folder is a data set that
            `datasets.Dataset.save_to_disk` wrote, `-` is standard input.
        fields: names of the fields or columns of an example.
        format: format of the files; None chooses it by the suffix of each file.

    Raises:
        InputError: if a file does not exist, its format is unknown, or it has no fields and one
            is named.

    Examples:
        >>> path = folder / "sentences.txt"
        >>> _ = path.write_text("One sentence.")
        >>> [record.text for record in Corpus(path)]
        ['One sentence.']
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: Fields | None = None,
        format: Format | None = None,
    ) -> None:
        paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
        if not paths:
            raise InputError("A corpus needs at least one file. Got none.")
        self.fields = Fields() if fields is None else fields
        if self.fields.labels is not None and self.fields.words is None:
            raise InputError("Labels belong to words: name the field of the words as well.")
        if self.fields.words is not None and self.fields.pair is not None:
            raise InputError("Examples are words, or pairs of texts. Got fields for both.")
        self.files = [(Path(path), _format_of(Path(path), format)) for path in paths]
        named = [field.name for field in fields_of(Fields) if self._names(field.name)]
        for path, kind in self.files:
            if kind == "text" and named:
                raise InputError(
                    f"{path} is text, a line each, and has no fields: to name that of the "
                    f"{named[0]} does nothing. Leave it out, or name another format."
                )

    def __iter__(self) -> Iterator[Entry]:
        for path, kind in self.files:
            with reading(path):
                yield from _READERS[kind](path, self.fields)

    def _names(self, part: str) -> bool:
        """Whether a field was named."""
        return bool(getattr(self.fields, part) != getattr(Fields(), part))

    def lines(self) -> int:
        """Count the lines and rows of all files, also those that are no examples."""
        return sum(_COUNTERS.get(kind, _count_lines)(path) for path, kind in self.files)

    def label_names(self) -> list[str]:
        """Read all files and return the labels of words in alphabetical order."""
        labelled = (r.labels for r in self if isinstance(r, Record) and r.labels is not None)
        return sorted({label for labels in labelled for label in labels if isinstance(label, str)})


def entries_of(items: Iterable[Any]) -> Iterator[Entry]:
    """Turn Python objects into examples.

    Args:
        items: records, texts, pairs of texts, or mappings with `text`, with `text` and `pair`, or
            with `words` and perhaps `labels`.

    Yields:
        Examples and rejected entries.
    """
    for line, item in enumerate(items, 1):
        if isinstance(item, (Record, Rejected)):
            yield item
        elif isinstance(item, str):
            yield record_of({"text": item}, Fields(), "records", line)
        elif isinstance(item, tuple) and len(item) == 2:
            pair = dict(zip(("text", "pair"), item, strict=True))
            yield record_of(pair, Fields(pair="pair"), "records", line)
        else:
            names = item if isinstance(item, Mapping) else ()
            parts = {name: name for name in ("pair", "words", "labels") if name in names}
            yield record_of(item, Fields(**parts), "records", line)


def _format_of(path: Path, format: Format | None) -> Format:
    if format is not None and format not in get_args(Format):
        raise InputError(f"format must be one of {', '.join(get_args(Format))}. Got {format!r}.")
    if path == _STANDARD_INPUT:
        return format or "text"
    if not os.path.exists(path):
        raise InputError(f"There is no file {path}.")
    if path.is_dir():
        if format not in (None, "dataset"):
            raise InputError(f"{path} is a folder, which is a data set and no {format}.")
        return "dataset"
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    kind = format or _SUFFIXES.get(plain.suffix.lower())
    if kind is None:
        raise InputError(
            f"The format of {path} is unknown: its name ends in none of {', '.join(_SUFFIXES)}. "
            f"Name its format, one of {', '.join(get_args(Format))}."
        )
    return kind


def _lines(file: TextIO) -> Iterator[tuple[int, str | None]]:
    """Yield lines by number, without line ends; None for a line that is too long."""
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        whole = True
        while len(line) == _LONGEST and not line.endswith("\n"):
            whole, line = False, file.readline(_LONGEST)
        yield number, line.rstrip("\r\n") if whole else None


def _read_lines(
    path: Path, fields: Fields, entry_of: Callable[[str, Fields, str, int], Entry]
) -> Iterator[Entry]:
    """Read every line that is not blank."""
    with open_text(path) as file:
        for number, line in _lines(file):
            if line is None:
                yield Rejected(str(path), number, f"longer than {_LONGEST:,} characters")
            elif line.strip():
                yield entry_of(line, fields, str(path), number)


def _text_of(line: str, fields: Fields, source: str, number: int) -> Entry:
    return record_of({"text": line}, Fields(), source, number)


def _object_of(line: str, fields: Fields, source: str, number: int) -> Entry:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        return Rejected(source, number, f"not JSON: {error.msg} at character {error.pos}")
    except (ValueError, RecursionError) as error:  # huge numbers, deep nesting
        return Rejected(source, number, f"not readable as JSON: {error}")
    return record_of(entry, fields, source, number)


def _read_table(path: Path, fields: Fields, delimiter: str) -> Iterator[Entry]:
    """Read a table whose first row names the columns."""
    with open_text(path) as file:
        rows = _rows_of(_lines(file), delimiter)
        columns = _columns(rows, path, fields)
        for number, row in rows:
            if isinstance(row, str):
                yield Rejected(str(path), number, row)
            elif len(row) == len(columns):
                yield record_of(dict(zip(columns, row, strict=True)), fields, str(path), number)
            elif row:
                reason = f"{len(row)} columns instead of {len(columns)}"
                yield Rejected(str(path), number, reason)


def _rows_of(
    lines: Iterator[tuple[int, str | None]], delimiter: str
) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the rows of a table with the number of their last line, or why a line begins no row.

    A row may hold line breaks between quotes. Where a quote is never closed, only the line that
    opens it is lost: reading goes on after it.
    """
    waiting: deque[tuple[int, str | None]] = deque()
    taken: list[tuple[int, str | None]] = []

    def feed() -> Iterator[str]:
        while line := waiting.popleft() if waiting else next(lines, None):
            taken.append(line)
            if line[1] is None:
                raise csv.Error(f"longer than {_LONGEST:,} characters")
            yield f"{line[1]}\n"

    while True:
        taken = []
        try:
            row = next(csv.reader(feed(), delimiter=delimiter, strict=True), None)
        except csv.Error as error:
            (first, _), *others = taken
            waiting.extendleft(reversed(others))
            quote = ", or a quote that is not closed" if others else ""
            yield first, f"not CSV{quote}: {error}"
            continue
        if row is None:
            return
        yield taken[-1][0], row


def _columns(rows: Iterator[tuple[int, list[str] | str]], path: Path, fields: Fields) -> list[str]:
    _, columns = next(rows, (0, []))
    if isinstance(columns, str):
        raise InputError(f"The first line of {path} names no columns: {columns}.")
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise InputError(f"{path} has several columns {twice[0]!r}. Rename all but one.")
    _require(columns, path, fields)
    return columns


def _require(columns: Sequence[str], path: Path, fields: Fields) -> None:
    """Refuse a table that lacks a column."""
    text = fields.text if fields.words is None else fields.words
    for name in (text, fields.pair, fields.labels):
        if name is not None and name not in columns:
            raise InputError(f"{path} has no column {name!r}. It has: {', '.join(columns)}.")


def _read_parquet(path: Path, fields: Fields) -> Iterator[Entry]:
    datasets = _datasets()
    with _whole(path):
        stream = datasets.load_dataset(
            "parquet", data_files=os.fspath(path), split="train", streaming=True
        )
        yield from _rows(stream, path, fields)


def _read_dataset(path: Path, fields: Fields) -> Iterator[Entry]:
    return _rows(_on_disk(path), path, fields)


def _rows(rows: Any, path: Path, fields: Fields) -> Iterator[Entry]:
    if rows.column_names is not None:
        _require(rows.column_names, path, fields)
    for number, row in enumerate(rows, 1):
        yield record_of(row, fields, str(path), number)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Name the file in the error of a library that cannot read it."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _on_disk(path: Path) -> Any:
    datasets = _datasets()
    try:
        saved = datasets.load_from_disk(os.fspath(path))
    except (FileNotFoundError, ValueError) as error:
        raise InputError(
            f"The folder {path} is no data set that datasets saved to disk: {error}"
        ) from error
    if isinstance(saved, dict):
        raise InputError(f"{path} holds the splits {', '.join(saved)}. Give the folder of one.")
    return saved


def _datasets() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InputError(
            f"Parquet and data sets need {error.name}. Run: pip install 'attnlens[corpus]'"
        ) from error
    return datasets


def _count_lines(path: Path) -> int:
    count, last = 0, b"\n"
    with reading(path), open_bytes(path) as file:
        while block := file.read(2**20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def _count_parquet(path: Path) -> int:
    _datasets()
    from pyarrow import parquet

    with _whole(path):
        return int(parquet.read_metadata(path).num_rows)


_READERS: dict[Format, Callable[[Path, Fields], Iterator[Entry]]] = {
    "text": partial(_read_lines, entry_of=_text_of),
    "jsonl": partial(_read_lines, entry_of=_object_of),
    "csv": partial(_read_table, delimiter=","),
    "tsv": partial(_read_table, delimiter="\t"),
    "parquet": _read_parquet,
    "dataset": _read_dataset,
}
_COUNTERS: dict[Format, Callable[[Path], int]] = {
    "parquet": _count_parquet,
    "dataset": lambda path: len(_on_disk(path)),
}
