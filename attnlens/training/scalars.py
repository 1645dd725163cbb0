"""Results as named scalars, for the reporters of a training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from torch import Tensor

from attnlens.errors import InputError
from attnlens.results import LayeredResult

Keep = Literal["all", "summary"] | Sequence[tuple[int, int]]

_COUNTS = ("examples", "skipped")


class Choice:
    """Which numbers become scalars.

    Args:
        keep: `"all"` heads and the layer means, `"summary"` for the means alone, or the means
            and some heads as `(layer, head)`.
        quantities: names of fields of the observers' results, `[L, H]`; None takes those that say
            most of each result.

    Raises:
        InputError: if `keep` is none of the forms above.
    """

    def __init__(self, keep: Keep = "summary", quantities: Iterable[str] | None = None) -> None:
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

    def names_heads(self, layer: int, head: int) -> bool:
        """Tell whether a head has a scalar of its own."""
        return self.keep == "all" or (self.keep != "summary" and (layer, head) in self.keep)

    def quantities_of(self, result: LayeredResult) -> dict[str, Tensor]:
        """Return the chosen quantities of a result, `[L, H]` or `[L, 1]` each, by name."""
        plain = tuple(result.axes) in (("layer", "head"), ("layer",))
        names = self.quantities or (result.shown if plain else ())
        tensors = _matrices(result)
        return {name: tensors[name] for name in names if name in tensors}

    def check(self, results: Sequence[LayeredResult]) -> None:
        """Refuse a wanted quantity that is in no result.

        Args:
            results: one of each observer.

        Raises:
            InputError: naming the quantity and those there are.
        """
        names = {name for result in results for name in _matrices(result)}
        unknown = sorted(set(self.quantities or ()) - names)
        if results and unknown:
            raise InputError(f"No quantity {unknown[0]!r}. There are: {', '.join(sorted(names))}.")


def named_scalars(results: Sequence[LayeredResult], choice: Choice) -> dict[str, float]:
    """Name the numbers of results; missing ones (NaN) have no entry.

    Args:
        results: of observers.
        choice: which numbers.

    Returns:
        `attnlens/<quantity>/layer_03/head_07`, `attnlens/<quantity>/layer_03/mean`, and for each
        kind of result `attnlens/<kind>/examples` and `/skipped`, the largest of any head. The
        stack comes before the layer where there are several.
    """
    choice.check(results)
    scalars: dict[str, float] = {}
    for result in results:
        kind = type(result).__name__.removesuffix("Result")
        tensors = result.tensors()
        for name in filter(tensors.__contains__, _COUNTS):
            scalars[f"attnlens/{kind}/{name}"] = tensors[name].nan_to_num().max().item()
        for name, layer, label, heads in layer_values(result, choice):
            scalars[f"attnlens/{name}/{label}/mean"] = heads.nanmean().item()
            for head, value in enumerate(heads.tolist()):
                if "head" in result.axes and choice.names_heads(layer, head):
                    scalars[f"attnlens/{name}/{label}/head_{head:02d}"] = value
    return {name: value for name, value in scalars.items() if not math.isnan(value)}


def layer_values(result: LayeredResult, choice: Choice) -> Iterator[tuple[str, int, str, Tensor]]:
    """Visit the layers of a result, quantity by quantity.

    Args:
        result: of an observer.
        choice: which quantities.

    Yields:
        Quantity, layer, the layer's label, and `[H]`.
    """
    several = len({stack for stack, _ in result.layers}) > 1
    for name, values in choice.quantities_of(result).items():
        for (stack, layer), heads in zip(result.layers, values, strict=True):
            prefix = f"{re.sub(r'[.]?[*]', '', stack)}/" if several else ""
            yield name, layer, f"{prefix}layer_{layer:02d}", heads


def _matrices(result: LayeredResult) -> dict[str, Tensor]:
    """Quantities of every head, or of every layer as if it had one."""
    tensors = {n: t for n, t in result.tensors().items() if n not in result.apart}
    if tuple(result.axes) == ("layer",):
        return {name: tensor[:, None] for name, tensor in tensors.items() if tensor.dim() == 1}
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}
