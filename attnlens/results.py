"""What every result can do: show itself as text and in a notebook, and become numpy or pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from html import escape
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from attnlens.errors import InputError

LayerKey = tuple[str, int]
"""Stack and layer."""

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


class LayeredResult:
    """A frozen dataclass with a row per layer in its tensors."""

    layers: tuple[LayerKey, ...]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    # Tensors whose second axis is neither heads nor labels.
    _other: ClassVar[frozenset[str]] = frozenset()

    # The quantity that says most, shown in a notebook.
    _shown: ClassVar[str]

    def _repr_html_(self) -> str:
        values = getattr(self, self._shown)
        labels = getattr(self, "labels", None) if values.dim() == 2 else [""]
        rows = values.reshape(len(self.layers), -1)
        return heads_html(self._shown.replace("_", " "), self.layers, rows, labels)

    def tensors(self) -> dict[str, Tensor]:
        """Return every quantity by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return every quantity by name, as arrays that share memory with the tensors."""
        return {name: tensor.numpy() for name, tensor in self.tensors().items()}

    def to_pandas(self) -> Any:
        """Return a table with a row for each layer and head, or layer and label; needs pandas.

        Returns:
            The `pandas.DataFrame`, indexed by stack, layer and head (or label). Quantities of
            more than one number per row have a column for each, as in `distance[0]`.
        """
        labels = getattr(self, "labels", None)
        columns: dict[str, np.ndarray] = {}
        rows = 0
        for name, array in self.to_numpy().items():
            if name in self._other:
                continue
            rows = array.shape[1]
            flat = array.reshape(array.shape[0] * rows, -1)
            names = [name] if array.ndim == 2 else [f"{name}[{i}]" for i in range(flat.shape[1])]
            columns |= dict(zip(names, flat.T, strict=True))
        index = [(*layer, row) for layer in self.layers for row in (labels or range(rows))]
        return data_frame(index, ("stack", "layer", "label" if labels else "head"), columns)


def data_frame(
    index: Sequence[tuple[object, ...]], names: Sequence[str], columns: Mapping[str, np.ndarray]
) -> Any:
    """Build a `pandas.DataFrame`.

    Args:
        index: of each row.
        names: of the levels of the index.
        columns: by name.

    Returns:
        The table.
    """
    import pandas

    return pandas.DataFrame(dict(columns), pandas.MultiIndex.from_tuples(index, names=names))


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


def row_labels(result: LayeredResult, prefix: str = "layer ") -> list[str]:
    """Name each row: the layer index, with the stack where there are several.

    Args:
        result: the result.
        prefix: what stands before an index alone.

    Returns:
        One label per row.
    """
    several = len({stack for stack, _ in result.layers}) > 1
    return [f"{stack} {layer}" if several else f"{prefix}{layer}" for stack, layer in result.layers]


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
