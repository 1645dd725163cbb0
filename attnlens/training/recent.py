"""What observers saw lately, beside what they saw in all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from attnlens.attention.statistics import HeadStatistics
from attnlens.errors import AttnLensError, AttnLensWarning, InputError
from attnlens.observer import Observer, State, SumObserver, part_of
from attnlens.results import LayeredResult

AnyObserver = TypeVar("AnyObserver", bound=SumObserver)


class Recent:
    """Observers of the time since the last look, whose results add up to the user's observers.

    Args:
        totals: the user's observers; they receive what was seen when a look is closed.

    Attributes:
        totals: the same.
        observers: empty copies of them, which belong into a lens.
    """

    def __init__(self, totals: Sequence[SumObserver]) -> None:
        self.totals = tuple(totals)
        self.observers = tuple(map(_emptied, totals))

    @property
    def empty(self) -> bool:
        """Whether nothing was seen in this process since the last look."""
        return not any(observer.sums for observer in self.observers)

    def snapshot(self) -> Callable[[], None]:
        """Return what takes this back to what was seen up to now."""
        before = [_copied(observer).sums for observer in self.observers]

        def restore() -> None:
            for observer, sums in zip(self.observers, before, strict=True):
                observer.sums = sums

        return restore

    def close(self, *, sync: bool = False) -> list[LayeredResult]:
        """Add what was seen lately to the totals and begin anew.

        What cannot be added or has no result is left out with a warning.

        Args:
            sync: sum over all processes first; every process must then call this.

        Returns:
            The results by layer, of the observers that saw something.
        """
        copies = [_copied(observer) for observer in self.observers]
        self.drop()
        results = []
        for total, observer in zip(self.totals, copies, strict=True):
            if sync:
                observer.sync()
            try:
                total.merge(observer)
                result = observer.compute() if observer.sums else None
            except AttnLensError as error:
                warnings.warn(
                    f"{type(total).__name__} has nothing to log of the last steps: {error}",
                    AttnLensWarning,
                    stacklevel=2,
                )
                continue
            if isinstance(result, LayeredResult):
                results.append(result)
        return results

    def results(self) -> list[LayeredResult]:
        """Return the results by layer of the totals that saw something."""
        results = [observer.compute() for observer in self.totals if observer.sums]
        return [result for result in results if isinstance(result, LayeredResult)]

    def forget(self) -> None:
        """Forget everything, the totals too."""
        self.drop()
        for total in self.totals:
            total.reset()

    def drop(self) -> None:
        """Forget what was seen since the last look, such as the steps of an aborted training."""
        for observer in self.observers:
            observer.reset()

    def state(self, *, sync: bool = False) -> State:
        """Return totals and recent sums as named tensors.

        Args:
            sync: sum the recent ones over all processes; every process must then call this.

        Returns:
            The state, for :meth:`restore`.
        """
        copies = [_copied(observer) for observer in self.observers]
        if sync:
            for observer in copies:
                observer.sync()
        return {
            f"{part}/{index}/{name}": tensor.clone()
            for part, observers in (("total", self.totals), ("recent", copies))
            for index, observer in enumerate(observers)
            for name, tensor in observer.state_dict().items()
        }

    def restore(self, state: Mapping[str, Tensor], *, recent: bool = True) -> None:
        """Take up a state.

        Args:
            state: from :meth:`state`.
            recent: also what was seen since the last look; True in one process only.
        """
        for part, observers in (("total", self.totals), ("recent", self.observers)):
            for index, observer in enumerate(observers):
                taken = recent or part == "total"
                observer.load_state_dict(part_of(state, f"{part}/{index}/") if taken else {})


def checked_observers(observers: Iterable[Observer]) -> tuple[SumObserver, ...]:
    """Refuse observers that have no scalars.

    Args:
        observers: what a user gave; `HeadStatistics` if nothing.

    Returns:
        The observers.

    Raises:
        InputError: if one keeps anything but sums, such as maps or sequences.
    """
    checked: list[SumObserver] = []
    for observer in tuple(observers) or (HeadStatistics(),):
        # One that saves more than its sums keeps what a copy would share with it.
        own_state = getattr(type(observer), "state_dict", None) is not SumObserver.state_dict
        if not isinstance(observer, SumObserver) or own_state or observer.unsaved:
            raise InputError(
                f"Only observers whose state is sums, such as HeadStatistics(), can be followed "
                f"through a training. Got {observer!r}; use it in a Lens of its own."
            )
        checked.append(observer)
    return tuple(checked)


def forward_only(observers: Iterable[AnyObserver]) -> tuple[AnyObserver, ...]:
    """Return empty copies of the observers that need no backward pass."""
    return tuple(_emptied(observer) for observer in observers if not observer.needs_backward)


def _copied(observer: AnyObserver) -> AnyObserver:
    """A copy with the same settings and sums, neither of which it changes in place."""
    twin = copy.copy(observer)
    twin.sums = {layer: dict(sums) for layer, sums in observer.sums.items()}
    return twin


def _emptied(observer: AnyObserver) -> AnyObserver:
    twin = copy.copy(observer)
    twin.reset()
    return twin
