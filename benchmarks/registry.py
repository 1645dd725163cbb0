"""What a benchmark case is, and the list of cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Check:
    """A result compared with its reference; no speed is printed unless every check passes.

    Attributes:
        name: what was compared with what.
        error: how far apart they are.
        bar: how far apart they may be.
    """

    name: str
    error: float
    bar: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the bar."""
        return self.error <= self.bar


@dataclass(frozen=True)
class Comparison:
    """Raw figures of two ways to do the same thing, measured in the same run.

    Attributes:
        setting: what differs between the comparisons of a case, such as `"n = 128"`.
        subject: what attnlens does.
        value: its figure.
        baseline: what it is compared with.
        baseline_value: the figure of that.
        unit: unit of both figures.
        ratio_is: `"gain"` for baseline over subject, `"cost"` for subject over baseline.
    """

    setting: str
    subject: str
    value: float
    baseline: str
    baseline_value: float
    unit: str = "s"
    ratio_is: Literal["gain", "cost"] = "gain"

    @property
    def ratio(self) -> float:
        """The gain or the cost, as a factor."""
        gain = self.baseline_value / self.value
        return gain if self.ratio_is == "gain" else 1 / gain


Step = Check | Comparison


@dataclass(frozen=True)
class Case:
    """A named benchmark.

    Attributes:
        name: what to call it on the command line.
        summary: one line on what it measures.
        steps: yields checks and comparisons; checks come before the speeds they vouch for.
        by_name: whether it runs only when it is named.
    """

    name: str
    summary: str
    steps: Callable[[], Iterator[Step]]
    by_name: bool = False


CASES: dict[str, Case] = {}


Steps = Callable[[], Iterator[Step]]


def case(name: str, *, by_name: bool = False) -> Callable[[Steps], Steps]:
    """Register a generator of steps as a case; its docstring's first line is the summary.

    Args:
        name: what to call it on the command line.
        by_name: run it only when it is named.

    Returns:
        A decorator that returns the generator function unchanged.
    """

    def register(steps: Callable[[], Iterator[Step]]) -> Callable[[], Iterator[Step]]:
        summary = (steps.__doc__ or name).strip().splitlines()[0]
        CASES[name] = Case(name, summary, steps, by_name)
        return steps

    return register


def seconds(
    *functions: Callable[[], Any],
    repeats: int = 5,
    warm_up: int = 1,
    settling: float = 0.5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Time functions in turn, so that a slow moment of the machine hits all of them.

    A short one runs several times, of which the later half counts: the threads of the library
    before it keep a core busy for a while after their work is done.

    Args:
        *functions: what to time.
        repeats: how often each is timed.
        warm_up: how often each runs before.
        settling: for how many seconds a function runs in its turn; at least once.
        clock: what to read the time off; `time.process_time` leaves out other processes.

    Returns:
        The median of each, in seconds.
    """
    for _ in range(warm_up):
        for function in functions:
            function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            taken.append(_settled_seconds(function, settling, clock))
    return [median(taken) for taken in times]


def _settled_seconds(
    function: Callable[[], Any], settling: float, clock: Callable[[], float]
) -> float:
    taken: list[float] = []
    begin = clock()
    while not taken or clock() - begin < settling:
        start = clock()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(clock() - start)
    return median(taken[len(taken) // 2 :])
