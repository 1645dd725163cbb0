"""Means over examples, for observers whose quantities are one number for each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attnlens.observer import SumObserver, Sums
from attnlens.results import LayeredResult

R = TypeVar("R", bound=LayeredResult)


def example_sums(fields: Mapping[str, Tensor], real: Tensor, finite: Tensor) -> Sums:
    """Add quantities up over examples, each with the number of examples that have it.

    Args:
        fields: `[B, …]` float64 by name; NaN where an example has none.
        real: `[B, …]` bool, the examples that have a token.
        finite: `[B, …]` bool, those among them whose inputs are finite; the others are skipped.

    Returns:
        Sums for :meth:`~attnlens.observer.SumObserver.add`.
    """
    counted = real & finite
    sums: Sums = {
        "examples": counted.sum(0).double(),
        "skipped": (real & ~finite).sum(0).double(),
    }
    for name, field in fields.items():
        known = field.isfinite() & counted[(...,) + (None,) * (field.dim() - counted.dim())]
        sums[name] = torch.where(known, field, 0.0).sum(0)
        sums[f"{name}_count"] = known.sum(0).double()
    return sums


def example_means(sums: Sums) -> Sums:
    """Turn these sums into means, NaN where no example has the quantity, and the two counts."""
    means = {"examples": sums["examples"], "skipped": sums["skipped"]}
    counts = {name: f"{name}_count" for name in sums if f"{name}_count" in sums}
    return means | {name: sums[name] / sums[count] for name, count in counts.items()}


class MeanObserver(SumObserver, Generic[R]):
    """An observer whose result is means over examples, layer by layer.

    Attributes:
        result: class of the result; its fields are those of :func:`example_means`.
    """

    result: type[Any]

    def fields(self, sums: Sums) -> Sums:
        """Turn the sums of a layer into the fields of the result."""
        return example_means(sums)

    def compute(self) -> R:
        """Average over everything seen.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if nothing was seen.
        """
        layers, stacked = self.stacked(self.fields)
        averaged: R = self.result(layers, **stacked)
        return averaged
