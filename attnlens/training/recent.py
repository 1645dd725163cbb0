"""What observers saw lately, beside what they saw in all, and either as named scalars."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from attnlens.attention.statistics import HeadStatistics
from attnlens.errors import InputError
from attnlens.observer import GradientObserver, Observer, SumObserver

Keep = Literal["all", "summary"] | Sequence[tuple[int, int]]
State = dict[str, Tensor]
AnyObserver = TypeVar("AnyObserver", bound=SumObserver)

QUANTITIES = ("effective_fraction", "effective_norm", "entropy", "output_norm", "importance")
_COUNTS = ("examples", "skipped")


@dataclass(frozen=True)
class Choice:
    """Which numbers become scalars.

    Attributes:
        keep: `"all"` heads and the layer means, `"summary"` for the means alone, or the means
            and some heads as `(layer, head)`.
        quantities: names of fields of the observers' results.
    """

    keep: Keep = "summary"
    quantities: tuple[str, ...] | None = None

    @classmethod
    def of(cls, keep: Keep, quantities: Iterable[str] | None) -> Choice:
        """Check what a user asks for.

        Args:
            keep: see above.
            quantities: see above; None takes the usual ones that there are.

        Returns:
            The choice.

        Raises:
            InputError: if `keep` is none of the forms above.
        """
        if isinstance(keep, str):
            valid = keep in ("all", "summary")
        else:
            keep = list(keep)
            valid = all(
                isinstance(head, tuple) and [type(index) for index in head] == [int, int]
                for head in keep
            )
        if not valid:
            raise InputError(
                f'keep must be "all", "summary" or a list of (layer, head). Got {keep!r}.'
            )
        return cls(keep, None if quantities is None else tuple(quantities))

    def names_heads(self, layer: int, head: int) -> bool:
        """Tell whether a head has a scalar of its own."""
        return self.keep == "all" or (self.keep != "summary" and (layer, head) in self.keep)

    def check(self, results: Sequence[Any]) -> None:
        """Raise where a wanted quantity is in no result.

        Args:
            results: one of each observer.

        Raises:
            InputError: naming the quantity and those there are.
        """
        known = {name for result in results for name in result.tensors()}
        unknown = sorted(set(self.quantities or ()) - known)
        if results and unknown:
            raise InputError(f"No quantity {unknown[0]!r}. There are: {', '.join(sorted(known))}.")


def named_scalars(results: Sequence[Any], choice: Choice) -> dict[str, float]:
    """Name the numbers of results; missing ones (NaN) have no entry.

    Args:
        results: with `layers` and `tensors()` of `[L, H]`.
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
        for name in _COUNTS:
            if name in result.tensors():
                scalars[f"attnlens/{kind}/{name}"] = (
                    result.tensors()[name].nan_to_num().max().item()
                )
        for name, layer, label, heads in layer_values(result, choice):
            scalars[f"attnlens/{name}/{label}/mean"] = heads.nanmean().item()
            for head, value in enumerate(heads.tolist()):
                if choice.names_heads(layer, head):
                    scalars[f"attnlens/{name}/{label}/head_{head:02d}"] = value
    return {name: value for name, value in scalars.items() if value == value}


def layer_values(result: Any, choice: Choice) -> Iterator[tuple[str, int, str, Tensor]]:
    """Visit the layers of a result, quantity by quantity.

    Args:
        result: with `layers` and `tensors()`.
        choice: which quantities.

    Yields:
        Quantity, layer, the layer's label, and `[H]`.
    """
    tensors = result.tensors()
    several = len({stack for stack, _ in result.layers}) > 1
    for name in choice.quantities or QUANTITIES:
        if name in tensors:
            for (stack, layer), heads in zip(result.layers, tensors[name], strict=True):
                prefix = f"{re.sub(r'[.]?[*]', '', stack)}/" if several else ""
                yield name, layer, f"{prefix}layer_{layer:02d}", heads


class Window:
    """Observers of the time since the last look, whose results add up to the user's observers.

    Args:
        totals: the user's observers; they receive what a window saw when it is closed.

    Attributes:
        totals: the same.
        recent: empty copies of them, which belong into a lens.
    """

    def __init__(self, totals: Sequence[SumObserver]) -> None:
        self.totals = tuple(totals)
        self.recent = tuple(_emptied(observer) for observer in totals)

    @property
    def empty(self) -> bool:
        """Whether nothing was seen in this process since the last look."""
        return not any(observer.sums for observer in self.recent)

    def close(self, *, sync: bool = False) -> list[Any]:
        """Add what was seen lately to the totals and begin anew.

        Args:
            sync: sum over all processes first; every process must then call this.

        Returns:
            The results that hold numbers of heads, of the observers that saw something.
        """
        seen = [_copied(observer) for observer in self.recent]
        self.drop()
        for total, observer in zip(self.totals, seen, strict=True):
            if sync:
                observer.sync()
            total.merge(observer)
        results = [observer.compute() for observer in seen if observer.sums]
        return [result for result in results if hasattr(result, "tensors")]

    def drop(self) -> None:
        """Forget what was seen since the last look, such as the steps of an aborted training."""
        for observer in self.recent:
            observer.reset()

    def state(self, *, sync: bool = False) -> State:
        """Return totals and recent sums as named tensors.

        Args:
            sync: sum the recent ones over all processes; every process must then call this.

        Returns:
            The state, for :meth:`restore`.
        """
        state: State = {}
        for index, (total, recent) in enumerate(zip(self.totals, self.recent, strict=True)):
            seen = _copied(recent)
            if sync:
                seen.sync()
            for part, observer in (("total", total), ("recent", seen)):
                tensors = observer.state_dict().items()
                state |= {f"{part}/{index}/{name}": t.clone() for name, t in tensors}
        return state

    def restore(self, state: State, *, recent: bool = True) -> None:
        """Take up a state.

        Args:
            state: from :meth:`state`.
            recent: also what was seen since the last look; True in one process only.
        """
        for part, observers in (("total", self.totals), ("recent", self.recent)):
            for index, observer in enumerate(observers):
                prefix = f"{part}/{index}/"
                own = {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
                observer.load_state_dict(own if recent or part == "total" else {})


def checked_observers(observers: Iterable[Observer]) -> tuple[SumObserver, ...]:
    """Refuse observers that have no scalars.

    Args:
        observers: what a user gave; `HeadStatistics` if nothing.

    Returns:
        The observers.

    Raises:
        InputError: if one keeps maps or captures instead of sums.
    """
    chosen = tuple(observers) or (HeadStatistics(),)
    for observer in chosen:
        if not isinstance(observer, SumObserver):
            raise InputError(
                f"Only observers whose state is sums, such as HeadStatistics(), can be followed "
                f"through a training. Got {observer!r}; use it in a Lens of its own."
            )
    return chosen  # type: ignore[return-value]


def forward_only(observers: Iterable[AnyObserver]) -> tuple[AnyObserver, ...]:
    """Empty copies of the observers that need no backward pass."""
    return tuple(_emptied(o) for o in observers if not isinstance(o, GradientObserver))


def _copied(observer: AnyObserver) -> AnyObserver:
    """A copy with the same settings and sums, neither of which it changes in place."""
    twin = copy.copy(observer)
    twin.sums = {layer: dict(sums) for layer, sums in observer.sums.items()}
    return twin


def _emptied(observer: AnyObserver) -> AnyObserver:
    twin = copy.copy(observer)
    twin.reset()
    return twin
