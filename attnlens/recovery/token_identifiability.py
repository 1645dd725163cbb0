"""Can a token be told from its hidden state? Maps back to the input, and the rate of success."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attnlens.errors import AttnLensError, AttnLensWarning, InputError
from attnlens.observer import Labels
from attnlens.recovery.map_training import MapTraining
from attnlens.recovery.token_collector import ENTERED, SPLITS, TokenCollector
from attnlens.recovery.token_maps import Distance, MapKind, NormalEquations
from attnlens.recovery.token_rates import (
    Counts,
    Maps,
    Target,
    fit_maps,
    held_out,
    recovery_rate,
    solve_maps,
    stored_equations,
)
from attnlens.recovery.token_store import TEST, TRAIN, VALIDATION, TokenStore
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable

Solver = Literal["auto", "adam", "closed"]


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


class TokenIdentifiability(TokenCollector):
    """Rates at which input tokens are recovered from the hidden states of every layer.

    While the model runs, sequences with their hidden states are collected, up to a limit beyond
    which a random sample is kept. :meth:`compute` trains a map per layer on the training split,
    all layers together, and counts on the test split. A sequence's split follows from its content
    alone, so equal sequences are in the same split whatever the order, batching or sharding.

    The linear map for the L2 distance has a closed form. Its sums are accumulated while the model
    runs, about `4 M²` numbers per layer and target, and only test sequences are stored.

    Args:
        map: `"linear"`, `"mlp"` (one hidden layer, GELU), or `"naive"`, which takes the hidden
            state itself for the guess.
        distance: of training and of the search for the nearest neighbour, `"cosine"` or `"l2"`.
        layers: layer indices to look at; None looks at all.
        words: gives the word embeddings `[B, K, W]` of token ids `[B, K]`, as does
            `model.get_input_embeddings()`; without it there is no word control.
        neighbours: k, the largest distance of a neighbour to recover; each of the 2k offsets needs
            another training.
        labels: integer label of every token, `[B, K]`, of the forward passes to come; or what
            computes it from the model's arguments by name. May be set between forward passes.
            None: all share label 0.
        label_names: names of the G labels; tokens with other labels are left out of `by_label`.
        rescaling: largest factor of the random rescaling control.
        angle: of the random rotation control, in degrees.
        split: shares of the train, validation and test sequences.
        seed: of the splits, the sample, the first parameters, the batches and the controls.
        solver: `"adam"`, `"closed"`, or `"auto"` for the closed form where there is one.
        max_tokens: most tokens to store.
        max_bytes: most bytes to store; training takes about as much again.
        folder: where to store them in float16, as safetensors files that :meth:`reset` removes;
            in memory, in float32, if None.
        positions: P, the number of positions that the position control knows.
        training: how maps are trained.

    Raises:
        InputError: if arguments are of the wrong value or do not go together.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4. The controls
        are not in the paper.
    """

    def __init__(
        self,
        map: MapKind = "linear",
        distance: Distance = "cosine",
        layers: Iterable[int] | None = None,
        *,
        words: Callable[[Tensor], Tensor] | None = None,
        neighbours: int = 0,
        labels: Labels = None,
        label_names: Sequence[str] = ("all",),
        rescaling: float = 2.0,
        angle: float = 30.0,
        split: tuple[float, float, float] = (0.70, 0.15, 0.15),
        seed: int = 0,
        solver: Solver = "auto",
        max_tokens: int | None = None,
        max_bytes: int = 2**30,
        folder: str | os.PathLike[str] | None = None,
        positions: int = 512,
        training: MapTraining | None = None,
    ) -> None:
        if rescaling < 1 or not 0 <= angle <= 180 or neighbours < 0 or positions < 1:
            raise InputError(
                f"rescaling must be at least 1, angle in [0, 180], neighbours at least 0 and "
                f"positions at least 1. Got {rescaling}, {angle}, {neighbours}, {positions}."
            )
        self._choose(map, distance, solver)
        super().__init__(
            layers,
            words=words,
            offsets=tuple(offset for offset in range(-neighbours, neighbours + 1) if offset),
            labels=labels,
            split=split,
            seed=seed,
            positions=positions,
            streams=self.closed,
            stored=(TEST,) if self.closed or map == "naive" else (TRAIN, VALIDATION, TEST),
            store=TokenStore(max_tokens, max_bytes, folder),
        )
        self.label_names = tuple(label_names)
        self.rescaling, self.angle = rescaling, angle
        self.training = MapTraining() if training is None else training

    def using(
        self,
        map: MapKind,
        distance: Distance | None = None,
        *,
        solver: Solver = "auto",
        training: MapTraining | None = None,
    ) -> TokenIdentifiability:
        """Return an observer with another map that shares what this one has collected.

        Give a lens only one of them.

        Args:
            map: see the class.
            distance: see the class; the same if None.
            solver: see the class.
            training: see the class; the same if None.

        Returns:
            The observer.

        Raises:
            InputError: if this one stores test sequences only, and the map must be trained.
        """
        other = copy(self)
        other._choose(map, self.distance if distance is None else distance, solver)
        other.training = self.training if training is None else training
        if map != "naive" and TRAIN not in self.stored and not (self.streams and other.closed):
            raise InputError(
                f"This observer stores test sequences only, because map={self.map!r} needs no "
                f'others. Collect with map="mlp", and derive the rest with using().'
            )
        return other

    def compute(self) -> TokenIdentifiabilityResult:
        """Train the maps and count what they identify.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if no sequence was seen, or a split is empty.
        """
        keys = self.layer_keys()
        entered = {name: t.cpu() for name, t in self.sums[(keys[0][0], ENTERED)].items()}
        for place, name in enumerate(SPLITS):
            seen = int(entered["sequences"][place])
            if not seen or (place in self.stored and not self.store.shards(place)):
                raise AttnLensError(
                    f"The {name} split is empty: {seen} of {int(entered['sequences'].sum())} "
                    f"sequences seen belong to it. Run more text through the model, or change "
                    f"seed, split or max_tokens."
                )
        if entered["skipped"] > 0:
            warnings.warn(
                f"{int(entered['skipped'])} sequence(s) held NaN or Inf and were left out. Check "
                f"the model's inputs.",
                AttnLensWarning,
                stacklevel=2,
            )
        own = self._fit(0, keys)
        mean_entered = entered["position_sum"] / entered["position_count"][:, None]
        layers = len(keys)
        neighbours = torch.empty(layers, 0, dtype=torch.float64)
        if self.offsets:
            neighbours = torch.stack([self._recovered(o, keys) for o in self.offsets], 1)
        return TokenIdentifiabilityResult(
            tuple(keys),
            self.map,
            self.distance,
            self.label_names,
            self.offsets,
            sequences=entered["sequences"],
            tokens=entered["tokens"],
            neighbours=neighbours,
            words=self._recovered("words", keys),
            loss=own.loss.double().expand(layers),
            epochs=own.epochs.double().expand(layers),
            ridge=own.ridge.double().expand(layers),
            **self._counts(own, mean_entered.float()).rates(),
        )

    def _counts(self, own: Maps, mean_entered: Tensor) -> Counts:
        """Count the hits of maps among the test sequences."""
        counts = Counts(own.parameters, self.distance, len(self.label_names))
        generator = torch.Generator().manual_seed(self.seed)
        for batch in held_out(self.store):
            counts.add(
                batch,
                mean_entered=mean_entered,
                rescaling=self.rescaling,
                angle=self.angle,
                generator=generator,
            )
        return counts

    def _choose(self, map: MapKind, distance: Distance, solver: Solver) -> None:
        if map not in ("naive", "linear", "mlp") or distance not in ("cosine", "l2"):
            raise InputError(
                f'map must be "naive", "linear" or "mlp" and distance "cosine" or "l2". Got '
                f"{map!r} and {distance!r}."
            )
        solvable = (map, distance) == ("linear", "l2")
        if solver not in ("auto", "adam", "closed") or (solver == "closed" and not solvable):
            raise InputError(
                f'solver must be "auto", "adam" or, for map="linear" and distance="l2", "closed". '
                f"Got {solver!r}."
            )
        self.map: MapKind = map
        self.distance: Distance = distance
        self.closed = solvable and solver != "adam"

    def _fit(self, target: Target, keys: list[LayerKey]) -> Maps:
        """Fit the maps of all layers to a target."""
        if self.map == "naive":
            return Maps((), *[torch.tensor(torch.nan)] * 3)
        if not self.closed:
            return fit_maps(self.store, target, self.map, self.distance, self.training, self.seed)
        if not self.streams:
            train, validation = (
                stored_equations(self.store, split, target) for split in (TRAIN, VALIDATION)
            )
            return solve_maps(train, validation)
        sums = [self.sums[key] for key in keys]
        stacked = (
            torch.stack([layer[f"{target}.{name}"] for layer in sums], 1).cpu()
            for name in NormalEquations._fields
        )
        train, validation = (NormalEquations(*parts) for parts in zip(*stacked, strict=True))
        return solve_maps(train, validation)

    def _recovered(self, target: Target, keys: list[LayerKey]) -> Tensor:
        """Rate at which a target other than the own input embedding is recovered, `[L]`."""
        entered = self.sums[(keys[0][0], ENTERED)]
        width, words = entered["position_sum"].shape[1], int(entered["word_width_max"])
        if target == "words" and (not words or (self.map == "naive" and words != width)):
            return torch.full((len(keys),), torch.nan, dtype=torch.float64)
        maps = self._fit(target, keys)
        return recovery_rate(self.store, maps.parameters, target, self.distance)
