"""Read text from files, compressed or not, and from standard input."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from attnlens.errors import InputError
from attnlens.files import failures

COMPRESSED = (".gz", ".zst")
# Marks at the beginning of a file; that of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_examples(source: str, one_per_line: bool = False) -> list[str]:
    """Read the examples of a text.

    Args:
        source: path of a file, see :func:`open_text`, or `-` for standard input.
        one_per_line: take every line that is not blank as an example, instead of every
            paragraph (blank lines separate paragraphs; line breaks inside one are spaces).

    Returns:
        The examples; at least one.

    Raises:
        InputError: if the text cannot be read, is no text, or holds nothing but blanks.
    """
    with reading(source), open_text(source) as file:
        text = file.read()
    name = _named(source)
    if fault := fault_of(text):
        raise InputError(f"{name} {fault}. Convert it, for example with iconv.")
    lines = text.splitlines()
    parts = lines if one_per_line else re.split(r"\n\s*\n", "\n".join(lines))
    examples = [re.sub(r"\s*\n\s*", " ", part.strip()) for part in parts]
    examples = [example for example in examples if example]
    if not examples:
        raise InputError(f"{name} holds no text.")
    return examples


def open_text(source: str | os.PathLike[str]) -> TextIO:
    """Open a text: UTF-8, or UTF-16 or UTF-32 that begin with their mark.

    Args:
        source: path of a file, decompressed if its name ends in `.gz` or `.zst`, or `-` for
            standard input, which is read whole and may be opened again.

    Returns:
        The text, line ends untouched. What is not UTF-8 becomes lone surrogates: see
        :func:`fault_of`.
    """
    file = io.BufferedReader(cast(Any, open_bytes(source)))
    start = file.peek(4)
    encoding = next((name for mark, name in _MARKS.items() if start.startswith(mark)), "utf-8-sig")
    errors = "surrogateescape" if encoding == "utf-8-sig" else "surrogatepass"
    return io.TextIOWrapper(file, encoding, errors, newline="")


def open_bytes(source: str | os.PathLike[str]) -> BinaryIO:
    """Open a file, decompressed by its suffix, or `-` for standard input."""
    if os.fspath(source) == "-":
        return io.BytesIO(_content(sys.stdin))
    match Path(source).suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(source))
        case ".zst":
            return cast(BinaryIO, _zstd().open(source))
    return open(source, "rb")


@contextmanager
def reading(source: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file where a block cannot read it.

    Args:
        source: the file, or `-`.

    Raises:
        InputError: if it cannot be opened, decompressed or decoded.
    """
    zstd = sys.modules.get("backports.zstd") or sys.modules.get("compression.zstd")
    damage = (zlib.error, getattr(zstd, "ZstdError", zlib.error))
    with failures("read", _named(source)):
        try:
            yield
        except damage as error:
            raise InputError(f"Cannot read {source}: {error}.") from error


def fault_of(text: str) -> str:
    """Say why a text from a file is none: undecodable bytes, halves of surrogate pairs, zero bytes.

    Args:
        text: what was read.

    Returns:
        Words to follow a name; empty if nothing is wrong.
    """
    if "\0" in text:
        return f"is no text: it holds a zero byte at character {text.index(chr(0)):,}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        what = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        return f"is not UTF-8: {what} at character {error.start:,}"
    return ""


def _named(source: str | os.PathLike[str]) -> str:
    return "standard input" if os.fspath(source) == "-" else os.fspath(source)


@lru_cache(maxsize=1)
def _content(stream: TextIO) -> bytes:
    """The whole of a stream, which can be read only once."""
    return stream.buffer.read()


def _zstd() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ModuleNotFoundError as error:
        raise InputError(
            "A .zst file needs backports.zstd. Run: pip install 'attnlens[corpus]'"
        ) from error
    return zstd
