"""Rates of token identifiability as plain text, maps side by side and controls beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from attnlens.errors import InputError
from attnlens.recovery.token_identifiability import TokenIdentifiabilityResult
from attnlens.results import Text, row_labels

QUANTITIES = {
    "rate": "tokens identified",
    "words": "words identified: the targets are word embeddings, any position of the word is right",
    "rescaled": "tokens identified after a random change of every hidden state's norm",
    "rotated": "tokens identified after a random turn of every hidden state",
}


def rates_table(
    results: Sequence[TokenIdentifiabilityResult], quantities: Mapping[str, str] = QUANTITIES
) -> Text:
    """Lay out rates by layer, in per cent, with a column for each map.

    Args:
        results: of the same tokens.
        quantities: title of each quantity to show, by name.

    Returns:
        One block per quantity, and a line on what is found without looking at the model.

    Raises:
        InputError: if the results are of different layers, or there is none.
    """
    if not results or len({result.layers for result in results}) != 1:
        raise InputError("results must be one or more, of the same layers.")
    first = results[0]
    labels = row_labels(first)
    names: list[str] = [result.map for result in results]
    blocks = []
    for name, title in quantities.items():
        columns = [_percent(getattr(result, name)) for result in results]
        if name == "rate":
            errors = [_percent(result.error) for result in results]
            columns = [
                [f"{rate} ± {error}" for rate, error in zip(*pair, strict=True)]
                for pair in zip(columns, errors, strict=True)
            ]
        blocks.append(_block(f"{title}, %", names, labels, columns))
    known = f"{_percent(first.position)[0]} %"
    chance = f"{_percent(first.chance)[0]} %"
    _, _, test = first.tokens.long().tolist()
    blocks.append(
        f"Knowing a token's position alone identifies {known}, chance {chance}. Counted on {test} "
        f"tokens of {int(first.sequences[2])} sequences that no map was trained on, by "
        f"{first.distance} distance."
    )
    return Text("\n\n".join(blocks))


def _percent(rates: Tensor) -> list[str]:
    return ["–" if rate != rate else f"{100 * rate:.1f}" for rate in rates.flatten().tolist()]


def _block(title: str, names: list[str], labels: list[str], columns: list[list[str]]) -> str:
    width = max(len(text) for column in [names, *columns] for text in column)
    left = max(map(len, labels))
    lines = [title, " " * left + "".join(f"  {name:>{width}}" for name in names)]
    for label, *cells in zip(labels, *columns, strict=True):
        lines.append(f"{label:<{left}}" + "".join(f"  {text:>{width}}" for text in cells))
    return "\n".join(lines)
