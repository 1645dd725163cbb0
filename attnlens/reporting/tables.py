"""Tables for the terminal, of any cells and of heads coloured by value; needs `rich`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from rich.color import Color
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from attnlens.errors import InputError
from attnlens.recovery import TokenIdentifiabilityResult
from attnlens.results import LayeredResult, cell

QUANTITIES = {
    "rate": "tokens identified",
    "words": "words identified: the targets are word embeddings, any position of the word is right",
    "rescaled": "tokens identified after a random change of every hidden state's norm",
    "rotated": "tokens identified after a random turn of every hidden state",
}

# Viridis at 0, ¼, ½, ¾, 1: dark to bright, readable with every kind of colour vision and in grey.
_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_RANGES = {
    "effective_fraction": (0.0, 1.0),
    "correlation": (-1.0, 1.0),
    "pooled_correlation": (-1.0, 1.0),
}


def text_table(
    title: str | Text,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    left: Collection[str] = (),
    gap: int = 2,
) -> RenderableType:
    """Lay cells out below a title; no title, column or cell is read as markup.

    Args:
        title: what stands above; nothing if empty.
        columns: names of the columns.
        rows: a cell for each column; columns to the right may be missing.
        left: columns that begin at the left, where all others end at the right.
        gap: spaces between columns.

    Returns:
        Something to print on a `rich` console.
    """
    table = Table(box=None, padding=(0, 0, 0, gap), pad_edge=False, header_style="dim")
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in left else "right"
        table.add_column(Text(name), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(entry) if isinstance(entry, str) else entry for entry in row))
    heading = Text(title, style="bold") if isinstance(title, str) else title
    return Group(heading, table) if heading else table


def head_table(
    result: LayeredResult, field: str = "effective_fraction", width: int = 80
) -> RenderableType:
    """Lay one field out as a coloured layer × head table with a title and a colour scale.

    Every cell holds its number, so nothing is lost without colour.

    Args:
        result: the result.
        field: the quantity to show, `[L, H]`.
        width: columns of the terminal; heads that do not fit continue in a table below.

    Returns:
        Something to print on a `rich` console.
    """
    values = result.field(field)
    low, high = _range_of(values, field)
    heads = list(map(str, range(values.shape[1])))
    title = _title(f"{field.replace('_', ' ')}, layer × head", low, high)
    return _grid(title, result.row_labels(""), heads, values, (low, high), width)


def explanation(result: LayeredResult, field: str = "effective_fraction") -> str:
    """Say in plain words what a table shows and where its extremes are.

    Args:
        result: the result.
        field: the quantity shown, `[L, H]`.

    Returns:
        Two or three sentences.
    """
    values = result.field(field)
    title = field.replace("_", " ").capitalize()
    sentences = [f"{title}: {result.meanings.get(field, 'one number per head')}."]
    finite = torch.isfinite(values)
    if len({cell(value) for value in values[finite].tolist()}) == 1:
        sentences.append(f"It is {cell(values[finite][0].item())} for every head.")
    elif bool(finite.any()):
        lowest = int(values.masked_fill(~finite, torch.inf).argmin())
        highest = int(values.masked_fill(~finite, -torch.inf).argmax())
        low, high = _place(result, values, lowest), _place(result, values, highest)
        mean = cell(values[finite].mean().item())
        sentences.append(f"Mean {mean}, lowest {low}, highest {high}.")
    if field == "effective_fraction" and bool((result.tensors()["nullity"] == 0).all()):
        sentences.append(
            "No example was longer than the values' rank, so every head's attention is "
            "effective as it is."
        )
    return " ".join(sentences)


def layer_table(title: str, result: LayeredResult, width: int = 80) -> RenderableType:
    """Lay out the quantities of a result that say most, by layer, averaged over heads.

    Args:
        title: what stands above.
        result: the result.
        width: columns of the terminal; labels that do not fit continue in a table below.

    Returns:
        Something to print on a `rich` console: where the result tells labels apart, a table for
        each quantity with a column for each label.
    """
    layers, labels = result.row_labels(), getattr(result, "labels", ("",))
    means = {}
    for quantity in result.shown:
        values = result.field(quantity)
        by_label = values.double().reshape(len(layers), -1, len(labels) if values.dim() > 1 else 1)
        means[quantity.replace("_", " ")] = by_label.nanmean(1)
    if len(labels) == 1:
        columns = torch.cat(list(means.values()), 1)
        return _grid(Text(title, style="bold"), layers, list(means), columns, None, width)
    blocks = [
        _grid(Text(f"{title}: {name}, by label", style="bold"), layers, labels, values, None, width)
        for name, values in means.items()
    ]
    return Group(*blocks)


def rates_table(
    results: Sequence[TokenIdentifiabilityResult], quantities: Mapping[str, str] = QUANTITIES
) -> RenderableType:
    """Lay out rates of token identifiability by layer, in per cent, with a column for each map.

    Args:
        results: of the same tokens.
        quantities: title of each quantity to show, by name.

    Returns:
        Something to print on a `rich` console: one table per quantity, and a line on what is
        found without looking at the model.

    Raises:
        InputError: if the results are of different layers, or there is none.
    """
    if not results or len({result.layers for result in results}) != 1:
        raise InputError("results must be one or more, of the same layers.")
    first = results[0]
    columns = ["", *(result.map for result in results)]
    blocks: list[RenderableType] = []
    for name, title in quantities.items():
        cells = [_percent(getattr(result, name)) for result in results]
        if name == "rate":
            errors = [_percent(result.error) for result in results]
            cells = [
                [f"{rate} ± {error}" for rate, error in zip(*pair, strict=True)]
                for pair in zip(cells, errors, strict=True)
            ]
        rows = list(zip(first.row_labels(), *cells, strict=True))
        blocks += [text_table(f"{title}, %", columns, rows, left=[""]), ""]
    *_, test = first.tokens.long().tolist()
    controls = (
        f"Knowing a token's position alone identifies {_percent(first.position)[0]} %, chance "
        f"{_percent(first.chance)[0]} %. Counted on {test} tokens of {int(first.sequences[2])} "
        f"sequences that no map was trained on, by {first.distance} distance."
    )
    return Group(*blocks, Text(controls))


def _grid(
    title: Text,
    labels: Sequence[str],
    columns: Sequence[str],
    values: Tensor,
    scale: tuple[float, float] | None,
    width: int,
) -> RenderableType:
    """A number for each row and column, coloured on a scale if there is one, in tables that fit."""
    rows = [
        [Text(cell(value), _style(_position(value, *scale)) if scale else "") for value in row]
        for row in values.tolist()
    ]
    widest = max([*map(len, columns), *(len(text) for row in rows for text in row)])
    fitting = max(1, (width - max(map(len, ["layer", *labels]))) // (widest + 1))
    blocks: list[RenderableType] = [title]
    for start in range(0, len(columns), fitting):
        shown = columns[start : start + fitting]
        lines = [
            (Text(label), *row[start : start + fitting])
            for label, row in zip(labels, rows, strict=True)
        ]
        blocks.append(text_table("", ["layer", *shown], lines, gap=1))
    return Group(*blocks)


def _place(result: LayeredResult, values: Tensor, index: int) -> str:
    row, head = divmod(index, values.shape[1])
    return f"{cell(values[row, head].item())} (layer {result.row_labels('')[row]}, head {head})"


def _range_of(values: Tensor, field: str) -> tuple[float, float]:
    if field in _RANGES:
        return _RANGES[field]
    finite = values[torch.isfinite(values)]
    return (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)


def _title(name: str, low: float, high: float) -> Text:
    """A name and its colour scale from low to high."""
    title = Text(f"{name}  ", style="bold")
    title.append(f"{cell(low)} ", style="not bold")
    for step in range(5):
        title.append("   ", style=_style(step / 4))
    return title.append(f" {cell(high)}", style="not bold")


def _position(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 1.0


def _style(position: float) -> Style:
    """Background of the scale at a position in `[0, 1]`, with a legible foreground."""
    if position != position:
        return Style()
    scaled = min(max(position, 0.0), 1.0) * (len(_SCALE) - 1)
    step = min(int(scaled), len(_SCALE) - 2)
    red, green, blue = (
        low + (high - low) * (scaled - step)
        for low, high in zip(_SCALE[step], _SCALE[step + 1], strict=True)
    )
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 128
    return Style(
        color=Color.from_rgb(255, 255, 255) if dark else Color.from_rgb(0, 0, 0),
        bgcolor=Color.from_rgb(red, green, blue),
    )


def _percent(rates: Tensor) -> list[str]:
    return ["–" if rate != rate else f"{100 * rate:.1f}" for rate in rates.flatten().tolist()]
