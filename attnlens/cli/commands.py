"""The commands; `report` and `demo` are here, the others in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from attnlens.cli.attribute import attribute
from attnlens.cli.check import check
from attnlens.cli.compare import compare
from attnlens.cli.identify import identify
from attnlens.cli.options import (
    AsJson,
    BatchSize,
    Lines,
    MaxLength,
    ModelName,
    PagePath,
    Text,
    names_in,
    require_folder,
)
from attnlens.cli.prune import prune
from attnlens.cli.scan import merge, scan
from attnlens.cli.terminal import Commands, bars, print_json, say, writing
from attnlens.errors import InputError
from attnlens.files import make_folder, versions
from attnlens.recipes.demonstration import report_demo
from attnlens.recipes.head_report import FIELDS, HeadReport, report_heads
from attnlens.recipes.page_content import PageContent
from attnlens.reporting.tables import explanation, head_table
from attnlens.texts.reading import read_examples

app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)
for command in (attribute, check, compare, identify, prune, scan, merge):
    app.command()(command)

if TYPE_CHECKING:
    FieldName = str
else:  # the choices are known when the program runs
    FieldName = Literal[FIELDS]
Field = Annotated[
    FieldName,
    typer.Option("--field", metavar="NAME", help=f"Quantity to show: {', '.join(FIELDS)}."),
]
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
    heads: Annotated[
        str | None,
        typer.Option("--heads", help="Heads with maps in the report, as in 0,3; by default all."),
    ] = None,
    examples: Annotated[
        int,
        typer.Option("--examples", min=1, help="Examples with maps in the report, from the first."),
    ] = PageContent.examples,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Tokens of an example to show in the report.")
    ] = PageContent.tokens,
    megabytes: Annotated[
        float, typer.Option("--megabytes", min=2.5, help="Largest size of the report.")
    ] = PageContent.megabytes,
    attribution: Annotated[
        bool,
        typer.Option(
            "--attribution",
            help="Put hidden token attribution into the report: seconds per example.",
        ),
    ] = False,
    identifiability: Annotated[
        bool,
        typer.Option(
            "--identifiability",
            help="Put token identifiability into the report; needs some dozen examples.",
        ),
    ] = False,
) -> None:
    """Run text through a model and show one number per attention head."""
    if html is None and (heads or attribution or identifiability):
        raise InputError("--heads, --attribution and --identifiability need --html.")
    _prepare(output, html)
    shown = _heads(heads), examples, max_tokens, megabytes, attribution, identifiability
    places = _layers(layers)
    texts = read_examples(text, lines)
    with bars() as progress:
        result = report_heads(
            model,
            texts,
            layers=places,
            batch_size=batch_size,
            max_length=max_length,
            page=None if html is None else PageContent(*shown),
            about={"text": text, "lines": lines},
            progress=progress,
        )
    _deliver(result, field, as_json, output, html)


@app.command()
def demo(
    field: Field = "effective_fraction",
    as_json: AsJson = False,
    output: Output = None,
    html: PagePath = None,
) -> None:
    """Show the heads of a packaged MiniLM sentence encoder reading twelve paragraphs."""
    _prepare(output, html)
    with bars() as progress:
        result = report_demo(None if html is None else PageContent(), progress)
    if not as_json:
        layers, heads = result.statistics.rank.shape
        print(
            f"You are looking at the {layers} × {heads} attention heads of a sentence encoder "
            f"while it reads {result.examples} short paragraphs, one number per head.\n"
        )
    _deliver(result, field, as_json, output, html)


def _prepare(output: Path | None, html: Path | None) -> None:
    """Refuse what would fail only after the run."""
    if html is not None:
        require_folder(html)
    if output is not None:
        make_folder(output)


def _heads(text: str | None) -> tuple[int, ...] | None:
    """Read `0,3`."""
    if text is None:
        return None
    names = names_in(text)
    if not names or not all(name.isdecimal() for name in names):
        raise InputError(f"heads must be indices, as in 0,3. Got {text!r}.")
    return tuple(dict.fromkeys(map(int, names)))


def _layers(text: str | None) -> tuple[int | str, ...] | None:
    """Read `0,3,-1` or module names."""
    if text is None:
        return None
    names = names_in(text)
    if not names:
        raise InputError(f"layers must be indices or module names, as in 0,3,-1. Got {text!r}.")
    return tuple(int(name) if name.lstrip("-").isdecimal() else name for name in names)


def _deliver(
    result: HeadReport, field: str, as_json: bool, output: Path | None, html: Path | None
) -> None:
    """Write and print a report."""
    for note in result.notes:
        say(note, "note")
    if html is not None and result.page is not None:
        with writing(html):
            result.page.save(html)
    if output is not None:
        with writing(output):
            result.write(output)
    if as_json:
        print_json(result.to_dict())
        return
    console = Console(highlight=False, markup=False)
    console.print(head_table(result.statistics, field, console.width))
    console.print(f"\n{explanation(result.statistics, field)}")
    tokens = result.statistics.tokens.nanmean().item()
    console.print(f"{result.examples} examples of {tokens:.0f} tokens on average, {result.model}")
