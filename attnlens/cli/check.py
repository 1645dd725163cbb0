"""`attnlens check`: does attnlens work on this model?"""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnlens.checking import SiteVerdict, Verdict
from attnlens.checking import check as verdict
from attnlens.cli.options import AsJson, ModelName
from attnlens.cli.terminal import plain_errors
from attnlens.texts.loading import load_model


def check(
    model: ModelName,
    as_json: AsJson = False,
) -> None:
    """Run a model with and without a lens and report whether attnlens works on it.

    The inputs are made up from the model's configuration. The exit code is 1 where it does not.
    """
    with plain_errors():
        with Console(stderr=True).status(f"Loading {escape(model)} …"):
            loaded = load_model(model)
        found = verdict(loaded)
        if as_json:
            print(json.dumps(found.to_dict(), indent=1))
        else:
            _show(found)
    if not found.supported:
        raise typer.Exit(1)


def _show(found: Verdict) -> None:
    console = Console(highlight=False)
    if found.sites:
        table = Table("site", "kind", "seen by", "B·H·Q·K·D", "mask", "A·V − O", "W_O", "Σ AVH + b")
        for site in found.sites:
            table.add_row(*_cells(site))
        console.print(table)
    identical = "bit-identical" if found.identical else "NOT identical"
    console.print(f"outputs with a lens attached: {identical}")
    colour = "green" if found.supported else "red"
    console.print(f"[{colour}]{escape(found.words)}[/]")


def _cells(site: SiteVerdict) -> tuple[str, ...]:
    shape = "·".join(map(str, site.shape))
    windows = f" ({site.windows} windows)" if site.windows > 1 else ""
    projection = site.projection_reason
    if site.projection is not None:
        projection = f"{site.projection} (rank {site.projection_rank})"
    output = "–" if site.output_error is None else f"{site.output_error:.0e}"
    error = f"{site.context_error:.0e}"
    cells = (site.site, site.kind, site.tap, f"{shape}{windows}", site.mask, error)
    return tuple(map(escape, (*cells, projection, output)))
