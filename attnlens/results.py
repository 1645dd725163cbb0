"""What every result can do: show itself, become arrays, a table or plain values, and be saved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from attnlens.errors import InputError
from attnlens.saving import save

__all__ = ["LayerKey", "LayeredResult", "Result"]

LayerKey = tuple[str, int]
"""Stack and layer."""

_WIDTH = 100  # characters of a result that is shown on one line


class Result:
    """The base of everything that observers and functions return: a frozen dataclass.

    Subclasses are decorated with `@dataclass(frozen=True, repr=False)`.

    Attributes:
        meanings: what a quantity says, in plain words, by the name of its field.
        axes: the leading axes that the quantities share, one row of the table for each place on
            them; by name, with the field that holds the labels along the axis, or an empty string
            where they are numbered.
        ends: fields that hold the labels along the last axis of quantities with one more axis.
        apart: fields with other axes, which are no part of the table.
    """

    meanings: ClassVar[Mapping[str, str]] = {}
    axes: ClassVar[Mapping[str, str]] = {}
    ends: ClassVar[Mapping[str, str]] = {}
    apart: ClassVar[frozenset[str]] = frozenset()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __repr__(self) -> str:
        facts = [f"{name}={fact}" for name, fact in self._facts()]
        name = type(self).__name__
        line = f"{name}({', '.join(facts)})"
        return line if len(line) <= _WIDTH else f"{name}(\n    " + ",\n    ".join(facts) + ",\n)"

    def _repr_html_(self) -> str:
        return facts_html(type(self).__name__, self._facts())

    def tensors(self) -> dict[str, Tensor]:
        """Return every quantity by name; those that come as a tuple are `name[0]` and so on."""
        tensors = {}
        for name, value in self._values().items():
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, tuple):
                parts = ((place, part) for place, part in enumerate(value))
                tensors |= {f"{name}[{i}]": part for i, part in parts if isinstance(part, Tensor)}
        return tensors

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return every quantity by name, as arrays that share memory with tensors on the CPU."""
        return {name: tensor.cpu().numpy() for name, tensor in self.tensors().items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, ready for JSON; NaN and infinity are None."""
        return plain({
            name: [dict(zip(("stack", "layer"), key, strict=True)) for key in value]
            if _are_layers(value)
            else value
            for name, value in self._values().items()
        })

    def to_pandas(self) -> Any:
        """Return a table with a row for each place on the axes of the result; needs pandas.

        Returns:
            The `pandas.DataFrame`, indexed by the axes, such as stack, layer and head. Quantities
            with one more axis have a column for each place on it, as in `distance[0]`, after the
            others. Those with still more, such as whole matrices, are left out.
        """
        import pandas

        count = len(self.axes)
        arrays = {name: a for name, a in self.to_numpy().items() if name not in self.apart}
        sizes = next(array.shape[:count] for array in arrays.values() if array.ndim >= count)
        columns: dict[str, np.ndarray] = {}
        for name, array in sorted(arrays.items(), key=lambda item: item[1].ndim > count):
            aligned = array.reshape(array.shape + (1,) * (count - array.ndim))
            spread = np.broadcast_to(aligned, sizes + aligned.shape[count:])
            flat = spread.reshape(math.prod(sizes), -1)
            if array.ndim <= count:
                columns[name] = flat[:, 0]
            elif array.ndim == count + 1:
                ends = getattr(self, self.ends[name]) if name in self.ends else range(flat.shape[1])
                columns |= {f"{name}[{end}]": c for end, c in zip(ends, flat.T, strict=True)}
        levels = self._index(sizes)
        index = pandas.MultiIndex.from_arrays(list(levels.values()), names=list(levels))
        return pandas.DataFrame(columns, index)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: str = "",
        settings: Mapping[str, Any] | None = None,
        tokens: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Write this to a safetensors file, which :func:`attnlens.load` reads.

        Args:
            path: where to; the folder must exist.
            model: name of the model, for the record.
            settings: anything JSON can hold, for the record.
            tokens: tokens of each example, for the record.
        """
        save(self, path, model=model, settings=settings, tokens=tokens)

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _facts(self) -> list[tuple[str, str]]:
        """Every field in few characters: shapes and ranges instead of numbers."""
        return [(name, _brief(value)) for name, value in self._values().items()]

    def _index(self, sizes: Sequence[int]) -> dict[str, np.ndarray]:
        """The labels of each row of the table, by the name of the level."""
        levels: dict[str, np.ndarray] = {}
        places = np.indices(sizes).reshape(len(sizes), -1)
        for (axis, field), size, along in zip(self.axes.items(), sizes, places, strict=True):
            labels: list[Any] = list(getattr(self, field) if field else range(size))
            if isinstance(labels[0], tuple):
                levels["stack"] = np.array([stack for stack, _ in labels])[along]
                labels = [layer for _, layer in labels]
            levels[axis] = np.array(labels)[along]
        return levels


class LayeredResult(Result):
    """A result whose quantities have a row for each layer.

    Attributes:
        layers: `(stack, layer)` of each row.
        shown: the quantities that say most, the first of which a notebook shows.
    """

    layers: tuple[LayerKey, ...]

    meanings: ClassVar[Mapping[str, str]] = {
        "examples": "how many examples counted",
        "skipped": "how many examples held NaN or Inf and were left out",
    }
    axes: ClassVar[Mapping[str, str]] = {"layer": "layers", "head": ""}
    shown: ClassVar[tuple[str, ...]]

    def _repr_html_(self) -> str:
        title = self.shown[0].replace("_", " ")
        values = getattr(self, self.shown[0])
        if values.dim() == 1:
            return heads_html(title, self.layers, values[:, None], [""])
        labels = getattr(self, "labels", ())
        if "head" not in self.axes:
            return heads_html(title, self.layers, values, labels)
        if values.dim() == 2:
            return heads_html(title, self.layers, values)
        grids = zip(labels, values.unbind(-1), strict=True)
        return "".join(heads_html(f"{title}: {label}", self.layers, grid) for label, grid in grids)

    def field(self, name: str) -> Tensor:
        """Return one quantity.

        Args:
            name: of its field.

        Returns:
            `[L, ...]`.

        Raises:
            InputError: if there is no such quantity, listing those there are.
        """
        tensors = self.tensors()
        if name not in tensors:
            raise InputError(f"No field {name!r}. There are: {', '.join(sorted(tensors))}.")
        return tensors[name]

    def row_labels(self, prefix: str = "layer ") -> list[str]:
        """Name each row: the layer index, with the stack where there are several.

        Args:
            prefix: what stands before an index alone.

        Returns:
            One label per row.
        """
        return _row_labels(self.layers, prefix)

    def table(self, name: str) -> Text:
        """Lay one quantity out as a layer × head table.

        Args:
            name: of its field, `[L, H]`.

        Returns:
            The table with a title line.
        """
        values = self.field(name)
        labels = self.row_labels()
        header = [f"head {head}" for head in range(values.shape[1])]
        cells = [[cell(value) for value in row] for row in values.tolist()]
        width = max(len(text) for row in [header, *cells] for text in row)
        left = max(map(len, labels))
        lines = [name.replace("_", " ")]
        for label, row in zip(["", *labels], [header, *cells], strict=True):
            lines.append(f"{label:<{left}}" + "".join(f"  {text:>{width}}" for text in row))
        return Text("\n".join(lines))


class Text(str):
    """Text that displays as itself in a console, instead of quoted."""

    def __repr__(self) -> str:
        return str(self)


def cell(value: float) -> str:
    """Format one number of a table; a missing one is a dash."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"


def plain(document: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a document into what JSON can hold.

    Args:
        document: tensors, numbers, text, results and other dataclasses, or mappings and sequences
            of these, by name.

    Returns:
        The same with lists for tensors, and None for numbers that are not finite.
    """
    return {name: _plain(entry) for name, entry in document.items()}


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
    title: str, layers: Sequence[LayerKey], values: Tensor, columns: Sequence[str] = ()
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
    finite = values[values.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    names = columns or [f"head {head}" for head in range(values.shape[1])]
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = [
        f"<tr><th>{escape(label)}</th>{_shaded(row, low, (high - low) or 1.0)}</tr>"
        for label, row in zip(_row_labels(layers), values.tolist(), strict=True)
    ]
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f"<table>{_caption(title)}{head}<tbody>{''.join(rows)}</tbody></table>"


def _caption(title: str) -> str:
    return f"<caption><b>{escape(title)}</b></caption>"


def _shaded(row: Sequence[float], low: float, span: float) -> str:
    """Cells shaded towards blue, legible on light and on dark ground."""
    cells = []
    for value in row:
        finite = math.isfinite(value)
        opacity = 0.05 + 0.5 * (value - low) / span if finite else 0.0
        text = "–" if math.isnan(value) else f"{value:.4g}"
        cells.append(f'<td style="background:rgba(64,132,214,{opacity:.2f})">{text}</td>')
    return "".join(cells)


def _row_labels(layers: Sequence[LayerKey], prefix: str = "layer ") -> list[str]:
    several = len({stack for stack, _ in layers}) > 1
    return [f"{stack} {layer}" if several else f"{prefix}{layer}" for stack, layer in layers]


def _are_layers(value: Any) -> bool:
    """Whether a field holds stacks and layers, such as `layers` does."""
    return isinstance(value, tuple) and all(
        isinstance(key, tuple) and list(map(type, key)) == [str, int] for key in value
    )


def _brief(value: Any) -> str:
    """A value in few characters."""
    if isinstance(value, Tensor):
        finite = value[value.isfinite()].double()
        span = f" {finite.min():.4g} … {finite.max():.4g}" if finite.numel() else ""
        return f"{list(value.shape)}{span}"
    if isinstance(value, Result):
        return type(value).__name__
    if isinstance(value, tuple) and value and not isinstance(value[0], (str, int, tuple)):
        return f"{len(value)} × {type(value[0]).__name__}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"{len(value)}, {value[0]!r} … {value[-1]!r}"
    return repr(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return plain(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
