"""Small HTML tables for notebooks: every string is escaped and nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from torch import Tensor


def facts_html(title: str, facts: Iterable[tuple[str, object]]) -> str:
    """Lay out a title and named facts.

    Args:
        title: plain text.
        facts: names and what to say of each.

    Returns:
        An HTML table.
    """
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(str(fact))}</td></tr>'
        for name, fact in facts
    )
    return f"<table>{_caption(title)}<tbody>{rows}</tbody></table>"


def heads_html(
    title: str,
    layers: Sequence[tuple[str, int]],
    values: Tensor,
    columns: Sequence[str] | None = None,
) -> str:
    """Lay numbers out as a layer × head table, or with other columns, shaded by value.

    Args:
        title: plain text.
        layers: stack and layer of each row.
        values: `[L, H]`; NaN where a layer has no such head.
        columns: H names, by default those of heads.

    Returns:
        An HTML table; every cell holds its number.
    """
    known = values[values.isfinite()]
    low, high = (known.min().item(), known.max().item()) if known.numel() else (0.0, 1.0)
    several = len({stack for stack, _ in layers}) > 1
    labels = [f"{stack} {layer}" if several else f"layer {layer}" for stack, layer in layers]
    names = columns or [f"head {head}" for head in range(values.shape[1])]
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = [
        f"<tr><th>{escape(label)}</th>{_shaded(row, low, (high - low) or 1.0)}</tr>"
        for label, row in zip(labels, values.tolist(), strict=True)
    ]
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f"<table>{_caption(title)}{head}<tbody>{''.join(rows)}</tbody></table>"


def _caption(title: str) -> str:
    return f"<caption><b>{escape(title)}</b></caption>"


def _shaded(row: Sequence[float], low: float, span: float) -> str:
    """Cells shaded towards blue, legible on light and on dark ground."""
    cells = []
    for value in row:
        missing = value != value
        opacity = 0.0 if missing else 0.05 + 0.5 * (value - low) / span
        text = "–" if missing else f"{value:.4g}"
        cells.append(f'<td style="background:rgba(64,132,214,{opacity:.2f})">{text}</td>')
    return "".join(cells)
