"""Options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnlens.errors import InputError

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL_OR_PATH", help="A local folder, or a name on the Hub.")
]
Text = Annotated[
    str, typer.Option("--text", metavar="FILE", help="UTF-8 text; - is standard input.")
]
Lines = Annotated[
    bool,
    typer.Option("--lines", help="One example per line. Otherwise blank lines separate them."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Examples at once.")]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", help="Tokens per example; by default the model's limit."),
]
PagePath = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write an interactive report.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def names_in(text: str) -> list[str]:
    """Read names between commas, as in `0,3,-1`."""
    return [name for part in text.split(",") if (name := part.strip())]


def require_folder(path: Path) -> None:
    """Refuse a file whose folder does not exist, before a long run.

    Args:
        path: where a file is to be written.

    Raises:
        InputError: if it cannot be.
    """
    if not path.absolute().parent.is_dir():
        raise InputError(f"Cannot write {path}: there is no folder {path.parent}.")
