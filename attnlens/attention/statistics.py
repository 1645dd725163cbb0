"""Per-head statistics of raw and effective attention, without an attention matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from attnlens.algebra.closed_forms import HeadSums, pearson
from attnlens.algebra.null_space import NullSpace, null_space
from attnlens.algebra.problem import Problem, problem
from attnlens.attention.spaces import projection_known, value_spaces
from attnlens.capture import Capture
from attnlens.errors import InputError
from attnlens.kernels.ranks import require_rtol
from attnlens.observer import SumObserver, Sums
from attnlens.results import LayeredResult
from attnlens.saving import storable

Fields = Literal["all", "null_space", "spectrum"]


@storable()
@dataclass(frozen=True, repr=False)
class HeadStatisticsResult(LayeredResult):
    """Averages over examples, per layer and head; all `[L, H]` float64 on the CPU.

    Rows follow `layers`; heads that a layer does not have are NaN.

    Attributes:
        layers: `(stack, layer)` of each row.
        examples: number of examples that counted.
        skipped: number of examples left out because a tensor held NaN or Inf.
        tokens: real tokens n.
        rank: numerical rank of T.
        nullity: `n − rank(T)`, the dimension of LN(T); the mean over rows of a windowed head.
        nullity_min: smallest nullity of a row, over rows and examples.
        nullity_max: largest nullity of a row, over rows and examples.
        simplex_nullity: `n − rank(`[T, 1]`)`, the freedom that keeps rows summing to one.
        condition: largest over smallest kept singular value of T.
        attention_norm: `‖A‖_F`.
        effective_norm: `‖A⊥‖_F`.
        effective_fraction: `‖A⊥‖² / ‖A‖²`, in `[0, 1]`.
        correlation: pearson's r between the entries of A and A⊥, the mean over examples.
        pooled_correlation: pearson's r over the entries of all examples together.
        entropy: mean entropy of an attention row, in nats.
        output_norm: `‖A T‖_F`, the norm of what the head writes (`‖A V‖_F` where H is unknown).
        value_space: `"T"` or, where H is unknown, `"V"`; one per row.
    """

    layers: tuple[tuple[str, int], ...]
    examples: Tensor
    skipped: Tensor
    tokens: Tensor
    rank: Tensor
    nullity: Tensor
    nullity_min: Tensor
    nullity_max: Tensor
    simplex_nullity: Tensor
    condition: Tensor
    attention_norm: Tensor
    effective_norm: Tensor
    effective_fraction: Tensor
    correlation: Tensor
    pooled_correlation: Tensor
    entropy: Tensor
    output_norm: Tensor
    value_space: tuple[str, ...]

    shown = ("effective_fraction", "effective_norm", "entropy", "output_norm")
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "tokens": "tokens per example",
        "rank": "dimension of the space that a head's values span, rank(T)",
        "nullity": "dimension in which attention can change without any effect, n − rank(T)",
        "nullity_min": "the smallest nullity of any attention row",
        "nullity_max": "the largest nullity of any attention row",
        "simplex_nullity": "nullity that is left if attention rows must keep summing to one",
        "condition": "largest over smallest singular value of a head's values",
        "attention_norm": "size of the attention matrix, ‖A‖",
        "effective_norm": "size of the attention that the output can see, ‖A⊥‖",
        "effective_fraction": (
            "the share of a head's attention that can influence its output, ‖A⊥‖²/‖A‖²: at 1 all "
            "of it counts, at 0.6 the other 40 % changes nothing"
        ),
        "correlation": "Pearson's r between raw and effective attention, averaged over examples",
        "pooled_correlation": "Pearson's r between raw and effective attention, examples pooled",
        "entropy": "how widely a token spreads its attention, in nats: 0 is a single token",
        "output_norm": "size of what a head writes, ‖AT‖",
    }


class HeadStatistics(SumObserver):
    """Rank, nullity, norms, correlation and entropy of every head, streamed over examples.

    No `[B, H, Q, K]` tensor is created. Where the model runs in low precision or with dropout,
    coordinates are recomputed in float32 instead of being read off the model's output.

    Args:
        layers: layer indices to look at; None looks at all.
        fields: `"all"`; `"null_space"` for tokens, rank, nullities, `‖A⊥‖_F` and output norm; or
            `"spectrum"` for these and the condition. The rest is then NaN.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
            `max(n, D) · eps(float32)`, n the number of real keys.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.
    """

    alike = ("fields", "rtol")

    def __init__(
        self,
        layers: Iterable[int] | None = None,
        *,
        fields: Fields = "all",
        rtol: float | None = None,
    ) -> None:
        super().__init__(layers)
        if fields not in get_args(Fields):
            raise InputError(
                f"fields must be one of {', '.join(get_args(Fields))}. Got {fields!r}."
            )
        self.fields = fields
        self.rtol = require_rtol(rtol)

    def update(self, capture: Capture) -> None:
        """Add the examples of one attention call.

        Args:
            capture: the call.
        """
        posed = problem(capture, self.rtol)
        space, sums = null_space(posed, self.fields == "all")
        fields = example_fields(posed, space, sums, spectrum=self.fields != "null_space")
        self.add((capture.stack, capture.layer), _sums(capture, posed, space, sums, fields))

    def compute(self) -> HeadStatisticsResult:
        """Average over everything seen.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if nothing was seen.
        """
        layers, stacked = self.stacked(_averages)
        return HeadStatisticsResult(layers, value_space=value_spaces(self), **stacked)


def example_fields(
    posed: Problem, space: NullSpace, sums: HeadSums | None, *, spectrum: bool = True
) -> Sums:
    """Name what is known of every example and head.

    Args:
        posed: the call.
        space: its null-space quantities.
        sums: its sums over rows, or None.
        spectrum: whether singular values are wanted.

    Returns:
        `[B, H]` float64 by the name of the field in the result.
    """
    fields = {
        "tokens": posed.support.tokens.double().expand(space.rank.shape),
        "rank": space.rank,
        "nullity": space.nullity,
        "nullity_min": space.nullity_min,
        "nullity_max": space.nullity_max,
        "simplex_nullity": space.simplex_nullity,
        "effective_norm": space.effective_square.clamp(min=0).sqrt(),
        "output_norm": space.output_square.clamp(min=0).sqrt(),
    }
    if spectrum:
        fields["condition"] = posed.condition
    if sums is None:
        return fields
    return fields | {
        "attention_norm": sums.square.sqrt(),
        "effective_fraction": (sums.effective_square / sums.square).clamp(max=1),
        "entropy": sums.entropy / posed.active.sum(-1).clamp(min=1),
        "correlation": pooled_correlation(_pooled(sums)),
    }


def _sums(
    capture: Capture, posed: Problem, space: NullSpace, sums: HeadSums | None, fields: Sums
) -> Sums:
    """Per-head sums over the examples of one call that are real and finite, each `[H]`."""
    least, most = fields.pop("nullity_min"), fields.pop("nullity_max")
    finite = space.finite > 0
    counted = finite & posed.active.any(-1)
    quantities = dict(fields)
    for name in ("condition", "correlation"):  # not every example has one
        if name in fields:
            quantities[name] = fields[name].nan_to_num(0.0)
            quantities[f"{name}_count"] = fields[name].isfinite().double()
    if sums is not None:
        quantities |= _pooled(sums)
    return {name: torch.where(counted, q, 0.0).sum(0) for name, q in quantities.items()} | {
        "examples": counted.sum(0).double(),
        "skipped": (~finite).sum(0).double(),
        "nullity_min": torch.where(counted, least, torch.inf).amin(0),
        "nullity_max": torch.where(counted, most, -torch.inf).amax(0),
        **projection_known(capture),
    }


def _pooled(sums: HeadSums) -> Sums:
    """What a correlation over the entries of all examples is made of; it adds up."""
    entries = sums.entries.clamp(min=1)
    total, effective = sums.total, sums.effective_total
    return {
        "entries": sums.entries,
        "total": total,
        "effective_total": effective,
        "centred": sums.centred,
        "effective_centred": sums.effective_centred,
        "covariance": sums.covariance,
        "mean_square": total.square() / entries,
        "effective_mean_square": effective.square() / entries,
        "mean_product": total * effective / entries,
        "resolution": sums.resolution,
        "effective_resolution": sums.effective_resolution,
    }


def pooled_correlation(pooled: Mapping[str, Tensor]) -> Tensor:
    """Correlate A and A⊥ over all entries that were added up.

    Args:
        pooled: sums of an observer, `HeadStatistics.sums`, or sums of these over heads or layers.

    Returns:
        Pearson's r in `[-1, 1]`, NaN where A or A⊥ is constant.
    """
    entries = pooled["entries"].clamp(min=1)
    total, effective = pooled["total"], pooled["effective_total"]
    # between the examples; of one alone it is zero
    centred = pooled["centred"] + (pooled["mean_square"] - total.square() / entries)
    effective_centred = pooled["effective_centred"] + (
        pooled["effective_mean_square"] - effective.square() / entries
    )
    covariance = pooled["covariance"] + (pooled["mean_product"] - total * effective / entries)
    varies = centred > pooled["resolution"]
    varies &= effective_centred > pooled["effective_resolution"]
    return torch.where(varies, pearson(centred, effective_centred, covariance), torch.nan)


def _averages(sums: Sums) -> Sums:
    """Turn a layer's sums into the fields of the result, each `[H]`."""
    examples = sums["examples"]
    seen = examples > 0
    missing = torch.full_like(examples, torch.nan)

    def mean(name: str, count: Tensor = examples) -> Tensor:
        return torch.where(count > 0, sums[name] / count, torch.nan) if name in sums else missing

    averaged = (
        "tokens",
        "rank",
        "nullity",
        "simplex_nullity",
        "attention_norm",
        "effective_norm",
        "effective_fraction",
        "entropy",
        "output_norm",
    )
    return {name: mean(name) for name in averaged} | {
        "examples": examples,
        "skipped": sums["skipped"],
        "nullity_min": torch.where(seen, sums["nullity_min"], torch.nan),
        "nullity_max": torch.where(seen, sums["nullity_max"], torch.nan),
        "condition": mean("condition", sums.get("condition_count", examples)),
        "correlation": mean("correlation", sums.get("correlation_count", examples)),
        "pooled_correlation": pooled_correlation(sums) if "entries" in sums else missing,
    }
