"""Alarms: rules on what is seen of heads and layers during a training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlens.errors import AttnLensWarning, InputError
from attnlens.observer import Observer
from attnlens.results import LayeredResult
from attnlens.training.scalars import require_quantities, rows_of

Moment = tuple[float, float]
"""Optimisation steps and epochs since the start of the training."""


@dataclass(frozen=True)
class Alarm:
    """A rule on a quantity, which every head, or every layer that has no heads, can break.

    A head breaks it where its value was at or beyond the bound in every log of a while. It is
    warned of once, with its layer, and logged as `attnlens/alarm/<quantity>/layer_03/head_07`.

    Args:
        quantity: a field of the result of an observer, such as `"entropy"` or `"importance"`.
        above: the rule is broken at this value or above it.
        below: the rule is broken at this value or below it.
        for_steps: for how many optimisation steps.
        for_epochs: for how many epochs.
        stop: end the training where the rule is broken.

    Raises:
        InputError: if there is no bound, or two, or the while is not positive.

    Example:
        >>> Alarm("importance", below=0.0, for_epochs=1)
        Alarm('importance', at or below 0, for 1 epochs)
        >>> Alarm("entropy", below=0.05, for_steps=200, stop=True)
        Alarm('entropy', at or below 0.05, for 200 steps, stops)

    References:
        Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
        ICML 2023.
    """

    quantity: str
    above: float | None = field(default=None, kw_only=True)
    below: float | None = field(default=None, kw_only=True)
    for_steps: float = field(default=0, kw_only=True)
    for_epochs: float = field(default=0, kw_only=True)
    stop: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        bounds = [bound for bound in (self.above, self.below) if bound is not None]
        if len(bounds) != 1 or math.isnan(bounds[0]):
            raise InputError(
                f"An alarm has one bound: pass above= or below=. Got above={self.above!r}, "
                f"below={self.below!r}."
            )
        if self.for_steps < 0 or self.for_epochs < 0:
            raise InputError(
                f"An alarm waits for steps or epochs, none or more. Got for_steps="
                f"{self.for_steps!r}, for_epochs={self.for_epochs!r}."
            )

    def __repr__(self) -> str:
        waits = [(self.for_steps, "steps"), (self.for_epochs, "epochs")]
        facts = [repr(self.quantity), self.rule]
        facts += [f"for {count:g} {unit}" for count, unit in waits if count]
        return f"Alarm({', '.join(facts + ['stops'] * self.stop)})"

    @property
    def rule(self) -> str:
        """The bound in words."""
        return (
            f"at or above {self.above:g}" if self.below is None else f"at or below {self.below:g}"
        )

    def is_broken(self, value: float) -> bool:
        """Tell whether a value is beyond the bound."""
        if self.above is not None:
            return value >= self.above
        return self.below is not None and value <= self.below


class AlarmBell:
    """Follows the values that alarms are about from log to log.

    Args:
        alarms: the rules.

    Attributes:
        rung: what was warned of, by the name under which it is logged.
        stops: whether the training is to end.
    """

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        self.alarms = tuple(alarms)
        for alarm in self.alarms:
            if not isinstance(alarm, Alarm):
                raise InputError(f"alarms are instances of Alarm. Got {alarm!r}.")
        self.reset()

    def require_known(self, observers: Sequence[Observer]) -> None:
        """Refuse alarms about what no result of some observers has."""
        require_quantities([alarm.quantity for alarm in self.alarms], observers)

    def reset(self) -> None:
        """Begin a training."""
        self.rung: dict[str, float] = {}
        self.stops = False
        self._last: Moment = (0.0, 0.0)
        self._since: dict[str, Moment] = {}  # when the value went beyond the bound

    def state(self) -> dict[str, Any]:
        """Return what was followed as plain values."""
        return {"rung": self.rung, "last": self._last, "since": self._since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` returned; a training that was stopped may go on.

        Args:
            state: the plain values.
        """
        self.rung, self.stops = dict(state["rung"]), False
        self._last = tuple(state["last"])
        self._since = {name: tuple(moment) for name, moment in state["since"].items()}

    def hear(self, results: Sequence[LayeredResult], now: Moment) -> dict[str, float]:
        """Look at the results of the time since the last call.

        Args:
            results: of observers.
            now: the end of that time.

        Returns:
            The values that broke a rule for the first time, by name.
        """
        fresh: dict[str, float] = {}
        for place, alarm in enumerate(self.alarms):
            for result in results:
                for row in rows_of(result, alarm.quantity):
                    for head, value in row.numbers():
                        key = f"{place}/{row.tag(head)}"
                        if self._breaks(alarm, key, value, now) and key not in self.rung:
                            self.rung[key] = value
                            fresh[f"attnlens/alarm/{row.tag(head)}"] = value
                            self.stops |= alarm.stop
                            _warn(alarm, row.tag(head), value, self._since[key], now)
        self._last = now
        return fresh

    def _breaks(self, alarm: Alarm, key: str, value: float, now: Moment) -> bool:
        """Whether a value is beyond its bound for long enough; NaN says nothing."""
        if math.isnan(value):
            return False
        if not alarm.is_broken(value):
            self._since.pop(key, None)
            return False
        steps, epochs = self._since.setdefault(key, self._last)
        # Epochs are quotients of steps: rounding must not make an epoch end a step late.
        return now[0] - steps >= alarm.for_steps and now[1] - epochs >= alarm.for_epochs - 1e-6


def _warn(alarm: Alarm, tag: str, value: float, since: Moment, now: Moment) -> None:
    place = tag.removeprefix(f"{alarm.quantity}/").replace("_", " ").replace("/", ", ")
    warnings.warn(
        f"{alarm.quantity} of {place} is {value:.4g}, {alarm.rule} since step {since[0]:g} "
        f"(now step {now[0]:g}).",
        AttnLensWarning,
        stacklevel=3,
    )
