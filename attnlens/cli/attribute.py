"""`attnlens attribute`: which tokens of a sentence made each of its hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from attnlens.cli.options import AsJson, ModelName, Sentences, TextFiles, examples, indices_in
from attnlens.cli.terminal import bars, print_json, say_idle

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnlens.recipes.sentence import SentenceAttribution


LEGEND = (
    "Shares are of the norms of the derivatives of a hidden state by the input tokens. Itself, or "
    "own: the share of the token at that place."
)


def attribute(
    context: typer.Context,
    model: ModelName,
    text: TextFiles = None,
    sentence: Sentences = None,
    layers: Annotated[
        str, typer.Option("--layers", metavar="LIST", help="Layers to show, as in 0,3,-1.")
    ] = "-1",
    top: Annotated[int, typer.Option("--top", min=1, help="Contributors to show.")] = 3,
    probes: Annotated[
        int, typer.Option("--probes", min=1, help="Probes per token: more are slower and closer.")
    ] = 8,
    exact: Annotated[
        bool, typer.Option("--exact", help="As many probes as the hidden size: no error, slow.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which tokens of a sentence made each of its hidden states."""
    from rich.console import Console

    from attnlens.recipes.sentence import attribute_sentence

    if exact:
        say_idle(context, ("probes",), "with --exact")
    if as_json:
        say_idle(context, ("top",), "with --json, which holds all")
    places = indices_in(layers, "--layers")
    whole = " ".join(examples(text, sentence))
    with bars() as progress:
        result = attribute_sentence(model, whole, None if exact else probes, progress)
    places = tuple(dict.fromkeys(map(result.layer, places)))
    if as_json:
        print_json(result.to_dict(places))
        return
    console = Console(highlight=False)
    for layer in places:
        console.print(_contributors(result, layer, top))
        console.print()
    console.print(_profile(result))
    console.print(f"\n[dim]{LEGEND}[/]")


def _contributors(result: SentenceAttribution, layer: int, top: int) -> RenderableType:
    """The main contributors to every token at a layer."""
    from attnlens.reporting.tables import text_table

    shares, sources = result.contribution[layer].topk(min(top, len(result.tokens)), dim=0)
    noise = 100 * result.standard_error[layer].mean()
    precision = "exact" if result.probes is None else f"± {noise:.1f} on average"
    title = f"What each hidden state at layer {layer} is made of (%, {precision})"
    columns = ["token", "itself", "main contributors", *[""] * (len(shares) - 1)]
    rows = [
        [
            token,
            f"{100 * result.own[layer, target]:.0f}",
            *(
                f"{result.tokens[source]} {100 * share:.0f}"
                for share, source in zip(shares[:, target], sources[:, target], strict=True)
            ),
        ]
        for target, token in enumerate(result.tokens)
    ]
    return text_table(title, columns, rows, left=("token", "main contributors", ""))


def _profile(result: SentenceAttribution) -> RenderableType:
    """How much of themselves tokens keep from layer to layer."""
    from attnlens.reporting.tables import text_table

    columns = ["layer", "own contribution", "tokens made mainly by another"]
    shares = zip(result.own.mean(-1), result.not_main, strict=True)
    rows = [
        [str(layer), f"{100 * own:.1f}", f"{100 * other:.0f}"]
        for layer, (own, other) in enumerate(shares)
    ]
    return text_table("How much of a token is its own, by layer (%)", columns, rows)
