"""Layer × head tables as plain text."""

from __future__ import annotations

from torch import Tensor

from attnlens.errors import InputError
from attnlens.observers.tabular import LayeredResult

# What each field of HeadStatisticsResult says of a head, in plain words.
MEANINGS = {
    "examples": "how many examples counted",
    "skipped": "how many examples held NaN or Inf and were left out",
    "tokens": "tokens per example",
    "rank": "dimension of the space that a head's values span, rank(T)",
    "nullity": "dimension in which attention can change without any effect, n − rank(T)",
    "nullity_min": "the smallest nullity of any attention row",
    "nullity_max": "the largest nullity of any attention row",
    "simplex_nullity": "nullity that is left if attention rows must keep summing to one",
    "condition": "largest over smallest singular value of a head's values",
    "attention_norm": "size of the attention matrix, ‖A‖",
    "effective_norm": "size of the attention that the output can see, ‖A⊥‖",
    "effective_fraction": (
        "the share of a head's attention that can influence its output, ‖A⊥‖²/‖A‖²: at 1 all of "
        "it counts, at 0.6 the other 40 % changes nothing"
    ),
    "correlation": "Pearson's r between raw and effective attention, averaged over examples",
    "pooled_correlation": "Pearson's r between raw and effective attention, all examples pooled",
    "entropy": "how widely a token spreads its attention, in nats: 0 is a single token",
    "output_norm": "size of what a head writes, ‖AT‖",
    "importance": "how much the loss depends on a head, E |⟨O_h, ∂L/∂O_h⟩| per example",
    "token_importance": "how much the loss depends on a head, E |⟨o_i, ∂L/∂o_i⟩| per token",
    "seen": "how many examples ran forward",
    "raw_cosine": "likeness of raw attention in the two models, the cosine of A",
    "effective_cosine": "likeness of effective attention in the two models, the cosine of A⊥",
    "effective_fraction_change": "‖A⊥‖²/‖A‖² of the second model minus that of the first",
    "importance_change": "importance in the second model minus that in the first",
    "own": "share of a hidden state that comes from its own token",
    "not_main": "share of tokens to which another token contributes more than they do themselves",
}


class Text(str):
    """Text that displays as itself in a console, instead of quoted."""

    def __repr__(self) -> str:
        return str(self)


def field_of(result: LayeredResult, field: str) -> Tensor:
    """Return one `[L, H]` quantity of a result.

    Args:
        result: the result.
        field: its name.

    Returns:
        `[L, H]`.

    Raises:
        InputError: if there is no such field, listing those there are.
    """
    tensors = result.tensors()
    if field not in tensors:
        raise InputError(f"No field {field!r}. There are: {', '.join(sorted(tensors))}.")
    return tensors[field]


def row_labels(result: LayeredResult) -> list[str]:
    """Name each row: the layer index, with the stack where there are several.

    Args:
        result: the result.

    Returns:
        One label per row.
    """
    several = len({stack for stack, _ in result.layers}) > 1
    return [f"{stack} {layer}" if several else f"layer {layer}" for stack, layer in result.layers]


def cell(value: float) -> str:
    """Format one number of a table; a missing one is a dash."""
    if value != value:
        return "–"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"


def table(result: LayeredResult, field: str = "effective_fraction") -> Text:
    """Lay one field out as a layer × head table.

    Args:
        result: the result.
        field: the quantity to show.

    Returns:
        The table with a title line.

    Raises:
        InputError: if there is no such field.
    """
    values = field_of(result, field)
    labels = row_labels(result)
    header = [f"head {head}" for head in range(values.shape[1])]
    cells = [[cell(value) for value in row] for row in values.tolist()]
    width = max(len(text) for row in [header, *cells] for text in row)
    left = max(map(len, labels))
    lines = [field.replace("_", " "), " " * left + "".join(f"  {text:>{width}}" for text in header)]
    for label, row in zip(labels, cells, strict=True):
        lines.append(f"{label:<{left}}" + "".join(f"  {text:>{width}}" for text in row))
    return Text("\n".join(lines))
