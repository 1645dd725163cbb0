"""`attnlens check`: does attnlens work on this model?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from attnlens.cli.options import AsJson, ModelName
from attnlens.cli.terminal import bars, print_json

if TYPE_CHECKING:
    from attnlens.checking import SiteVerdict

COLUMNS = (
    "site",
    "kind",
    "seen by",
    "B·H·Q·K·D",
    "mask",
    "A·V − O",
    "W_O",
    "Σ AVH + b",
    "heads masked",
)


def check(model: ModelName, as_json: AsJson = False) -> None:
    """Run a model with and without a lens and report whether attnlens works on it.

    The inputs are made up from the model's configuration. The exit code is 1 where it does not.
    """
    from rich.console import Console
    from rich.markup import escape

    from attnlens.recipes.compatibility import check_model
    from attnlens.reporting.tables import text_table

    with bars() as progress:
        verdict = check_model(model, progress)
    if as_json:
        print_json(verdict.to_dict())
    else:
        console = Console(highlight=False)
        if verdict.sites:
            console.print(text_table("", COLUMNS, map(_cells, verdict.sites), left=COLUMNS))
        identical = "bit-identical" if verdict.identical else "NOT identical"
        console.print(f"outputs with a lens attached: {identical}")
        colour = "green" if verdict.supported else "red"
        console.print(f"[{colour}]{escape(verdict.words)}[/]")
    if not verdict.supported:
        raise typer.Exit(1)


def _cells(site: SiteVerdict) -> list[str]:
    shape = "·".join(map(str, site.shape))
    windows = f" ({site.windows} windows)" if site.windows > 1 else ""
    projection = site.projection_reason
    if site.projection is not None:
        projection = f"{site.projection} (rank {site.projection_rank})"
    output = "–" if site.output_error is None else f"{site.output_error:.0e}"
    error = f"{site.context_error:.0e}"
    return [
        site.site,
        site.kind,
        site.tap,
        shape + windows,
        site.mask,
        error,
        projection,
        output,
        site.masking,
    ]
