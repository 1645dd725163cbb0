"""Layer × head tables for the terminal, coloured by value; needs `rich`."""

from __future__ import annotations

import torch
from rich.color import Color
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch import Tensor

from attnlens.attention.statistics import HeadStatisticsResult
from attnlens.results import MEANINGS, cell, field_of

# Viridis at 0, ¼, ½, ¾, 1: dark to bright, readable with every kind of colour vision and in grey.
_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_RANGES = {
    "effective_fraction": (0.0, 1.0),
    "correlation": (-1.0, 1.0),
    "pooled_correlation": (-1.0, 1.0),
}


def head_table(
    result: HeadStatisticsResult, field: str = "effective_fraction", width: int = 80
) -> RenderableType:
    """Lay one field out as a coloured layer × head table with a title and a colour scale.

    Every cell holds its number, so nothing is lost without colour.

    Args:
        result: the result.
        field: the quantity to show.
        width: columns of the terminal; heads that do not fit continue in a table below.

    Returns:
        Something to print on a `rich` console.
    """
    values = field_of(result, field)
    low, high = _range_of(values, field)
    labels = _labels(result)
    cells = max(len(cell(value)) for value in values.flatten().tolist())
    fitting = max(1, (width - max(map(len, ["layer", *labels]))) // (cells + 1))
    blocks: list[RenderableType] = [_title(field, low, high)]
    for start in range(0, values.shape[1], fitting):
        heads = range(start, min(start + fitting, values.shape[1]))
        blocks.append(_block(values, labels, heads, low, high))
    return Group(*blocks)


def explanation(result: HeadStatisticsResult, field: str = "effective_fraction") -> str:
    """Say in plain words what a table shows and where its extremes are.

    Args:
        result: the result.
        field: the quantity shown.

    Returns:
        Two or three sentences.
    """
    values = field_of(result, field)
    title = field.replace("_", " ").capitalize()
    sentences = [f"{title}: {MEANINGS.get(field, 'one number per head')}."]
    known = torch.isfinite(values)
    if bool(known.any()):
        lowest = int(values.masked_fill(~known, torch.inf).argmin())
        highest = int(values.masked_fill(~known, -torch.inf).argmax())
        low, high = _place(result, values, lowest), _place(result, values, highest)
        sentences.append(f"Mean {cell(values[known].mean().item())}, lowest {low}, highest {high}.")
    if field == "effective_fraction" and bool((result.nullity == 0).all()):
        sentences.append(
            "No example was longer than the values' rank, so every head's attention is "
            "effective as it is."
        )
    return " ".join(sentences)


def _labels(result: HeadStatisticsResult) -> list[str]:
    several = len({stack for stack, _ in result.layers}) > 1
    return [f"{stack} {layer}" if several else str(layer) for stack, layer in result.layers]


def _place(result: HeadStatisticsResult, values: Tensor, index: int) -> str:
    row, head = divmod(index, values.shape[1])
    return f"{cell(values[row, head].item())} (layer {_labels(result)[row]}, head {head})"


def _range_of(values: Tensor, field: str) -> tuple[float, float]:
    if field in _RANGES:
        return _RANGES[field]
    known = values[torch.isfinite(values)]
    return (known.min().item(), known.max().item()) if known.numel() else (0.0, 1.0)


def _title(field: str, low: float, high: float) -> Text:
    """The field's name and its colour scale from low to high."""
    title = Text(f"{field.replace('_', ' ')}, layer × head  ", style="bold")
    title.append(f"{cell(low)} ", style="not bold")
    for step in range(5):
        title.append("   ", style=_style(step / 4))
    title.append(f" {cell(high)}", style="not bold")
    return title


def _block(values: Tensor, labels: list[str], heads: range, low: float, high: float) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, header_style="dim")
    table.add_column("layer", justify="right", no_wrap=True)
    for head in heads:
        table.add_column(str(head), justify="right", no_wrap=True)
    span = high - low
    for label, row in zip(labels, values[:, heads.start : heads.stop].tolist(), strict=True):
        texts = [Text(cell(value), _style((value - low) / span if span else 1.0)) for value in row]
        table.add_row(label, *texts)
    return table


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
