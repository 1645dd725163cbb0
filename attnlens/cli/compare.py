"""`attnlens compare`: how far the heads of two models are apart on the same text."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from attnlens.cli.options import (
    AsJson,
    BatchSize,
    Lines,
    MaxLength,
    PagePath,
    Text,
    require_folder,
)
from attnlens.cli.terminal import bars, print_json, say, writing
from attnlens.recipes.page_content import PageContent
from attnlens.recipes.text_drift import DriftField, compare_on_texts
from attnlens.reporting.tables import head_table
from attnlens.results import cell
from attnlens.texts.reading import read_examples


def compare(
    model_a: Annotated[
        str, typer.Argument(metavar="A", help="Where the drift begins: a folder or a Hub name.")
    ],
    model_b: Annotated[str, typer.Argument(metavar="B", help="Where it has led to.")],
    text: Text,
    lines: Lines = False,
    field: Annotated[
        DriftField, typer.Option("--field", help="Quantity to show.")
    ] = "effective_cosine",
    as_json: AsJson = False,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
    html: PagePath = None,
) -> None:
    """Compare every head of a model with the same head of another, on the same text."""
    if html is not None:
        require_folder(html)
    texts = read_examples(text, lines)
    with bars() as progress:
        result = compare_on_texts(
            model_a,
            model_b,
            texts,
            batch_size=batch_size,
            max_length=max_length,
            page=None if html is None else PageContent(),
            progress=progress,
        )
    if html is not None and result.page is not None:
        for note in result.page.notes:
            say(note, "note")
        with writing(html):
            result.page.save(html)
    if as_json:
        print_json(result.to_dict())
        return
    console = Console(highlight=False)
    console.print(head_table(result.drift, field, console.width))
    row, head = result.most_moved(field)
    place = f"head {head} of {result.drift.row_labels()[row]}"
    value = cell(result.drift.field(field)[row, head].item())
    print(f"\nFrom {result.model_a} to {result.model_b}, {place} moved most: {value}.")
