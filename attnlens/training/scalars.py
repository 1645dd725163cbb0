"""Results as named scalars, for the reporters of a training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from attnlens.errors import InputError
from attnlens.observer import Observer
from attnlens.results import LayeredResult

Keep = Literal["all", "summary"] | Sequence[tuple[int, int]]

_COUNTS = ("examples", "skipped")


@dataclass(frozen=True, eq=False)
class Row:
    """One quantity of one layer.

    Attributes:
        name: the quantity, with the label where there are several, as in `effective/noun`.
        layer: index of the layer.
        label: the layer in words, with its stack where there are several.
        values: `[H]`, or a scalar where the quantity is of the layer.
    """

    name: str
    layer: int
    label: str
    values: Tensor

    def numbers(self) -> Iterator[tuple[int | None, float]]:
        """Visit every head with its number, or the layer as None."""
        if not self.values.dim():
            yield None, self.values.item()
        else:
            yield from enumerate(self.values.tolist())

    def tag(self, head: int | None) -> str:
        """Name the number of a head, or of the layer, as in `entropy/layer_03/head_07`."""
        place = f"{self.name}/{self.label}"
        return place if head is None else f"{place}/head_{head:02d}"


class Choice:
    """Which numbers become scalars.

    Args:
        keep: `"all"` heads and the layer means, `"summary"` for the means alone, or the means
            and some heads as `(layer, head)`.
        quantities: names of fields of the observers' results; None takes those that say most of
            each result.
        observers: whose results they are of.

    Raises:
        InputError: if `keep` is none of the forms above, a quantity is in no result of the
            observers, or an observer's result has no scalars.
    """

    def __init__(
        self,
        keep: Keep = "summary",
        quantities: Iterable[str] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.keep: Keep = keep if isinstance(keep, str) else list(keep)
        self.quantities = None if quantities is None else tuple(quantities)
        valid = self.keep in ("all", "summary") or not isinstance(self.keep, str)
        pairs = () if isinstance(self.keep, str) else self.keep
        for pair in pairs:
            valid &= isinstance(pair, tuple) and [type(index) for index in pair] == [int, int]
        if not valid:
            raise InputError(
                f'keep must be "all", "summary" or a list of (layer, head). Got {keep!r}.'
            )
        require_quantities(self.quantities or (), observers)

    def names_heads(self, layer: int, head: int) -> bool:
        """Tell whether a head has a scalar of its own."""
        return self.keep == "all" or (self.keep != "summary" and (layer, head) in self.keep)

    def rows(self, result: LayeredResult) -> Iterator[Row]:
        """Visit the chosen quantities of a result, layer by layer."""
        for name in self.quantities or result.shown:
            yield from rows_of(result, name)


def require_quantities(quantities: Iterable[str], observers: Sequence[Observer]) -> None:
    """Refuse a quantity that no result of some observers has.

    Args:
        quantities: names of fields.
        observers: an annotation of their `compute` says what they return; those without one may
            return anything.

    Raises:
        InputError: naming the quantity and those there are, or the observer without scalars.
    """
    names: set[str] = set()
    for observer in observers:
        result: Any = get_type_hints(type(observer).compute).get("return", Any)
        if result is Any or not isinstance(result, type):
            return
        if not issubclass(result, LayeredResult):
            raise InputError(
                f"{type(observer).__name__} computes {result.__name__}, which has no number for "
                f"each layer that could be logged. Use it in a Lens of its own."
            )
        kinds = get_type_hints(result)
        names |= {field.name for field in fields(result) if kinds[field.name] is Tensor}
    unknown = sorted(set(quantities) - names)
    if observers and unknown:
        raise InputError(f"No quantity {unknown[0]!r}. There are: {', '.join(sorted(names))}.")


def named_scalars(results: Sequence[LayeredResult], choice: Choice) -> dict[str, float]:
    """Name the numbers of results; missing ones (NaN) have no entry.

    Args:
        results: of observers.
        choice: which numbers.

    Returns:
        `attnlens/<quantity>/layer_03/head_07`, `attnlens/<quantity>/layer_03/mean`, which
        quantities of whole layers have alone, and for each kind of result
        `attnlens/<kind>/examples` and `/skipped`, the largest of any head. The stack comes before
        the layer where there are several, the label after the quantity.
    """
    scalars: dict[str, float] = {}
    for result in results:
        kind = type(result).__name__.removesuffix("Result")
        tensors = result.tensors()
        for name in filter(tensors.__contains__, _COUNTS):
            scalars[f"attnlens/{kind}/{name}"] = tensors[name].nan_to_num().max().item()
        for row in choice.rows(result):
            scalars[f"attnlens/{row.name}/{row.label}/mean"] = row.values.nanmean().item()
            for head, value in row.numbers():
                if head is not None and choice.names_heads(row.layer, head):
                    scalars[f"attnlens/{row.tag(head)}"] = value
    return {name: value for name, value in scalars.items() if not math.isnan(value)}


def rows_of(result: LayeredResult, name: str) -> Iterator[Row]:
    """Visit a quantity layer by layer, label by label.

    Args:
        result: of an observer.
        name: of the quantity; one that is no part of the result has no rows.

    Yields:
        The rows; none of a quantity with other axes than layer, head and label.
    """
    tensor = result.tensors().get(name, torch.empty(0))
    heads = "head" in result.axes
    ends = result.ends.get(name, result.axes.get("label", ""))
    names = [name]
    if name in result.apart or not len(tensor):
        return
    if ends and tensor.dim() == 2 + heads:
        labels = getattr(result, ends)
        names = [f"{name}/{label}" for label in labels] if len(labels) > 1 else names
    elif tensor.dim() <= 1 + heads:
        tensor = tensor[..., None]
    else:
        return
    several = len({stack for stack, _ in result.layers}) > 1
    for quantity, values in zip(names, tensor.unbind(-1), strict=True):
        for (stack, layer), row in zip(result.layers, values, strict=True):
            prefix = f"{re.sub(r'[.]?[*]', '', stack)}/" if several else ""
            yield Row(quantity, layer, f"{prefix}layer_{layer:02d}", row)
