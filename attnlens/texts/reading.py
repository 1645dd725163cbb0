"""Read example texts from a file or from standard input."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from attnlens.errors import InputError


def read_examples(source: str, one_per_line: bool = False) -> list[str]:
    """Read the examples of a text.

    Args:
        source: path of a UTF-8 file, or `-` for standard input.
        one_per_line: take every line that is not blank as an example, instead of every
            paragraph (blank lines separate paragraphs; line breaks inside one are spaces).

    Returns:
        The examples; at least one.

    Raises:
        InputError: if the text cannot be read, is not UTF-8, or holds nothing but blanks.
    """
    name = "standard input" if source == "-" else source
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise InputError(f"Cannot read {name}: {error.strerror or error}.") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset "
            f"{error.start:,}. Convert it, for example with iconv."
        ) from error
    lines = text.splitlines()
    parts = lines if one_per_line else re.split(r"\n\s*\n", "\n".join(lines))
    examples = [re.sub(r"\s*\n\s*", " ", part.strip()) for part in parts]
    examples = [example for example in examples if example]
    if not examples:
        raise InputError(f"{name} holds no text.")
    return examples
