"""`monitor`: follow heads through a training loop of one's own, or one with accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from attnlens.capture import Kind
from attnlens.lens import Lens
from attnlens.observer import Observer
from attnlens.tap.forwards import Mode
from attnlens.training.recent import Recent, checked_observers
from attnlens.training.scalars import Choice, Keep, named_scalars


class Monitor:
    """A lens over a whole training loop, read from time to time as named scalars.

    See :func:`monitor`, which makes one.

    Attributes:
        observers: what the whole loop showed; complete once the `with` block has ended.
    """

    def __init__(self, lens: Lens, recent: Recent, choice: Choice) -> None:
        self.observers = recent.totals
        self._lens = lens
        self._recent = recent
        self._choice = choice

    def __enter__(self) -> Monitor:
        self._lens.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._lens.__exit__(*raised)
        if raised[0] is None and not self._recent.empty:
            self._recent.close()

    def scalars(self, *, sync: bool = False) -> dict[str, float]:
        """Return what was seen since the last call, and begin anew.

        Args:
            sync: take all processes of a distributed run together; every process must then call
                this. Otherwise a process tells what it saw itself.

        Returns:
            Finite numbers by name, such as `attnlens/entropy/layer_03/head_07`; empty if nothing
            was seen since.
        """
        return named_scalars(self._recent.close(sync=sync), self._choice)


def monitor(
    model: nn.Module,
    *observers: Observer,
    every: int = 50,
    on: Mode = "train",
    keep: Keep = "summary",
    quantities: Iterable[str] | None = None,
    layers: Iterable[int | str] | None = None,
    kinds: Iterable[Kind] | Kind | None = None,
) -> Monitor:
    """Follow the heads of a model through a training loop.

    with monitor(model, every=50) as heads:
        for batch in loader:
            model(**batch).loss.backward()
            ...
            log(heads.scalars())

    Args:
        model: the model that is called, as it is or as accelerate prepared it.
        *observers: observers of sums, such as `HeadStatistics()`, the default, and
            `HeadImportance()`, whose backward pass must run inside the block.
        every: look at each N-th forward pass, beginning with the first.
        on: forward passes to look at and to count: those of the model in `"train"` mode, in
            `"eval"` mode, or `"both"`.
        keep: `"summary"` for the mean of every layer, `"all"` for every head too, or a list of
            `(layer, head)`.
        quantities: fields of the observers' results to return; the usual ones by default.
        layers: layers to look at, see :class:`~attnlens.Lens`.
        kinds: kinds of attention to look at, see :class:`~attnlens.Lens`.

    Returns:
        A context manager with `scalars()`.

    Examples:
        >>> with monitor(model, HeadStatistics(), every=1, on="eval") as heads:
        ...     output = model(**batch)
        ...     scalars = heads.scalars()
        >>> "attnlens/effective_fraction/layer_00/mean" in scalars
        True
    """
    recent = Recent(checked_observers(observers))
    lens = Lens(model, *recent.observers, layers=layers, every=every, kinds=kinds, on=on)
    return Monitor(lens, recent, Choice(keep, quantities))
