"""Results as numpy arrays and as pandas tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from attnlens.display import heads_html
from attnlens.observers.base import LayerKey


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
        return table(index, ("stack", "layer", "label" if labels else "head"), columns)


def table(
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
