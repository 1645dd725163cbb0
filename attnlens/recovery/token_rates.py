"""Fit maps to stored tokens, and count what they identify among the test sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlens.recovery.map_training import MapTraining, Tokens, train_maps
from attnlens.recovery.token_maps import (
    Distance,
    NormalEquations,
    Parameters,
    apply_map,
    best_ridge_maps,
    has_neighbour,
    identified,
    neighbour_rows,
    normal_equations,
    rescaled,
    rotated,
)
from attnlens.recovery.token_store import (
    TEST,
    TRAIN,
    VALIDATION,
    PackedTokens,
    TokenSequence,
    TokenStore,
)

Target = int | Literal["words"]
"""What to recover: the input embedding of the token at an offset, 0 being its own, or its word."""

_BATCH_TOKENS = 4096


class Maps(NamedTuple):
    """Maps of all layers to one target, and how they came about; NaN where that does not apply.

    Attributes:
        parameters: see :func:`~attnlens.recovery.token_maps.apply_map`.
        loss: on the validation split, `[L]`.
        epochs: of training, `[L]`.
        ridge: ridge term, `[L]`.
    """

    parameters: Parameters
    loss: Tensor
    epochs: Tensor
    ridge: Tensor


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


def tokens_of(packed: PackedTokens, target: Target) -> Tokens:
    """Pair hidden states with a target.

    Args:
        packed: sequences.
        target: what to recover; tokens without it are left out.

    Returns:
        Hidden states `[L, N, M]` and targets `[N, M']`.
    """
    entered, hidden = packed.hidden[0], packed.hidden[1:]
    if target == "words":
        return hidden, packed.words
    if target == 0:
        return hidden, entered
    rows, neighbours = neighbour_rows(packed.lengths, target)
    return hidden[:, rows], entered[neighbours]


def fit_maps(
    store: TokenStore,
    target: Target,
    kind: Literal["linear", "mlp"],
    distance: Distance,
    training: MapTraining,
    seed: int,
) -> Maps:
    """Train a map per layer on the training split.

    Args:
        store: the tokens.
        target: what to recover.
        kind: see :class:`~attnlens.recovery.token_identifiability.TokenIdentifiability`.
        distance: what to minimise.
        training: how to train.
        seed: of the training.

    Returns:
        The maps.
    """
    train, validation = (
        [partial(_loaded, shard, target) for shard in store.shards(split)]
        for split in (TRAIN, VALIDATION)
    )
    trained = train_maps(
        kind,
        distance,
        train,
        validation,
        training,
        seed=seed,
        name=f"{kind}-{distance}-{target}",
        identity=store.identity(),
    )
    return Maps(*trained, torch.full_like(trained.loss, torch.nan))


def solve_maps(train: NormalEquations, validation: NormalEquations) -> Maps:
    """Solve for the linear map per layer with the smallest squared error.

    Args:
        train: equations of the training split.
        validation: equations of the validation split.

    Returns:
        The maps.
    """
    solved = best_ridge_maps(train, validation)
    parameters = tuple(part.float() for part in solved.parameters)
    return Maps(parameters, solved.loss, torch.full_like(solved.loss, torch.nan), solved.ridge)


def stored_equations(store: TokenStore, split: int, target: Target) -> NormalEquations:
    """Sum the normal equations over a stored split.

    Args:
        store: the tokens.
        split: which.
        target: what to recover.

    Returns:
        The sums.
    """
    parts = [normal_equations(*_loaded(shard, target)) for shard in store.shards(split)]
    return NormalEquations(*(torch.stack(entries).sum(0) for entries in zip(*parts, strict=True)))


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
            yield _padded(sequences[-count:])
            del sequences[-count:]


class Counts:
    """Hits among test sequences, added up by :meth:`add`.

    Args:
        parameters: maps of all layers to the tokens' own input embeddings.
        distance: of the search.
        labels: number of labels G.
    """

    def __init__(self, parameters: Parameters, distance: Distance, labels: int) -> None:
        self.parameters, self.distance, self.labels = parameters, distance, labels
        self.transfer = self.by_label = self.rescaled = self.rotated = torch.zeros(())
        self.label_tokens = self.position = self.chance = torch.zeros((), dtype=torch.float64)
        self.by_sequence: list[Tensor] = []  # [L, S] each
        self.lengths: list[Tensor] = []

    def add(
        self,
        batch: HeldOut,
        *,
        mean_entered: Tensor,
        rescaling: float,
        angle: float,
        generator: torch.Generator,
    ) -> None:
        """Count the hits in some sequences.

        Args:
            batch: the sequences.
            mean_entered: mean input embedding at each position, `[P, M]`; NaN where unknown.
            rescaling: largest factor of the rescaling control.
            angle: of the rotation control, in degrees.
            generator: source of both.
        """
        find = partial(_hits, batch=batch, distance=self.distance)
        transfer = torch.stack(
            [find(_guess(self.parameters, h.expand_as(batch.hidden))) for h in batch.hidden], 1
        )  # [L, L, S, K]
        own = transfer.diagonal().movedim(-1, 0).double()  # [L, S, K]
        changed = (
            rescaled(batch.hidden, rescaling, generator),
            rotated(batch.hidden, angle, generator),
        )
        scaled, turned = (find(_guess(self.parameters, hidden)) for hidden in changed)
        lengths = batch.mask.sum(1).double()
        members = (batch.labels[..., None] == torch.arange(self.labels)).double()
        self.transfer = self.transfer + transfer.sum((-2, -1)).double()
        self.rescaled = self.rescaled + scaled.sum((-2, -1)).double()
        self.rotated = self.rotated + turned.sum((-2, -1)).double()
        self.by_label = self.by_label + torch.einsum("lsk,skg->lg", own, members)
        self.label_tokens = self.label_tokens + members.sum((0, 1))
        self.position = self.position + find(_by_position(batch, mean_entered)).sum().double()
        self.chance = self.chance + (lengths > 0).sum()
        self.by_sequence.append(own.sum(-1))
        self.lengths.append(lengths)

    def rates(self) -> dict[str, Tensor]:
        """Divide by the numbers of tokens.

        Returns:
            Rates by name, as in :class:`~attnlens.recovery.TokenIdentifiabilityResult`.
        """
        lengths, hits = torch.cat(self.lengths), torch.cat(self.by_sequence, 1)
        tokens = lengths.sum()
        rate = hits.sum(1) / tokens
        # A ratio of sums over sequences, whose tokens are not independent.
        residual = hits - rate[:, None] * lengths
        sequences = len(lengths)
        spread = residual.square().sum(1) * (sequences / (sequences - 1) if sequences > 1 else 0)
        return {
            "rate": rate,
            "error": spread.sqrt() / tokens if sequences > 1 else rate * torch.nan,
            "transfer": self.transfer / tokens,
            "by_label": self.by_label / self.label_tokens,
            "rescaled": self.rescaled / tokens,
            "rotated": self.rotated / tokens,
            "position": self.position / tokens,
            "chance": self.chance / tokens,
        }


def recovery_rate(
    store: TokenStore, parameters: Parameters, target: Target, distance: Distance
) -> Tensor:
    """Count the targets that maps recover among the test sequences.

    Args:
        store: the tokens.
        parameters: maps to the target.
        target: what to recover.
        distance: of the search.

    Returns:
        Rates, `[L]` float64.
    """
    hits, tokens = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    offset = 0 if target == "words" else target
    for batch in held_out(store):
        candidates = batch.words if target == "words" else batch.entered
        guess = _guess(parameters, batch.hidden)
        found = identified(guess, candidates, batch.mask, distance, offset)
        hits = hits + found.sum((-2, -1)).double()
        tokens = tokens + has_neighbour(batch.mask, offset).sum()
    return hits / tokens


def _loaded(shard: Callable[[], PackedTokens], target: Target) -> Tokens:
    return tokens_of(shard(), target)


def _padded(sequences: list[TokenSequence]) -> HeldOut:
    def padded(name: str, value: float = 0.0) -> Tensor:
        parts = [getattr(sequence, name) for sequence in sequences]
        return pad_sequence(parts, batch_first=True, padding_value=value)

    hidden = pad_sequence([s.hidden.movedim(1, 0) for s in sequences], batch_first=True)
    hidden = hidden.movedim(2, 0).contiguous()  # [L + 1, S, K, M]
    lengths = torch.tensor([sequence.tokens for sequence in sequences])
    mask = torch.arange(hidden.shape[2]) < lengths[:, None]
    return HeldOut(hidden[1:], hidden[0], padded("words"), padded("labels", -1), mask)


def _guess(parameters: Parameters, hidden: Tensor) -> Tensor:
    """Apply maps to `[L, S, K, M]`."""
    return apply_map(parameters, hidden.flatten(1, 2)).unflatten(1, hidden.shape[1:3])


def _hits(guess: Tensor, *, batch: HeldOut, distance: Distance) -> Tensor:
    return identified(guess, batch.entered, batch.mask, distance)


def _by_position(batch: HeldOut, mean_entered: Tensor) -> Tensor:
    """The mean input embedding at each position, `[1, S, K, M]`."""
    count, length = batch.mask.shape
    known = min(length, len(mean_entered))
    guess = torch.full((length, mean_entered.shape[1]), torch.nan)
    guess[:known] = mean_entered[:known]
    return guess.expand(1, count, -1, -1)
