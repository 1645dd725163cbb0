"""`attnlens compare`: how far the heads of two models are apart on the same text."""

from __future__ import annotations

from typing import Annotated

import typer

from attnlens.cli.choices import DriftField
from attnlens.cli.options import (
    AsJson,
    BatchSize,
    Layers,
    Lines,
    MaxLength,
    PagePath,
    Sentences,
    TextFiles,
    examples,
    layers_in,
    read_paths,
)
from attnlens.cli.terminal import bars, print_json, say, say_idle


def compare(
    context: typer.Context,
    model_a: Annotated[
        str, typer.Argument(metavar="A", help="Where the drift begins: a folder or a Hub name.")
    ],
    model_b: Annotated[str, typer.Argument(metavar="B", help="Where it has led to.")],
    text: TextFiles = None,
    sentence: Sentences = None,
    lines: Lines = False,
    field: Annotated[
        DriftField, typer.Option("--field", help="Quantity to show.")
    ] = "effective_cosine",
    as_json: AsJson = False,
    layers: Layers = None,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
    html: PagePath = None,
) -> None:
    """Compare every head of a model with the same head of another, on the same text."""
    from rich.console import Console

    from attnlens.files import require_writable
    from attnlens.recipes.page_content import PageContent
    from attnlens.recipes.text_drift import compare_on_texts
    from attnlens.reporting.tables import explanation, head_table

    if as_json:
        say_idle(context, ("field",), "with --json, which holds all")
    if html is not None:
        require_writable(html, [model_a, *read_paths(model_b, text)])
    places = layers_in(layers)
    texts = examples(text, sentence, lines)
    with bars() as progress:
        result = compare_on_texts(
            model_a,
            model_b,
            texts,
            layers=places,
            batch_size=batch_size,
            max_length=max_length,
            page=None if html is None else PageContent(),
            progress=progress,
        )
    if html is not None and result.page is not None:
        for note in result.page.notes:
            say(note, "note")
        result.page.save(html)
        say(f"Written to {html}.")
    if as_json:
        print_json(result.to_dict())
        return
    console = Console(highlight=False, markup=False)
    console.print(head_table(result.drift, field, console.width))
    console.print(f"\n{explanation(result.drift, field)} {result.words(field)}")
