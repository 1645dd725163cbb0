"""Per-head statistics of raw and effective attention, without an attention matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from attnlens.algebra.closed_forms import HeadSums, pearson
from attnlens.algebra.null_space import NullSpace, null_space
from attnlens.algebra.problem import Problem, problem
from attnlens.attention.health import health_fields
from attnlens.attention.spaces import projection_known, value_spaces
from attnlens.capture import Capture
from attnlens.errors import InputError
from attnlens.kernels.ranks import require_rtol
from attnlens.observer import SumObserver, Sums
from attnlens.results import LayeredResult
from attnlens.saving import storable

Fields = Literal["all", "null_space", "spectrum", "health"]
Sinks = Tensor | Callable[[Mapping[str, Any]], Tensor] | None
"""Keys that count as the sink, `[B, K]` bool, or what tells them from a model's arguments."""


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

    shown: ClassVar[tuple[str, ...]] = (
        "effective_fraction",
        "effective_norm",
        "entropy",
        "output_norm",
    )
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


@storable()
@dataclass(frozen=True, repr=False)
class HeadHealthResult(HeadStatisticsResult):
    """The statistics of heads, and how healthy their attention is; all `[L, H]`.

    Attributes:
        max_logit: largest scaled, capped and biased logit of any row; NaN where only A was seen.
        relative_entropy: row entropy over the logarithm of the number of visible keys, in
            `[0, 1]`, the mean over rows that see two keys or more.
        confidence: mean of the largest entry of a row.
        received: attention that the most attended key receives, `max_j Σ_i p_ij / (number of rows
            that see j)`.
        sink_first: share of examples in which that key belongs to the sink.
        sink_mass: mean attention to the sink: the first real key, the extra column of the softmax
            where the model has one, or the keys that were named.
        effective_sink_mass: mean effective attention to it.
        sink_value_norm: mean `‖T_j‖` of the sink over the mean of all real keys.
        effective_rank: `exp(−Σ q log q)` with `q = σ / Σσ`, σ the singular values of T, in
            `[1, min(n, D)]`.
        stable_rank: `‖T‖²_F / σ₁²`, likewise.
    """

    max_logit: Tensor
    relative_entropy: Tensor
    confidence: Tensor
    received: Tensor
    sink_first: Tensor
    sink_mass: Tensor
    effective_sink_mass: Tensor
    sink_value_norm: Tensor
    effective_rank: Tensor
    stable_rank: Tensor

    shown = ("relative_entropy", "max_logit", "received", "sink_mass", "effective_rank")
    meanings: ClassVar = {
        **HeadStatisticsResult.meanings,
        "max_logit": "the largest attention logit: growth in training announces instability",
        "relative_entropy": "entropy of a row against even attention: near 0 it has collapsed",
        "confidence": "the largest entry of an attention row, on average",
        "received": "attention that the most attended key receives: near 1 it is a sink",
        "sink_first": "share of examples in which the most attended key is the sink's",
        "sink_mass": "attention to the sink, the first token unless others were named",
        "effective_sink_mass": "attention to the sink that the output can see",
        "sink_value_norm": "length of the sink's value against the average: near 0 it does nothing",
        "effective_rank": "how many directions the values use, by the entropy of their spectrum",
        "stable_rank": "how many directions the values use, by their total over largest square",
    }


