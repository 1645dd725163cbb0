"""One example of a corpus, and how an entry of a file becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlens.texts.reading import fault_of

Label = str | int


@dataclass(frozen=True)
class Record:
    """One example.

    Attributes:
        text: the text, or its words.
        pair: a second text that the model reads after the first, or None.
        labels: a label for every word, or None.
        source: the file.
        line: line in the file, or row of a data set, from 1.

    Examples:
        >>> Record("One sentence.").text
        'One sentence.'
    """

    text: str | tuple[str, ...]
    pair: str | None = None
    labels: tuple[Label, ...] | None = None
    source: str = ""
    line: int = 0

    @property
    def size(self) -> int:
        """Number of characters, which is known before the number of tokens."""
        words = (self.text,) if isinstance(self.text, str) else self.text
        return sum(map(len, words)) + len(self.pair or "")

    @property
    def content(self) -> str:
        """All that a model and its observers are given, as a line of ASCII."""
        return ascii((self.text, self.pair, self.labels))


@dataclass(frozen=True)
class Rejected:
    """An entry that is no example.

    Attributes:
        source: the file.
        line: line or row, from 1.
        reason: what is wrong.
    """

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


Entry = Record | Rejected


@dataclass(frozen=True)
class Fields:
    """Names of the fields of an object, or the columns of a table, that make an example.

    Attributes:
        text: field of the text.
        pair: field of a second text, or None.
        words: field of a list of words that replaces the text, or None.
        labels: field of a list of labels, one for each word, or None.

    Examples:
        >>> path = folder / "pairs.jsonl"
        >>> _ = path.write_text('{"question": "Who?", "answer": "Nobody."}')
        >>> [record.pair for record in Corpus(path, Fields(text="question", pair="answer"))]
        ['Nobody.']
    """

    text: str = "text"
    pair: str | None = None
    words: str | None = None
    labels: str | None = None


class _Unfit(ValueError):
    """Why an entry is no example."""


def record_of(entry: Any, fields: Fields, source: str, line: int) -> Entry:
    """Turn an object into an example.

    Args:
        entry: the object.
        fields: names of its fields.
        source: the file.
        line: line or row, from 1.

    Returns:
        The example, or a rejected entry with the reason.
    """
    if not isinstance(entry, Mapping):
        return Rejected(source, line, f"not an object but {_kind(entry)}")
    try:
        if fields.words is not None:
            words = _words(entry, fields.words)
            return Record(words, None, _labels(entry, fields.labels, len(words)), source, line)
        text = _text(entry, fields.text)
        pair = None if fields.pair is None else _text(entry, fields.pair)
        return Record(text, pair, None, source, line)
    except _Unfit as reason:
        return Rejected(source, line, str(reason))


def _field(entry: Mapping[str, Any], name: str) -> Any:
    if name not in entry:
        raise _Unfit(f"no field {name!r}; there is {', '.join(map(repr, entry)) or 'none'}")
    return entry[name]


def _text(entry: Mapping[str, Any], name: str) -> str:
    text = _field(entry, name)
    if not isinstance(text, str):
        raise _Unfit(f"{name!r} is {_kind(text)}, no text")
    if not text.strip():
        raise _Unfit(f"{name!r} is empty")
    return _encodable(text, name)


def _words(entry: Mapping[str, Any], name: str) -> tuple[str, ...]:
    words = _field(entry, name)
    if not isinstance(words, (list, tuple)):
        raise _Unfit(f"{name!r} is {_kind(words)}, no list of words")
    if not words:
        raise _Unfit(f"{name!r} is empty")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise _Unfit(f"{name!r} holds {_kind(word)} where a word should be")
        _encodable(word, name)
    return tuple(words)


def _labels(entry: Mapping[str, Any], name: str | None, words: int) -> tuple[Label, ...] | None:
    if name is None:
        return None
    labels = _field(entry, name)
    if not isinstance(labels, (list, tuple)):
        raise _Unfit(f"{name!r} is {_kind(labels)}, no list of labels")
    if len(labels) != words:
        raise _Unfit(f"{words} words but {len(labels)} labels")
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, (str, int)):
            raise _Unfit(f"{name!r} holds {_kind(label)} where a label should be")
    return tuple(labels)


def _encodable(text: str, name: str) -> str:
    if fault := fault_of(text):
        raise _Unfit(f"{name!r} {fault}")
    return text


def _kind(value: Any) -> str:
    """Name the kind of a value as JSON does."""
    if isinstance(value, str):
        return "text" if value.strip() else "empty text"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {int: "a number", float: "a number", list: "a list", tuple: "a list"}
    return names.get(type(value), "an object")
