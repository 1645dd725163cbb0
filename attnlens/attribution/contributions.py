"""What `HiddenTokenAttribution` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnlens.attribution.tallies import layer_profile
from attnlens.observer import Sums
from attnlens.results import LayeredResult, LayerKey, Result
from attnlens.saving import storable


@storable("entry")
@dataclass(frozen=True, eq=False, repr=False)
class AttributionMatrices(Result):
    """Contributions to the hidden states of one stack in one forward pass; on the CPU.

    Examples with NaN or Inf in what enters or leaves a layer hold NaN from that layer on.

    Attributes:
        stack: the stack of layers.
        layers: index of each of the L layers.
        contribution: c_ij, the share of source i in hidden state j, `[L, B, S, T]` in `[0, 1]`;
            sums to one over the sources of a real target.
        norm: `‖∂e_j/∂x_i‖`, `[L, B, S, T]`, at least 0.
        standard_error: of `contribution`, by the jackknife over probes, `[L, B, S, T]`; zero
            where the Jacobian is exact.
        mask: real tokens, `[B, K]` bool.
        sources: positions of the sources, `[S]`.
        targets: positions of the targets, `[T]`.
        reverse: whether cotangents were pulled back instead of tangents pushed forward.
    """

    stack: str
    layers: tuple[int, ...]
    contribution: Tensor
    norm: Tensor
    standard_error: Tensor
    mask: Tensor
    sources: Tensor
    targets: Tensor
    reverse: bool

    axes: ClassVar = {"layer": "layers", "example": "", "source": "sources", "target": "targets"}
    apart = frozenset({"mask", "sources", "targets"})

    @property
    def nbytes(self) -> int:
        """Memory of the tensors, in bytes."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


@storable()
@dataclass(frozen=True, repr=False)
class HiddenTokenAttributionResult(LayeredResult):
    """Contributions over all real tokens seen, by layer and label of the target token.

    Tensors are float64 on the CPU, with one row per layer and one column per label; NaN where
    there was no such token. Means are corrected for the bias of the sketch, so single values may
    leave `[0, 1]` by about their error. Errors are standard errors of the sketch alone, not of
    the choice of texts: zero where exact, NaN with a single probe, and rather too large for means
    over tokens, whose errors partly cancel.

    Attributes:
        layers: `(stack, layer)` of each of the L rows.
        labels: names of the G labels.
        tokens: number of target tokens, `[L, G]`.
        skipped: number of examples left out because a hidden state or a derivative held NaN or
            Inf, at this layer or before, `[L]`.
        own: mean contribution of a token to its own hidden state, `[L, G]` in `[0, 1]`.
        own_error: standard error of `own`, `[L, G]`.
        own_box: lower whisker, first quartile, median, third quartile and upper whisker of the
            own contributions as sketched, `[L, G, 5]` in `[0, 1]`, right to 1.3e-4.
        not_main: share of tokens to which another contributes more than they do themselves,
            `[L, G]` in `[0, 1]`.
        distance: mean contribution of one neighbour at distance 1, 2, 3, 4–5, 6–10, 11 and more,
            on both sides, `[L, G, 6]` in `[0, 1]`.
        distance_error: standard error of `distance`, `[L, G, 6]`.
        distance_profile: `distance` in percent of its sum over the layers of the stack,
            `[L, G, 6]` in `[0, 100]`.
        offset: contribution of the position at each offset, −R … R, averaged over all target
            tokens, `[L, G, 2R + 1]` in `[0, 1]`; the own position, R, is empty.
        offset_error: standard error of `offset`, `[L, G, 2R + 1]`.
        by_label: share of the tokens of each label, last, in the hidden states of each label,
            `[L, G, G]` in `[0, 1]`.
        by_label_error: standard error of `by_label`, `[L, G, G]`.
    """

    layers: tuple[LayerKey, ...]
    labels: tuple[str, ...]
    tokens: Tensor
    skipped: Tensor
    own: Tensor
    own_error: Tensor
    own_box: Tensor
    not_main: Tensor
    distance: Tensor
    distance_error: Tensor
    distance_profile: Tensor
    offset: Tensor
    offset_error: Tensor
    by_label: Tensor
    by_label_error: Tensor

    axes: ClassVar = {"layer": "layers", "label": "labels"}
    ends: ClassVar = {"by_label": "labels", "by_label_error": "labels"}
    shown = ("own",)
    meanings: ClassVar = {
        "tokens": "how many tokens counted",
        "own": "share of a hidden state that comes from its own token",
        "not_main": (
            "share of tokens to which another token contributes more than they do themselves"
        ),
    }


def attribution_result(
    layers: tuple[LayerKey, ...], labels: tuple[str, ...], means: Sums
) -> HiddenTokenAttributionResult:
    """Complete the averages of all layers.

    Args:
        layers: stack and layer of each row.
        labels: names of the labels.
        means: fields of :func:`~attnlens.attribution.aggregates.contribution_means`, `[L, G, …]`.

    Returns:
        The result.
    """
    profile = torch.empty_like(means["distance"])
    for stack in {stack for stack, _ in layers}:
        rows = torch.tensor([key[0] == stack for key in layers])
        profile[rows] = layer_profile(means["distance"][rows])
    return HiddenTokenAttributionResult(layers, labels, distance_profile=profile, **means)
