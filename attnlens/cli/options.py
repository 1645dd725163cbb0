"""Options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from attnlens.errors import InputError

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A local folder, or a name on the Hub.")
]
TextFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--text", metavar="FILE", help="Text to read; - is standard input. May be repeated."
    ),
]
Sentences = Annotated[
    list[str] | None,
    typer.Option("--sentence", metavar="TEXT", help="One example itself. May be repeated."),
]
Lines = Annotated[
    bool,
    typer.Option("--lines", help="One example per line. Otherwise blank lines separate them."),
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="LIST", help="Indices or module names, as in 0,3,-1."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Most examples at once.")]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", help="Tokens per example; by default the model's limit."),
]
PagePath = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write an interactive report.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutputFolder = Annotated[
    Path | None,
    typer.Option("--output", metavar="DIR", help="Write files into this folder."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write into a folder that holds something else.")
]


def examples(
    text: Sequence[str] | None, sentences: Sequence[str] | None, lines: bool = False
) -> list[str]:
    """Read the examples that `--text` and `--sentence` give.

    Args:
        text: names of files.
        sentences: examples.
        lines: whether each line of a file is one.

    Returns:
        At least one.

    Raises:
        InputError: if there is none, or a file is given for a sentence or the reverse.
    """
    from attnlens.texts.reading import read_examples

    if not text and not sentences:
        raise InputError("There is nothing to read. Give --text FILE or --sentence TEXT.")
    for name in text or ():
        if name != "-" and not os.path.exists(name):
            raise InputError(
                f"Cannot read {name}: No such file. A sentence itself is given with --sentence."
            )
    for sentence in sentences or ():
        if not sentence.strip():
            raise InputError("There is no text: --sentence is blank.")
        if os.path.isfile(sentence):
            raise InputError(f"{sentence} is a file. To read it: --text {sentence}")
    found = [example for name in text or () for example in read_examples(name, lines)]
    return [*found, *(" ".join(sentence.split()) for sentence in sentences or ())]


def names_in(text: str, option: str) -> list[str]:
    """Read names between commas, as in `0,3,-1`.

    Args:
        text: the names.
        option: where they are from, for the error.

    Returns:
        At least one.

    Raises:
        InputError: if there is none.
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise InputError(f"{option} is a list, as in 0,3. Got {text!r}.")
    return names


def indices_in(text: str, option: str) -> tuple[int, ...]:
    """Read `0,3,-1`.

    Args:
        text: the indices.
        option: where they are from, for the error.

    Returns:
        Each once, in their order.

    Raises:
        InputError: if there is none, or something else.
    """
    places = layers_in(text, option) or ()
    if not all(isinstance(place, int) for place in places):
        raise InputError(f"{option} must be indices, as in 0,3. Got {text!r}.")
    return tuple(dict.fromkeys(place for place in places if isinstance(place, int)))


def layers_in(text: str | None, option: str = "--layers") -> tuple[int | str, ...] | None:
    """Read `0,3,-1` or module names.

    Args:
        text: indices or names; None where the option was not given.
        option: where they are from, for the error.

    Returns:
        Indices and names, or None.
    """
    if text is None:
        return None
    names = names_in(text, option)
    return tuple(
        int(name) if name.removeprefix("-").isdecimal() and name.isascii() else name
        for name in names
    )


def read_paths(model: str, text: Iterable[str] | None) -> list[str]:
    """Return the files and folders that a command reads, which no output may replace."""
    return [model, *(name for name in text or () if name != "-")]
