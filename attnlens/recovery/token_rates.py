"""Fit maps to collected tokens, and count what they identify among the test sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from attnlens.observer import Sums
from attnlens.recovery.map_training import MapTraining, Shards, train_maps
from attnlens.recovery.packed_tokens import (
    TEST,
    TRAIN,
    VALIDATION,
    PackedTokens,
    Target,
    Tokens,
    summed_equations,
)
from attnlens.recovery.recovery_result import TokenIdentifiabilityResult
from attnlens.recovery.ridge_maps import (
    NormalEquations,
    added_equations,
    best_ridge_maps,
    normal_equations,
)
from attnlens.recovery.token_maps import (
    Distance,
    MapKind,
    Maps,
    Parameters,
    apply_map,
    identified,
    recovery_rate,
    rescaled,
    rotated,
)
from attnlens.recovery.token_store import TokenStore
from attnlens.results import LayerKey

_BATCH_TOKENS = 4096


class HeldOut(NamedTuple):
    """Padded sequences of the test split.

    Attributes:
        hidden: `[L, S, K, M]`.
        entered: `[S, K, M]`, the input embeddings.
        words: `[S, K, W]`.
        labels: `[S, K]`; −1 where there is no token.
        mask: `[S, K]` bool.
    """

    hidden: Tensor
    entered: Tensor
    words: Tensor
    labels: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Recovery:
    """Tokens that were collected, and how they are to be recovered from their hidden states.

    Attributes:
        map: `"naive"`, `"linear"` or `"mlp"`.
        distance: of training and of the search.
        closed: whether a linear map is solved for instead of trained.
        training: how maps are trained.
        seed: of the first parameters, the batches and the controls.
        rescaling: largest factor of the random rescaling control.
        angle: of the random rotation control, in degrees.
        labels: names of the labels.
        offsets: of the neighbours to recover.
        layers: stack and index of each of the L layers.
        entered: sums over what entered the first layer, see
            :func:`~attnlens.recovery.packed_tokens.entered_sums`.
        streams: whether normal equations are among these sums.
        store: the tokens; no split that is needed is empty.
    """

    map: MapKind
    distance: Distance
    closed: bool
    training: MapTraining
    seed: int
    rescaling: float
    angle: float
    labels: tuple[str, ...]
    offsets: tuple[int, ...]
    layers: tuple[LayerKey, ...]
    entered: Sums
    streams: bool
    store: TokenStore

    def result(self) -> TokenIdentifiabilityResult:
        """Fit maps to all targets, and count what they identify."""
        maps = self.fit(0)
        assert maps is not None, "every token has itself"
        total: Sums = {}
        generator = torch.Generator().manual_seed(self.seed)
        for batch in held_out(self.store):
            for name, hits in self._hits(maps.parameters, batch, generator).items():
                total[name] = total[name] + hits if name in total else hits
        neighbours = self._missing()[:, None].repeat(1, len(self.offsets))
        for column, offset in enumerate(self.offsets):
            neighbours[:, column] = self.recovered(offset)
        return TokenIdentifiabilityResult(
            self.layers,
            self.map,
            self.distance,
            self.labels,
            self.offsets,
            sequences=self.entered["sequences"],
            tokens=self.entered["tokens"],
            neighbours=neighbours,
            words=self.recovered("words"),
            loss=maps.loss,
            epochs=maps.epochs,
            ridge=maps.ridge,
            **hit_rates(total),
        )

    def fit(self, target: Target) -> Maps | None:
        """Fit the maps of all layers to a target.

        Args:
            target: what to recover.

        Returns:
            The maps, in float32; None if the train or the validation split has no such target.
        """
        if self.map == "naive":
            return Maps((), *(self._missing() for _ in range(3)))
        if self.closed:
            train, validation = self._equations(target)
            if not bool((train.tokens * validation.tokens > 0).all()):
                return None
            maps = best_ridge_maps(train, validation)
            return maps._replace(parameters=tuple(part.float() for part in maps.parameters))
        splits = self._shards(TRAIN, target), self._shards(VALIDATION, target)
        if not all(any(len(load()[1]) for load in shards) for shards in splits):
            return None
        return train_maps(
            self.map,
            self.distance,
            *splits,
            settings=self.training,
            seed=self.seed,
            name=f"{self.map}-{self.distance}-{target}",
            identity=self.store.identity(),
        )

    def recovered(self, target: Target) -> Tensor:
        """Count how many tokens of the test split have a target identified.

        Args:
            target: what to recover.

        Returns:
            Rate by layer, `[L]` float64; NaN where no token has such a target, or there are no
            word embeddings that guesses could be compared with.
        """
        if target == "words":
            test = self.store.shards(TEST)[0]()
            width = test.words.shape[-1]
            if not width or (self.map == "naive" and width != test.hidden.shape[-1]):
                return self._missing()
        maps = self.fit(target)
        if maps is None:
            return self._missing()
        parameters, offset = maps.parameters, 0 if target == "words" else target
        batches = (
            (_guess(parameters, b.hidden), b.words if target == "words" else b.entered, b.mask)
            for b in held_out(self.store)
        )
        return recovery_rate(batches, self.distance, offset)

    def _hits(self, parameters: Parameters, batch: HeldOut, generator: torch.Generator) -> Sums:
        """Count the tokens identified among some sequences, for :func:`hit_rates`."""

        def hits(guess: Tensor) -> Tensor:
            return identified(guess, batch.entered, batch.mask, self.distance).double()

        hidden = batch.hidden
        transfer = torch.stack(
            [hits(_guess(parameters, state.expand_as(hidden))) for state in hidden], 1
        )  # [L, L, S, K]
        own = transfer.diagonal().movedim(-1, 0)  # [L, S, K]
        lengths, per_sequence = batch.mask.sum(1).double(), own.sum(-1)  # [S], [L, S]
        members = (batch.labels[..., None] == torch.arange(len(self.labels))).double()
        guesses = {
            "rescaled": _guess(parameters, rescaled(hidden, self.rescaling, generator)),
            "rotated": _guess(parameters, rotated(hidden, self.angle, generator)),
        }
        return {
            "tokens": lengths.sum(),
            "sequences": (lengths > 0).sum().double(),
            "lengths_squared": lengths.square().sum(),
            "hits_by_lengths": per_sequence @ lengths,
            "hits_squared": per_sequence.square().sum(1),
            "transfer": transfer.sum((-2, -1)),
            "by_label": torch.einsum("lsk,skg->lg", own, members),
            "label_tokens": members.sum((0, 1)),
            "position": hits(self._by_position(batch)).sum(),
            **{name: hits(guess).sum((-2, -1)) for name, guess in guesses.items()},
        }

    def _by_position(self, batch: HeldOut) -> Tensor:
        """Guess the mean input embedding at each position, `[1, S, K, M]`; NaN where unknown."""
        length = batch.mask.shape[1]
        mean = self.entered["position_sum"] / self.entered["position_count"][:, None]
        guess = pad(mean[:length].float(), (0, 0, 0, max(0, length - len(mean))), value=torch.nan)
        return guess.expand(1, *batch.entered.shape)

    def _equations(self, target: Target) -> tuple[NormalEquations, NormalEquations]:
        """Normal equations of the train and validation splits."""
        train, validation = (
            summed_equations(self.entered, split, target)
            if self.streams
            else added_equations([
                normal_equations(*load()) for load in self._shards(split, target)
            ])
            for split in (TRAIN, VALIDATION)
        )
        return train, validation

    def _shards(self, split: int, target: Target) -> Shards:
        return [partial(_with_target, load, target) for load in self.store.shards(split)]

    def _missing(self) -> Tensor:
        return torch.full((len(self.layers),), torch.nan, dtype=torch.float64)


def held_out(store: TokenStore) -> Iterator[HeldOut]:
    """Visit the test split, sequences of similar length together.

    Args:
        store: the tokens.

    Yields:
        Padded sequences of about 4096 tokens.
    """
    for shard in store.shards(TEST):
        sequences = sorted(shard().sequences(), key=lambda sequence: sequence.tokens)
        while sequences:
            count = max(1, _BATCH_TOKENS // sequences[-1].tokens)
            batch = sequences[-count:]
            del sequences[-count:]
            states = pad_sequence([s.hidden.movedim(1, 0) for s in batch], batch_first=True)
            hidden = states.movedim(2, 0).contiguous()  # [L + 1, S, K, M]
            words = pad_sequence([s.words for s in batch], batch_first=True)
            labels = pad_sequence([s.labels for s in batch], batch_first=True, padding_value=-1)
            lengths = torch.tensor([sequence.tokens for sequence in batch])
            mask = torch.arange(hidden.shape[2]) < lengths[:, None]
            yield HeldOut(hidden[1:], hidden[0], words, labels, mask)


def hit_rates(sums: Sums) -> dict[str, Tensor]:
    """Divide hits by numbers of tokens.

    Args:
        sums: hits by name, numbers of `tokens` and `sequences`, and over sequences the sums of
            squared hits, of squared lengths and of hits times lengths.

    Returns:
        Rates by name, as in :class:`~attnlens.recovery.TokenIdentifiabilityResult`.
    """
    tokens, sequences = sums["tokens"], sums["sequences"]
    rate = sums["transfer"].diagonal() / tokens
    # A ratio of sums over sequences, whose tokens are not independent: Σ (hits − rate · length)².
    residual = sums["hits_squared"] - 2 * rate * sums["hits_by_lengths"]
    residual = (residual + rate.square() * sums["lengths_squared"]).clamp_min(0)
    residual = torch.where(sequences > 1, residual * sequences / (sequences - 1), torch.nan)
    rates = {name: sums[name] / tokens for name in ("transfer", "rescaled", "rotated", "position")}
    return rates | {
        "rate": rate,
        "error": residual.sqrt() / tokens,
        "by_label": sums["by_label"] / sums["label_tokens"],
        "chance": sequences / tokens,
    }


def _with_target(load: Callable[[], PackedTokens], target: Target) -> Tokens:
    return load().with_target(target)


def _guess(parameters: Parameters, hidden: Tensor) -> Tensor:
    """Apply maps to the hidden states of sequences, `[L, S, K, M]`."""
    guess = apply_map(parameters, hidden.flatten(1, 2))
    return guess.reshape(*hidden.shape[:3], -1)
