"""The commands; `report` and `demo` are here, the others in files of their own."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnlens.cli.attribute import attribute
from attnlens.cli.check import check
from attnlens.cli.choices import EXAMPLES, MAX_TOKENS, MEGABYTES, Field
from attnlens.cli.compare import compare
from attnlens.cli.identify import identify
from attnlens.cli.options import (
    AsJson,
    BatchSize,
    Layers,
    Lines,
    MaxLength,
    ModelName,
    OutputFolder,
    Overwrite,
    PagePath,
    Sentences,
    TextFiles,
    examples,
    indices_in,
    layers_in,
    read_paths,
)
from attnlens.cli.prune import prune
from attnlens.cli.scan import merge, scan
from attnlens.cli.terminal import Commands, bars, print_json, say, say_idle
from attnlens.errors import InputError

if TYPE_CHECKING:
    from attnlens.recipes.head_report import HeadReport

# No rich markup in the help, whose import takes longer than the rest of it.
app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (attribute, check, compare, identify, prune, scan, merge):
    app.command()(command)

FieldOption = Annotated[Field, typer.Option("--field", help="Quantity to show.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"attnlens {version('attnlens')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at the part of attention that can influence the output."""


@app.command()
def report(
    context: typer.Context,
    model: ModelName,
    text: TextFiles = None,
    sentence: Sentences = None,
    lines: Lines = False,
    field: FieldOption = "effective_fraction",
    as_json: AsJson = False,
    output: OutputFolder = None,
    overwrite: Overwrite = False,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
    layers: Layers = None,
    html: PagePath = None,
    heads: Annotated[
        str | None,
        typer.Option("--heads", metavar="LIST", help="Heads with maps in the page, as in 0,3."),
    ] = None,
    examples_shown: Annotated[
        int,
        typer.Option("--examples", min=1, help="Examples with maps in the page, from the first."),
    ] = EXAMPLES,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Tokens of an example to show in the page.")
    ] = MAX_TOKENS,
    megabytes: Annotated[
        float, typer.Option("--megabytes", min=2.5, help="Largest size of the page.")
    ] = MEGABYTES,
    attribution: Annotated[
        bool,
        typer.Option(
            "--attribution",
            help="Put hidden token attribution into the page: seconds per example.",
        ),
    ] = False,
    identifiability: Annotated[
        bool,
        typer.Option(
            "--identifiability",
            help="Put token identifiability into the page; needs some dozen examples.",
        ),
    ] = False,
    minimal: Annotated[
        bool,
        typer.Option(
            "--minimal",
            help="Put the simplest attention with the same output into the page: seconds per "
            "example.",
        ),
    ] = False,
) -> None:
    """Run text through a model and show one number per attention head."""
    from attnlens.recipes.head_report import report_heads
    from attnlens.recipes.page_content import PageContent

    if html is None:
        if heads or attribution or identifiability or minimal:
            raise InputError("--heads, --attribution, --identifiability and --minimal need --html.")
        say_idle(context, ("examples_shown", "max_tokens", "megabytes"), "without --html")
    _prepare(context, as_json, output, overwrite, html, read_paths(model, text))
    chosen = None if heads is None else indices_in(heads, "--heads")
    shown = chosen, examples_shown, max_tokens, megabytes, attribution, identifiability, minimal
    places = layers_in(layers)
    texts = examples(text, sentence, lines)
    with bars() as progress:
        result = report_heads(
            model,
            texts,
            layers=places,
            batch_size=batch_size,
            max_length=max_length,
            page=None if html is None else PageContent(*shown),
            about={"text": text or [], "lines": lines},
            progress=progress,
        )
    _deliver(result, field, as_json, output, html)


@app.command()
def demo(
    context: typer.Context,
    field: FieldOption = "effective_fraction",
    as_json: AsJson = False,
    output: OutputFolder = None,
    overwrite: Overwrite = False,
    html: PagePath = None,
) -> None:
    """Show the heads of a packaged MiniLM sentence encoder reading twelve paragraphs."""
    from rich.console import Console

    from attnlens.recipes.demonstration import movable_attention, report_demo
    from attnlens.recipes.page_content import PageContent

    _prepare(context, as_json, output, overwrite, html, [])
    with bars() as progress:
        result = report_demo(None if html is None else PageContent(), progress)
    if not as_json:
        layers, heads = result.statistics.rank.shape
        Console(highlight=False).print(
            f"You are looking at the {layers} × {heads} attention heads of a sentence encoder "
            f"while it reads {result.examples} short paragraphs, one number per head.\n"
        )
    _deliver(result, field, as_json, output, html)
    if not as_json:
        moved = movable_attention().total_variation
        layer, head = divmod(int(moved.argmax()), heads)
        Console(highlight=False).print(
            f"On the first paragraph, {moved.mean():.0%} of the attention could lie elsewhere, as "
            f"a distribution with the same output; {moved.max():.0%} in head {head} of layer "
            f"{layer}."
        )


def _prepare(
    context: typer.Context,
    as_json: bool,
    output: Path | None,
    overwrite: bool,
    html: Path | None,
    inputs: list[str],
) -> None:
    """Refuse what would fail only after the run, and say what does nothing."""
    from attnlens.files import make_folder, require_writable

    if as_json:
        say_idle(context, ("field",), "with --json, which holds all")
    if html is not None:
        require_writable(html, inputs)
    if output is not None:
        make_folder(output, inputs=inputs, overwrite=overwrite)
    else:
        say_idle(context, ("overwrite",), "without --output")


def _deliver(
    result: HeadReport, field: Field, as_json: bool, output: Path | None, html: Path | None
) -> None:
    """Write and print a report."""
    from rich.console import Console

    from attnlens.reporting.tables import explanation, head_table

    for note in result.notes:
        say(note, "note")
    if html is not None and result.page is not None:
        result.page.save(html)
        say(f"Written to {html}.")
    if output is not None:
        result.write(output)
        say(f"Written to {output}.")
    if as_json:
        print_json(result.to_dict())
        return
    console = Console(highlight=False, markup=False)
    console.print(head_table(result.statistics, field, console.width))
    console.print(f"\n{explanation(result.statistics, field)}")
    tokens = result.statistics.tokens.nanmean().item()
    console.print(f"{result.examples} examples of {tokens:.0f} tokens on average, {result.model}")