class HeadStatistics(SumObserver):
    """Rank, nullity, norms, correlation and entropy of every head, streamed over examples.

    No `[B, H, Q, K]` tensor is created. Where the model runs in low precision or with dropout,
    coordinates are recomputed in float32 instead of being read off the model's output.

    Args:
        layers: layer indices to look at; None looks at all.
        fields: `"all"`; `"null_space"` for tokens, rank, nullities, `‖A⊥‖_F` and output norm; or
            `"spectrum"` for these and the condition. The rest is then NaN. `"health"` adds those
            of :class:`HeadHealthResult` to all, by a second pass over the logits.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
            `max(n, D) · eps(float32)`, n the number of real keys.
        sinks: for `"health"`, the keys that count as the sink, `[B, K]` bool, or what tells them
            from the model's arguments by name, such as `lambda inputs: inputs["input_ids"] == 101`;
            by default the first real key, or the extra column of the softmax where there is one.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3. Health: Dehghani
        et al., "Scaling Vision Transformers to 22 Billion Parameters", ICML 2023 (logits); Zhai et
        al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", ICML 2023;
        Voita et al., "Analyzing Multi-Head Self-Attention", ACL 2019 (confidence); Gu et al., "When
        Attention Sink Emerges in Language Models", ICLR 2025; Roy and Vetterli, "The Effective
        Rank", EUSIPCO 2007.

    Examples:
        >>> statistics = HeadStatistics(layers=[0, 5])
        >>> with Lens(model, statistics), torch.no_grad():
        ...     output = model(**batch)
        >>> result = statistics.compute()
        >>> result.layers
        (('encoder.layer.*.attention.self', 0), ('encoder.layer.*.attention.self', 5))
    """

    alike = ("fields", "rtol")

    def __init__(
        self,
        layers: Iterable[int] | None = None,
        *,
        fields: Fields = "all",
        rtol: float | None = None,
        sinks: Sinks = None,
    ) -> None:
        super().__init__(layers)
        if fields not in get_args(Fields):
            raise InputError(
                f"fields must be one of {', '.join(get_args(Fields))}. Got {fields!r}."
            )
        if sinks is not None and fields != "health":
            raise InputError(f'sinks are looked at with fields="health". Got fields={fields!r}.')
        self.fields = fields
        self.rtol = require_rtol(rtol)
        self.sinks = sinks
        self._sinks: Tensor | None = None

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Find the sinks of the forward pass to come.

        Args:
            inputs: the model's arguments by name.
        """
        self._sinks = self.sinks(inputs) if callable(self.sinks) else None

    def update(self, capture: Capture) -> None:
        """Add the examples of one attention call.

        Args:
            capture: the call.
        """
        posed = problem(capture, self.rtol)
        space, sums = null_space(posed, self.fields in ("all", "health"))
        fields = example_fields(posed, space, sums, spectrum=self.fields != "null_space")
        if self.fields == "health":
            sinks = self._sinks if callable(self.sinks) else self.sinks
            fields |= health_fields(posed, sinks)
            del fields["received_key"]  # of one example; it has no mean
        self.add((capture.stack, capture.layer), _sums(capture, posed, space, sums, fields))

    def compute(self) -> HeadStatisticsResult:
        """Average over everything seen.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if nothing was seen.
        """
        layers, stacked = self.stacked(_averages)
        kind = HeadHealthResult if self.fields == "health" else HeadStatisticsResult
        return kind(layers, value_space=value_spaces(self), **stacked)


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
    finite = space.finite > 0
    counted = finite & posed.active.any(-1)
    quantities = {name: fields[name] for name in (*_MEANS, *_HEALTH_MEANS) if name in fields}
    for name in _SPARSE & fields.keys():
        quantities[name] = fields[name].nan_to_num(0.0)
        quantities[f"{name}_count"] = fields[name].isfinite().double()
    if sums is not None:
        quantities |= _pooled(sums)
    return (
        {name: torch.where(counted, q, 0.0).sum(0) for name, q in quantities.items()}
        | {
            "examples": counted.sum(0).double(),
            "skipped": (~finite).sum(0).double(),
            "nullity_min": torch.where(counted, fields["nullity_min"], torch.inf).amin(0),
            **projection_known(capture),
        }
        | {
            total: torch.where(counted, fields[name], -torch.inf).amax(0)
            for name, total in _LARGEST.items()
            if name in fields
        }
    )


_MEANS = (
    "tokens",
    "rank",
    "nullity",
    "simplex_nullity",
    "condition",
    "attention_norm",
    "effective_norm",
    "effective_fraction",
    "correlation",
    "entropy",
    "output_norm",
)
_HEALTH_MEANS = (
    "relative_entropy",
    "confidence",
    "received",
    "sink_first",
    "sink_mass",
    "effective_sink_mass",
    "sink_value_norm",
    "effective_rank",
    "stable_rank",
)
# Fields that not every example has; their mean is over those that do.
_SPARSE = frozenset((
    "condition",
    "correlation",
    "relative_entropy",
    "sink_value_norm",
    "effective_rank",
    "stable_rank",
))
# Fields of which the largest is kept, and the name of it among the sums.
_LARGEST = {"nullity_max": "nullity_max", "max_logit": "logit_max"}


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

    def mean(name: str) -> Tensor:
        count = sums.get(f"{name}_count", examples)
        return torch.where(count > 0, sums[name] / count, torch.nan) if name in sums else missing

    averaged = {name: mean(name) for name in _MEANS} | {
        "examples": examples,
        "skipped": sums["skipped"],
        "nullity_min": torch.where(seen, sums["nullity_min"], torch.nan),
        "nullity_max": torch.where(seen, sums["nullity_max"], torch.nan),
        "pooled_correlation": pooled_correlation(sums) if "entries" in sums else missing,
    }
    if "logit_max" in sums:
        averaged |= {name: mean(name) for name in _HEALTH_MEANS}
        averaged["max_logit"] = torch.where(seen, sums["logit_max"], torch.nan)
    return averaged
