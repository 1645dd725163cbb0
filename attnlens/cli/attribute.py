"""`attnlens attribute`: which tokens of a sentence made each of its hidden states."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from attnlens.attribution.hidden_tokens import HiddenTokenAttribution
from attnlens.cli.options import AsJson, ModelName
from attnlens.cli.terminal import loaded, plain_errors
from attnlens.errors import InputError
from attnlens.files import versions
from attnlens.lens import Lens
from attnlens.texts.loading import TextModel


@dataclass(frozen=True, eq=False)
class SentenceAttribution:
    """Contributions of the tokens of one sentence to its hidden states.

    Attributes:
        model: name of the model.
        tokens: the n tokens.
        probes: probes per token, or None where exact.
        contribution: `[L, n, n]`, source then target, in `[0, 1]`.
        standard_error: `[L, n, n]`.
    """

    model: str
    tokens: tuple[str, ...]
    probes: int | None
    contribution: Tensor
    standard_error: Tensor

    @property
    def own(self) -> Tensor:
        """Contribution of every token to itself, `[L, n]`."""
        return self.contribution.diagonal(dim1=-2, dim2=-1)

    @property
    def not_main(self) -> Tensor:
        """Share of tokens that are not their own main contributor, `[L]`."""
        return (self.own < self.contribution.amax(-2)).double().mean(-1)

    def to_json(self, layer: int) -> str:
        """Return a JSON document.

        Args:
            layer: the layer whose contributions it holds.

        Returns:
            The document; `contribution` has a row for each target.
        """
        exact = self.probes is None
        document = {
            "model": self.model,
            "tokens": self.tokens,
            "probes": self.probes,
            "own_contribution": self.own.mean(-1).tolist(),
            "not_main_contributor": self.not_main.tolist(),
            "layer": layer,
            "contribution": self.contribution[layer].mT.tolist(),
            "standard_error": None if exact else self.standard_error[layer].mT.tolist(),
            "versions": versions(),
        }
        return json.dumps(document, indent=1, ensure_ascii=False).replace("NaN", "null")


def attribute_sentence(model: TextModel, sentence: str, probes: int | None) -> SentenceAttribution:
    """Attribute the hidden states of a sentence to its tokens.

    Args:
        model: the model.
        sentence: the sentence; cut where the model cannot read on.
        probes: probes per token, or None for exact.

    Returns:
        The contributions at every layer.
    """
    columns = model.tokenise([sentence])
    (batch,) = model.batches(columns, 1)
    observer = HiddenTokenAttribution(probes, keep="matrices")
    with Lens(model.model, observer), torch.no_grad():
        model.model(**batch)
    (matrices,) = observer.matrices
    tokens = model.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    return SentenceAttribution(
        model.name,
        tuple(tokens),
        probes,
        matrices.contribution[:, 0],
        matrices.standard_error[:, 0],
    )


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
    with plain_errors():
        sentence = _sentence(text)
        result = attribute_sentence(loaded(model), sentence, None if exact else probes)
        layers = len(result.contribution)
        if not -layers <= layer < layers:
            raise InputError(f"layer must lie between {-layers} and {layers - 1}. Got {layer}.")
        if as_json:
            print(result.to_json(layer % layers))
            return
        console = Console(highlight=False)
        console.print(contributor_table(result, layer % layers, top))
        console.print(profile_table(result))


def contributor_table(result: SentenceAttribution, layer: int, top: int) -> Table:
    """Lay out the main contributors to every token at a layer.

    Args:
        result: the contributions.
        layer: index of the layer.
        top: how many contributors.

    Returns:
        Something to print on a `rich` console.
    """
    shares, sources = result.contribution[layer].topk(min(top, len(result.tokens)), dim=0)
    noise = result.standard_error[layer].mean()
    title = f"What each hidden state at layer {layer} is made of"
    note = "exact" if result.probes is None else f"± {100 * noise:.1f} on average"
    table = Table(title=f"{title} (%, {note})", title_justify="left", box=None, pad_edge=False)
    table.add_column("token", style="bold")
    table.add_column("itself", justify="right")
    for rank in range(len(shares)):
        table.add_column("main contributors" if rank == 0 else "")
    for target, token in enumerate(result.tokens):
        cells = [
            f"{escape(result.tokens[source])} {100 * share:.0f}"
            for share, source in zip(shares[:, target], sources[:, target], strict=True)
        ]
        table.add_row(escape(token), f"{100 * result.own[layer, target]:.0f}", *cells)
    return table


def profile_table(result: SentenceAttribution) -> Table:
    """Lay out how much of themselves tokens keep from layer to layer.

    Args:
        result: the contributions.

    Returns:
        Something to print on a `rich` console.
    """
    table = Table(
        title="\nHow much of a token is its own, by layer (%)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("layer", "own contribution", "tokens made mainly by another"):
        table.add_column(column, justify="right")
    for layer, (own, other) in enumerate(zip(result.own.mean(-1), result.not_main, strict=True)):
        table.add_row(str(layer), f"{100 * own:.1f}", f"{100 * other:.0f}")
    return table


def _sentence(text: str) -> str:
    """The sentence that was given; a name of a file is taken for a mistake."""
    sentence = " ".join((sys.stdin.read() if text == "-" else text).split())
    if not sentence:
        raise InputError("There is no text.")
    if len(sentence) < 256 and Path(sentence).is_file():
        raise InputError(f"{sentence} is a file. To read it: --text - < {sentence}")
    return sentence
