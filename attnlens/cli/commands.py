"""The commands; `report` and `demo` are here, the others in files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import attnlens.demo as packaged
from attnlens.cli.attribute import attribute
from attnlens.cli.check import check
from attnlens.cli.compare import compare
from attnlens.cli.identify import identify
from attnlens.cli.options import AsJson, BatchSize, Lines, MaxLength, ModelName, Text
from attnlens.cli.prune import prune
from attnlens.cli.scan import merge, scan_corpus
from attnlens.cli.terminal import counting, loaded, plain_errors, say
from attnlens.errors import InputError
from attnlens.files import versions
from attnlens.recipes.page_recipe import (
    Attribution,
    Identifiability,
    Megabytes,
    Page,
    PageExamples,
    PageHeads,
    PagePath,
    PageTokens,
    look_closely,
    read_heads,
    write_page,
)
from attnlens.recipes.statistics_recipe import FIELDS, Run, Settings, measure
from attnlens.reporting.head_table import explanation, head_table
from attnlens.texts.loading import TextModel
from attnlens.texts.reading import read_examples

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (attribute, check, compare, identify, prune):
    app.command()(command)
app.command("scan")(scan_corpus)
app.command()(merge)

Field = Annotated[str, typer.Option("--field", help=f"Quantity to show: {', '.join(FIELDS)}.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="DIR", help="Write safetensors and JSON into this folder."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"attnlens {versions()['attnlens']}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at the part of attention that can influence the output."""


@app.command()
def report(
    model: ModelName,
    text: Text,
    lines: Lines = False,
    field: Field = "effective_fraction",
    as_json: AsJson = False,
    output: Output = None,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Indices or module names, as in 0,3,-1; by default all."),
    ] = None,
    html: PagePath = None,
    heads: PageHeads = None,
    shown: PageExamples = 12,
    max_tokens: PageTokens = 128,
    megabytes: Megabytes = 10.0,
    attribution: Attribution = False,
    identifiability: Identifiability = False,
) -> None:
    """Run text through a model and show one number per attention head."""
    with plain_errors():
        _check(field, output)
        if html is None and (heads or attribution or identifiability):
            raise InputError("--heads, --attribution and --identifiability need --html.")
        wanted = (read_heads(heads), shown, max_tokens, megabytes, attribution, identifiability)
        page = None if html is None else Page(html, *wanted)
        settings = Settings(text, lines, batch_size, max_length, _layers(layers))
        examples = read_examples(text, lines)
        run = _run(loaded(model), examples, settings, page)
        _deliver(run, field, as_json, output)


@app.command()
def demo(
    field: Field = "effective_fraction",
    as_json: AsJson = False,
    output: Output = None,
    html: PagePath = None,
) -> None:
    """Show the heads of a packaged MiniLM sentence encoder reading twelve paragraphs."""
    with plain_errors():
        _check(field, output)
        model = replace(loaded(str(packaged.model_folder())), name=packaged.MODEL)
        page = None if html is None else Page(html)
        run = _run(model, packaged.paragraphs(), Settings(packaged.TEXT), page)
        if not as_json:
            layers, heads = run.statistics.rank.shape
            print(
                f"You are looking at the {layers} × {heads} attention heads of a sentence encoder "
                f"while it reads {run.examples} short paragraphs, one number per head.\n"
            )
        _deliver(run, field, as_json, output)


def _check(field: str, output: Path | None) -> None:
    """Refuse what would fail only after the run."""
    if field not in FIELDS:
        raise InputError(f"No field {field!r}. There are: {', '.join(FIELDS)}.")
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"Cannot make the folder {output}: {error.strerror}.") from error


def _layers(text: str | None) -> tuple[int | str, ...] | None:
    """Read `0,3,-1` or module names."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InputError(f"layers must be indices or module names, as in 0,3,-1. Got {text!r}.")
    return tuple(int(name) if name.lstrip("-").isdecimal() else name for name in names)


def _run(model: TextModel, examples: Sequence[str], settings: Settings, page: Page | None) -> Run:
    """Read the examples, and write the interactive report if there is to be one."""
    seen = None if page is None else look_closely(model, examples, settings, page)
    collectors = [] if page is None else page.collectors(model)
    with counting("Reading", len(examples)) as advance:
        run = measure(model, examples, settings, advance, collectors)
    if run.truncated:
        limit = settings.max_length or model.longest
        say(
            f"[yellow]note:[/] {run.truncated} of {run.examples} examples were longer than "
            f"{limit} tokens and were cut there."
        )
    if page is not None and seen is not None:
        write_page(run, page, seen, collectors)
    return run


def _deliver(run: Run, field: str, as_json: bool, output: Path | None) -> None:
    """Write and print a run."""
    if output is not None:
        run.write(output)
        say(f"Written to {escape(str(output))}.")
    if as_json:
        print(run.to_json())
        return
    console = Console(highlight=False)
    console.print(head_table(run.statistics, field, console.width))
    console.print(f"\n{escape(explanation(run.statistics, field))}")
    tokens = run.statistics.tokens.nanmean().item()
    console.print(f"{run.examples} examples of {tokens:.0f} tokens on average, {escape(run.model)}")
