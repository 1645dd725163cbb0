"""`attnlens attribute`: which tokens of a sentence made each of its hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from attnlens.cli.options import AsJson, ModelName
from attnlens.cli.terminal import bars, print_json
from attnlens.errors import InputError
from attnlens.recipes.sentence import SentenceAttribution, attribute_sentence
from attnlens.reporting.tables import text_table
from attnlens.texts.reading import read_examples


def attribute(
    model: ModelName,
    text: Annotated[
        str, typer.Option("--text", metavar="SENTENCE", help="The sentence; - is standard input.")
    ],
    layer: Annotated[
        int, typer.Option("--layer", help="Layer to show; negative ones count from the end.")
    ] = -1,
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
    with bars() as progress:
        result = attribute_sentence(model, _sentence(text), None if exact else probes, progress)
    if as_json:
        print_json(result.to_dict(layer))
        return
    console = Console(highlight=False)
    console.print(_contributors(result, result.layer(layer), top))
    console.print()
    console.print(_profile(result))


def _sentence(text: str) -> str:
    """The sentence that was given; a name of a file is taken for a mistake."""
    sentence = " ".join(" ".join(read_examples("-") if text == "-" else [text]).split())
    if not sentence:
        raise InputError("There is no text.")
    if len(sentence) < 256 and Path(sentence).is_file():
        raise InputError(f"{sentence} is a file. To read it: --text - < {sentence}")
    return sentence


def _contributors(result: SentenceAttribution, layer: int, top: int) -> RenderableType:
    """The main contributors to every token at a layer."""
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
    columns = ["layer", "own contribution", "tokens made mainly by another"]
    shares = zip(result.own.mean(-1), result.not_main, strict=True)
    rows = [
        [str(layer), f"{100 * own:.1f}", f"{100 * other:.0f}"]
        for layer, (own, other) in enumerate(shares)
    ]
    return text_table("How much of a token is its own, by layer (%)", columns, rows)
