"""`attnlens check`: does attnlens work on this model?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from attnlens.cli.options import AsJson, ModelName
from attnlens.cli.terminal import bars, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnlens.checking import SiteVerdict

LEGEND = (
    "B·H·Q·K·D: examples, heads, queries, keys, and dimensions of a head. A·V − O: largest error "
    "of attention times values as the context, relative. ΣAVH+b: the same of all heads behind "
    "W_O as what it returned; – where that was not compared."
)
_WIDE = 130  # columns in which the names of modules stand in the table


def check(model: ModelName, as_json: AsJson = False) -> None:
    """Run a model with and without a lens and report whether attnlens works on it.

    The inputs are made up from the model's configuration. The exit code is 1 where it does not.
    """
    from rich.console import Console
    from rich.markup import escape

    from attnlens.recipes.compatibility import check_model

    with bars() as progress:
        verdict = check_model(model, progress)
    if as_json:
        print_json(verdict.to_dict())
    else:
        console = Console(highlight=False)
        if verdict.sites:
            for table in _tables(verdict.sites, console.width):
                console.print(table)
            console.print(f"[dim]{LEGEND}[/]\n")
        identical = "bit-identical" if verdict.identical else "NOT identical"
        console.print(f"outputs with a lens attached: {identical}")
        colour = "green" if verdict.supported else "red"
        console.print(f"[{colour}]{escape(verdict.words)}[/]")
    if not verdict.supported:
        raise typer.Exit(1)


def _tables(sites: Sequence[SiteVerdict], width: int) -> Iterator[RenderableType]:
    """A row for each call; where names of modules do not fit, they are in a table of their own."""
    from attnlens.reporting.tables import text_table

    columns = ["", "kind", "seen by", "B·H·Q·K·D", "mask", "A·V − O", "ΣAVH+b", "rank"]
    names = ["site", "W_O", "heads masked"]
    cells = [[str(number), *_cells(site)] for number, site in enumerate(sites)]
    modules = [[s.site, s.projection or s.projection_reason, s.masking] for s in sites]
    if width >= _WIDE:
        rows = [[*row, *pair] for row, pair in zip(cells, modules, strict=True)]
        yield text_table("", [*columns, *names], rows, left=[*columns, *names])
    else:
        yield text_table("", columns, cells, left=columns)
        rows = [[row[0], *pair] for row, pair in zip(cells, modules, strict=True)]
        yield text_table("", ["", *names], rows, left=["", *names])


def _cells(site: SiteVerdict) -> list[str]:
    shape = "·".join(map(str, site.shape))
    windows = f" ({site.windows} windows)" if site.windows > 1 else ""
    rank = "–" if site.projection is None else str(site.projection_rank)
    output = "–" if site.output_error is None else f"{site.output_error:.0e}"
    error = f"{site.context_error:.0e}"
    return [site.kind, site.tap, shape + windows, site.mask, error, output, rank]
