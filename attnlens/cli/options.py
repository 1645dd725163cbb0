"""Options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
