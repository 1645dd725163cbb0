"""What a pruning curve has evaluated so far, kept in a file so that it can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlens.errors import InputError
from attnlens.files import read_json, write_json
from attnlens.pruning.curve_result import CurvePoint
from attnlens.pruning.plan import HeadPlan


class CurveState:
    """Evaluations so far, written to a file after each.

    Args:
        path: JSON file, or None to keep nothing.
        settings: what makes two runs the same, as plain values.

    Attributes:
        points: the evaluations.

    Raises:
        InputError: if the file is of a run with other settings, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._settings = dict(settings)
        self.points: list[CurvePoint] = []
        if self._path is not None and self._path.exists():
            self.points = self._read(self._path)

    def of(self, score: str, seed: int) -> list[CurvePoint]:
        """Return the evaluations of one curve.

        Args:
            score: name of the score.
            seed: its seed.

        Returns:
            The points in the order of their fractions.
        """
        return [p for p in self.points if (p.score, p.seed) == (score, seed)]

    def value_of(self, plan: HeadPlan) -> float | None:
        """Return what was evaluated with the same heads masked, on whatever curve.

        Args:
            plan: the heads.

        Returns:
            The value, or None if there is none.
        """
        return next((p.value for p in self.points if p.plan == plan), None)

    def forget(self, score: str, seed: int) -> None:
        """Drop the evaluations of one curve.

        Args:
            score: name of the score.
            seed: its seed.
        """
        self.points = [p for p in self.points if (p.score, p.seed) != (score, seed)]

    def add(self, point: CurvePoint) -> None:
        """Keep an evaluation, in the file too.

        Args:
            point: the evaluation.
        """
        self.points.append(point)
        if self._path is not None:
            points = [kept.to_dict() for kept in self.points]
            write_json(self._path, {"settings": self._settings, "points": points})

    def _read(self, path: Path) -> list[CurvePoint]:
        document = read_json(path, "the state of a pruning curve")
        try:
            points = [CurvePoint.from_dict(point) for point in document["points"]]
            settings = document["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no state of a pruning curve: {error!r}.") from error
        for name, value in json.loads(json.dumps(self._settings)).items():
            if settings.get(name) != value:
                raise InputError(
                    f"{path} belongs to a run with {name}={settings.get(name)!r}; this one has "
                    f"{value!r}. Choose another state file."
                )
        return points
