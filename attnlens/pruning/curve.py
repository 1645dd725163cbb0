"""What came of masking more and more heads: a table, areas, a plot, and the plans."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnlens.errors import InputError
from attnlens.pruning.plan import Plan
from attnlens.results import Result, Text
from attnlens.saving import storable


@storable("part")
@dataclass(frozen=True)
class CurvePoint:
    """One evaluation.

    Attributes:
        score: name of the score that chose the heads.
        seed: seed of the score, 0 where it has none.
        fraction: share of the heads that was asked to go, in `[0, 1]`.
        value: what `evaluate` returned.
        plan: the heads that were masked.
        run: which of several merged curves it belongs to.
    """

    score: str
    seed: int
    fraction: float
    value: float
    plan: Plan
    run: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**vars(self), "plan": self.plan.to_dict()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> CurvePoint:
        """Read what :meth:`to_dict` returned.

        Args:
            document: the plain values.

        Returns:
            The point.
        """
        return cls(**{**document, "plan": Plan.from_dict(document["plan"])})


@storable()
@dataclass(frozen=True, repr=False)
class PruningCurve(Result):
    """Evaluations at growing fractions of masked heads, for one or several scores.

    Attributes:
        points: every evaluation, curve by curve, in the order of the fractions.
        heads: number of heads of the model.
    """

    points: tuple[CurvePoint, ...]
    heads: int

    @property
    def scores(self) -> list[str]:
        """Names of the scores, in the order of the curves."""
        return list(dict.fromkeys(point.score for point in self.points))

    @property
    def fractions(self) -> list[float]:
        """The fractions, ascending."""
        return sorted({point.fraction for point in self.points})

    def curves(self, score: str) -> list[list[CurvePoint]]:
        """Return the curves of a score, one for each seed and run.

        Returns:
            The curves, in the order they were made.

        Raises:
            InputError: if there is no such score.
        """
        curves: dict[tuple[int, int], list[CurvePoint]] = {}
        for point in self.points:
            if point.score == score:
                curves.setdefault((point.run, point.seed), []).append(point)
        if not curves:
            raise InputError(f"No score {score!r}. There are: {', '.join(self.scores)}.")
        return list(curves.values())

    def areas(self, score: str) -> list[float]:
        """Compute the area under each curve of a score, per unit of fraction.

        Returns:
            For each seed and run the mean height of the curve, by the trapezoid rule.
        """
        return [_area(curve) for curve in self.curves(score)]

    def plan(self, score: str, fraction: float) -> Plan:
        """Return the heads that went at a fraction, on the first curve of a score.

        Args:
            score: name of the score.
            fraction: one of the fractions that were evaluated.

        Returns:
            The plan, ready for `prune_heads`.

        Raises:
            InputError: if the fraction was not evaluated.
        """
        for point in self.curves(score)[0]:
            if math.isclose(point.fraction, fraction, abs_tol=1e-9):
                return point.plan
        raise InputError(f"fraction must be one of {self.fractions}. Got {fraction}.")

    def merge(self, other: PruningCurve) -> PruningCurve:
        """Join the curves of another run, such as one on a model trained with another seed.

        Args:
            other: curves over the same fractions.

        Returns:
            Both, the other's runs numbered after this one's.

        Raises:
            InputError: if fractions or the number of heads differ.
        """
        if self.fractions != other.fractions or self.heads != other.heads:
            raise InputError(
                f"Curves over {self.fractions} of {self.heads} heads cannot be merged with curves "
                f"over {other.fractions} of {other.heads}."
            )
        later = 1 + max(point.run for point in self.points)
        moved = (replace(point, run=point.run + later) for point in other.points)
        return PruningCurve((*self.points, *moved), self.heads)

    def table(self) -> Text:
        """Lay the curves out as a table: one row per score, one column per fraction.

        Returns:
            Mean and, where there are several curves, standard deviation over seeds and runs; the
            last column is the area under the curve.
        """
        header = ["score", *(f"{fraction:.0%}" for fraction in self.fractions), "area"]
        rows = [header]
        for score in self.scores:
            rows.append([score, *map(_spread, [*self._columns(score), self.areas(score)])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{row[0]:<{widths[0]}}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        return Text("\n".join(lines))

    def plot(self, axes: Any = None) -> Any:
        """Draw the curves, mean over seeds and runs with a band of one standard deviation.

        Args:
            axes: matplotlib axes to draw on; new ones by default.

        Returns:
            The axes.
        """
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(layout="constrained")[1]
        for score in self.scores:
            columns = self._columns(score)
            mean = np.array([statistics.fmean(column) for column in columns])
            spread = np.array([_deviation(column) for column in columns])
            percent = [100 * fraction for fraction in self.fractions]
            (line,) = axes.plot(percent, mean, marker=".", label=score.replace("_", " "))
            band = {"color": line.get_color(), "alpha": 0.15, "linewidth": 0}
            axes.fill_between(percent, mean - spread, mean + spread, **band)
        axes.set_xlabel("heads masked (%)")
        axes.set_ylabel("evaluation")
        axes.legend()
        return axes

    def to_pandas(self) -> Any:
        """Return a table with a row for each evaluation; needs pandas.

        Returns:
            The `pandas.DataFrame`, indexed by score, run, seed and fraction, with the number of
            masked heads and the value.
        """
        import pandas

        rows = [{**vars(point), "heads": len(point.plan)} for point in self.points]
        table = pandas.DataFrame(rows).set_index(["score", "run", "seed", "fraction"])
        return table[["heads", "value"]]

    def _columns(self, score: str) -> list[list[float]]:
        """The values of every curve of a score, by fraction."""
        columns = zip(*self.curves(score), strict=True)
        return [[point.value for point in column] for column in columns]


def _area(curve: list[CurvePoint]) -> float:
    width = curve[-1].fraction - curve[0].fraction
    if not width:
        return curve[0].value
    values, fractions = torch.tensor([(p.value, p.fraction) for p in curve], dtype=torch.float64).T
    return float(torch.trapezoid(values, fractions)) / width


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {_deviation(values):.3f}" if len(values) > 1 else mean
