"""What `TokenIdentifiability` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attnlens.recovery.token_maps import Distance, MapKind
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable


@storable()
@dataclass(frozen=True, repr=False)
class TokenIdentifiabilityResult(LayeredResult):
    """Rates at which tokens of the test split are identified; all in `[0, 1]`.

    Tensors are float64 on the CPU, with one row per layer; NaN where there was nothing to count.

    Attributes:
        layers: `(stack, layer)` of each of the L rows.
        map: `"naive"`, `"linear"` or `"mlp"`.
        distance: `"cosine"` or `"l2"`.
        labels: names of the G labels.
        offsets: offsets of the neighbours, −k … −1, 1 … k.
        sequences: number of sequences in the train, validation and test splits, `[3]`.
        tokens: number of tokens in them, `[3]`.
        rate: tokens identified from the layer on which the map was trained, `[L]`.
        error: standard error of `rate` over test sequences, `[L]`.
        transfer: tokens identified by the map of each layer, first, from the hidden states of
            each layer, second, `[L, L]`.
        by_label: `rate` by label, `[L, G]`.
        neighbours: tokens whose neighbour at each offset is identified, by maps trained for that,
            `[L, 2k]`.
        words: control: rate when the targets are word embeddings, without position or anything
            else, by maps trained for that, `[L]`. Any position of the same word is right.
        position: control: rate of a guess that knows the position and nothing else, the mean
            input embedding at that position, a scalar.
        rescaled: control: `rate` after every hidden state is multiplied by a random number, `[L]`.
        rotated: control: `rate` after every hidden state is turned in a random direction, `[L]`.
        chance: rate of guessing a token of the sequence at random, a scalar.
        loss: loss on the validation split, `[L]`; NaN for the naive map.
        epochs: epochs of training until that loss, `[L]`; NaN where there was none.
        ridge: ridge term of a map in closed form, `[L]`; NaN elsewhere.
    """

    layers: tuple[LayerKey, ...]
    map: MapKind
    distance: Distance
    labels: tuple[str, ...]
    offsets: tuple[int, ...]
    sequences: Tensor
    tokens: Tensor
    rate: Tensor
    error: Tensor
    transfer: Tensor
    by_label: Tensor
    neighbours: Tensor
    words: Tensor
    position: Tensor
    rescaled: Tensor
    rotated: Tensor
    chance: Tensor
    loss: Tensor
    epochs: Tensor
    ridge: Tensor

    axes: ClassVar = {"layer": "layers"}
    ends: ClassVar = {"by_label": "labels", "neighbours": "offsets"}
    apart = frozenset({"sequences", "tokens"})
    shown = ("rate",)
