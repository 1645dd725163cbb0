"""How much raw and effective attention goes to special tokens, punctuation, or any other label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlens.algebra.problem import Problem, problem
from attnlens.attention.health import learned_sink_mass
from attnlens.attention.label_sums import LabelMeans, label_means
from attnlens.attention.spaces import projection_known, value_spaces
from attnlens.capture import Capture
from attnlens.errors import InputError
from attnlens.kernels.ranks import require_rtol
from attnlens.observer import Labels, SumObserver, Sums, label_members
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable


@storable()
@dataclass(frozen=True, repr=False)
class LabelAttentionResult(LayeredResult):
    """Mean attention to the tokens of each of G labels, by layer and head; float64 on the CPU.

    Attention is summed over the keys of a label, averaged over query rows, then over examples;
    an example without such a token counts as zero. Rows follow `layers`; heads that a layer does
    not have are NaN.

    Attributes:
        layers: `(stack, layer)` of each of the L rows.
        labels: names of the G labels.
        examples: number of examples that counted, `[L, H]`.
        skipped: number of examples left out because a tensor held NaN or Inf, `[L, H]`.
        present: share of the examples with a token of the label, `[L, H, G]` in `[0, 1]`;
            `raw / present` is the mean over those alone.
        tokens: mean share of the label in the tokens of an example, `[L, H, G]` in `[0, 1]`,
            which is what uniform attention to all of them would give.
        raw: mean raw attention, `[L, H, G]` in `[0, 1]`.
        raw_error: standard error of `raw` over examples, `[L, H, G]`; NaN with one example.
        effective: mean effective attention, `[L, H, G]`.
        effective_error: standard error of `effective` over examples, `[L, H, G]`.
        sink: mean attention that a learned sink column takes from all tokens, `[L, H]` in `[0, 1]`;
            zero where a model has none. Raw attention to all tokens and this sum to one.
        value_space: `"T"` or, where H is unknown, `"V"`; one per row.
    """

    layers: tuple[LayerKey, ...]
    labels: tuple[str, ...]
    examples: Tensor
    skipped: Tensor
    present: Tensor
    tokens: Tensor
    raw: Tensor
    raw_error: Tensor
    effective: Tensor
    effective_error: Tensor
    sink: Tensor
    value_space: tuple[str, ...]

    ends: ClassVar = dict.fromkeys(
        ("present", "tokens", "raw", "raw_error", "effective", "effective_error"), "labels"
    )
    shown = ("effective", "raw")
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "present": "share of the examples with a token of the label",
        "tokens": "share of the label in the tokens of an example",
        "raw": "attention to the tokens of the label",
        "effective": "attention to the tokens of the label that the output can see",
        "sink": "attention that a learned sink column takes from all tokens",
    }


class LabelAttention(SumObserver):
    """Mean raw and effective attention to token labels, streamed over examples.

    No `[B, H, Q, K]` tensor is created where attention follows from queries and keys.

    Args:
        labels: integer label of every token attended to, `[B, K]`, of the forward passes to come;
            or what computes it from the model's arguments by name, such as a lookup of
            `input_ids` in a table. Tokens whose label is not in 0 … G − 1 are left out. May be
            set between forward passes. None: all share label 0.
        label_names: names of the G labels.
        layers: layer indices to look at; None looks at all.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
            `max(n, D) · eps(float32)`, n the number of real keys.

    Raises:
        InputError: if there are no label names.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, figures 1b, 1c and 5;
        Clark et al., "What Does BERT Look At?", BlackboxNLP 2019, section 3.2.

    Examples:
        >>> labels = (batch["input_ids"] < 1000).long()
        >>> observer = LabelAttention(labels, ("word", "special or rare"))
        >>> with Lens(model, observer), torch.no_grad():
        ...     output = model(**batch)
        >>> tuple(observer.compute().effective.shape)  # layers × heads × labels
        (6, 12, 2)
    """

    alike = ("label_names", "rtol")

    def __init__(
        self,
        labels: Labels = None,
        label_names: Sequence[str] = ("all",),
        layers: Iterable[int] | None = None,
        *,
        rtol: float | None = None,
    ) -> None:
        super().__init__(layers)
        if isinstance(label_names, str) or not label_names:
            raise InputError(f"label_names must be one name or more. Got {label_names!r}.")
        self.labels = labels
        self.label_names = tuple(label_names)
        self.rtol = require_rtol(rtol)
        self._computed: Tensor | None = None

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Compute the labels of the tokens to come.

        Args:
            inputs: the model's arguments by name.
        """
        self._computed = self.labels(inputs) if callable(self.labels) else None

    def update(self, capture: Capture) -> None:
        """Add the examples of one attention call.

        Args:
            capture: the call.
        """
        posed = problem(capture, self.rtol)
        labels = self._computed if callable(self.labels) else self.labels
        members = label_members(labels, capture.support.keys.any(1), len(self.label_names))
        means = label_means(posed, members)
        self.add((capture.stack, capture.layer), _sums(capture, posed, means, members))

    def compute(self) -> LabelAttentionResult:
        """Average over everything seen.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if nothing was seen.
        """
        layers, stacked = self.stacked(_averages)
        return LabelAttentionResult(
            layers, self.label_names, value_space=value_spaces(self), **stacked
        )


def _sums(capture: Capture, posed: Problem, means: LabelMeans, members: Tensor) -> Sums:
    """Sums over the examples of one call that are real and finite, `[H]` and `[H, G]`."""
    raw, effective = means
    real = posed.active.any(-1)  # [B, H]
    finite = (posed.finite & raw.isfinite().all(-1) & effective.isfinite().all(-1)) | ~real
    counted = (finite & real)[..., None]
    tokens = members.sum(1)[:, None].double()  # [B, 1, G]
    share = tokens / capture.support.keys.any(1).sum(-1).clamp(min=1)[:, None, None]
    quantities = {
        "raw": raw,
        "raw_square": raw.square(),
        "effective": effective,
        "effective_square": effective.square(),
        "tokens": share.expand_as(raw),
        "present": (tokens > 0).double().expand_as(raw),
    }
    return {name: torch.where(counted, q, 0.0).sum(0) for name, q in quantities.items()} | {
        "examples": counted[..., 0].sum(0).double(),
        "skipped": (~finite).sum(0).double(),
        "sink": torch.where(counted[..., 0], learned_sink_mass(posed), 0.0).sum(0),
        **projection_known(capture),
    }


def _averages(sums: Sums) -> Sums:
    """Turn a layer's sums into the fields of the result, `[H]` and `[H, G]`."""
    examples = sums["examples"]
    count = examples[:, None]
    fields = {
        "examples": examples,
        "skipped": sums["skipped"],
        "sink": sums["sink"] / examples,
    }
    for name in ("present", "tokens", "raw", "effective"):
        fields[name] = sums[name] / count
    for name in ("raw", "effective"):
        spread = (sums[f"{name}_square"] - count * fields[name].square()).clamp(min=0)
        error = (spread / (count * (count - 1))).sqrt()
        fields[f"{name}_error"] = torch.where(count > 1, error, torch.nan)
    return fields
