"""How much of attention could lie elsewhere, as a distribution with the same output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnlens.algebra.minimal_distribution import CERTIFIED, solved_rows
from attnlens.algebra.problem import Problem, problem
from attnlens.attention.example_means import MeanObserver, example_means, example_sums
from attnlens.capture import Capture
from attnlens.observer import Sums
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable


@storable()
@dataclass(frozen=True, repr=False)
class MinimalDistributionResult(LayeredResult):
    """Averages over examples, per layer and head; `[L, H]` float64 on the CPU.

    `a` is a row of attention, x the distribution of least norm with the same output.

    Attributes:
        layers: `(stack, layer)` of each row.
        examples: number of examples that counted.
        skipped: number of examples left out because a tensor held NaN or Inf.
        share: `Σ ‖x_i‖² / Σ ‖a_i‖²` over the rows of an example, in `(0, 1]`.
        total_variation: mean over rows of `½ Σ_j |a_ij − x_ij|` in `[0, 1)`: the part of the
            attention that lies elsewhere in x.
        support: mean number of keys with `x_ij > 0`.
        unique: share of the rows where A is the only distribution, as many independent
            conditions as keys.
        unconverged: number of rows whose residual or gap is above 1e-9.
        largest_residual: largest relative error of output and sum, over rows and examples.
        largest_gap: largest relative duality gap, likewise.
    """

    layers: tuple[LayerKey, ...]
    examples: Tensor
    skipped: Tensor
    share: Tensor
    total_variation: Tensor
    support: Tensor
    unique: Tensor
    unconverged: Tensor
    largest_residual: Tensor
    largest_gap: Tensor

    shown = ("total_variation", "share", "support")
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "share": "size of the simplest distribution with the same output against attention",
        "total_variation": (
            "the part of a head's attention that could lie elsewhere, as a distribution, without "
            "any change of its output"
        ),
        "support": "keys that the simplest distribution with the same output attends to",
        "unique": "share of rows in which attention is the only distribution with its output",
        "unconverged": "rows whose simplest distribution was not certified",
        "largest_residual": "largest relative error of the output of a simplest distribution",
        "largest_gap": "largest relative distance of its norm from a lower bound",
    }


class MinimalDistribution(MeanObserver[MinimalDistributionResult]):
    """The simplest attention that does the same: statistics of every head, streamed over examples.

    Rows are solved exactly, block by block; that costs more than the forward pass, about a second
    for each layer of 12 heads and 120 tokens. The distributions themselves are
    :meth:`attnlens.Capture.minimal_distribution`.

    Args:
        layers: layer indices to look at; None looks at all.

    References:
        The family is that of Brunner et al., "On Identifiability in Transformers", ICLR 2020,
        section 3.1.

    Examples:
        >>> observer = MinimalDistribution(layers=[0])
        >>> with Lens(model, observer), torch.no_grad():
        ...     output = model(**batch)
        >>> len(observer.compute().layers)
        1
    """

    result = MinimalDistributionResult

    def update(self, capture: Capture) -> None:
        """Add the examples of one attention call.

        Args:
            capture: the call.
        """
        self.add((capture.stack, capture.layer), _sums(problem(capture)))

    def fields(self, sums: Sums) -> Sums:
        """Turn the sums of a layer into the fields of the result."""
        return example_means(sums) | {
            "unconverged": sums["unconverged"],
            "largest_residual": sums["residual_max"],
            "largest_gap": sums["gap_max"],
        }


def _sums(posed: Problem) -> Sums:
    """Sums over the rows of every example and head, and over the examples of one call."""
    names = ("square", "raw_square", "variation", "support", "unique", "unconverged")
    shape = posed.finite.shape
    total = {
        name: torch.zeros(shape, dtype=torch.float64, device=posed.finite.device)
        for name in (*names, "residual", "gap")
    }
    for part in solved_rows(posed):
        place = (part.example, part.head)
        x, a = part.distribution, part.attention
        unsolved = (part.residual > CERTIFIED) | (part.gap > CERTIFIED)
        sums = (x.square(), a.square(), (x - a).abs() / 2, x > 0, part.unique, unsolved)
        for name, entries in zip(names, sums, strict=True):
            total[name][place] += entries.sum()
        for name, errors in (("residual", part.residual), ("gap", part.gap)):
            total[name][place] = torch.maximum(total[name][place], errors.max())
    real, rows = posed.active.any(-1), posed.active.sum(-1)
    fields = {
        "share": total["square"] / total["raw_square"],
        "total_variation": total["variation"] / rows,
        "support": total["support"] / rows,
        "unique": total["unique"] / rows,
    }
    return example_sums(fields, real, posed.finite) | {
        "unconverged": total["unconverged"].sum(0),
        "residual_max": total["residual"].amax(0),
        "gap_max": total["gap"].amax(0),
    }
