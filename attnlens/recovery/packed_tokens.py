"""Sequences of tokens with their hidden states, one after the other, and what is summed of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnlens.observer import Sums
from attnlens.recovery.ridge_maps import NormalEquations, normal_equations

TRAIN, VALIDATION, TEST = range(3)
SPLITS = ("train", "validation", "test")

Target = int | Literal["words"]
"""What to recover: the input embedding of the token at an offset, 0 being its own, or its word."""

Tokens = tuple[Tensor, Tensor]
"""Hidden states `[L, N, M]` and their targets `[N, M']`."""


class TokenSequence(NamedTuple):
    """One sequence of real tokens.

    Attributes:
        priority: sequences with the smallest ones are kept, in `[0, 2⁶³)`.
        split: `TRAIN`, `VALIDATION` or `TEST`.
        hidden: `[L + 1, K, M]`: what entered the first layer, then what left each.
        words: `[K, W]`, word embeddings; W is 0 where they are not known.
        labels: `[K]` int64.
    """

    priority: int
    split: int
    hidden: Tensor
    words: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens K."""
        return self.hidden.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.hidden.nbytes + self.words.nbytes + self.labels.nbytes


class PackedTokens(NamedTuple):
    """Sequences one after the other.

    Attributes:
        hidden: `[L + 1, N, M]`.
        words: `[N, W]`.
        labels: `[N]` int64.
        lengths: `[S]` int64, tokens of each sequence; they sum to N.
        priority: `[S]` int64.
        split: `[S]` int64.
    """

    hidden: Tensor
    words: Tensor
    labels: Tensor
    lengths: Tensor
    priority: Tensor
    split: Tensor

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> PackedTokens:
        """Pack sequences, at least one, into copies of their tensors."""
        return cls(
            torch.cat([sequence.hidden for sequence in sequences], 1),
            torch.cat([sequence.words for sequence in sequences]),
            torch.cat([sequence.labels for sequence in sequences]),
            torch.tensor([sequence.tokens for sequence in sequences]),
            torch.tensor([sequence.priority for sequence in sequences]),
            torch.tensor([sequence.split for sequence in sequences]),
        )

    def select(self, sequences: Tensor) -> PackedTokens:
        """Return copies of some of the sequences, given as `[S]` bool."""
        rows = sequences.repeat_interleave(self.lengths)
        of_tokens = (self.hidden[:, rows], self.words[rows], self.labels[rows])
        of_sequences = (self.lengths[sequences], self.priority[sequences], self.split[sequences])
        return PackedTokens(*of_tokens, *of_sequences)

    def sequences(self) -> list[TokenSequence]:
        """Return the sequences on the CPU, each with tensors of its own."""
        cpu = PackedTokens(*(tensor.cpu() for tensor in self))
        lengths = cpu.lengths.tolist()
        parts = zip(
            cpu.priority.tolist(),
            cpu.split.tolist(),
            torch.split(cpu.hidden, lengths, 1),
            torch.split(cpu.words, lengths),
            torch.split(cpu.labels, lengths),
            strict=True,
        )
        return [TokenSequence(p, s, *(t.clone() for t in tensors)) for p, s, *tensors in parts]

    def with_target(self, target: Target) -> Tokens:
        """Pair hidden states with what to recover; tokens without it are left out."""
        entered, hidden = self.hidden[0], self.hidden[1:]
        if target == "words":
            return hidden, self.words
        rows, neighbours = neighbour_rows(self.lengths, target)
        return hidden[:, rows], entered[neighbours]


def neighbour_rows(lengths: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Pair the tokens of packed sequences with their neighbours at an offset.

    Args:
        lengths: number of tokens of each sequence, `[S]`; sequences follow each other.
        offset: signed distance.

    Returns:
        Indices of tokens that have such a neighbour, and of the neighbours.

    Examples:
        >>> neighbour_rows(torch.tensor([3, 2]), 1)
        (tensor([0, 1, 3]), tensor([1, 2, 4]))
    """
    owner = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    rows = torch.arange(len(owner), device=lengths.device)
    rows = rows[(rows + offset >= 0) & (rows + offset < len(owner))]
    rows = rows[owner[rows] == owner[rows + offset]]
    return rows, rows + offset


def fingerprint(content: bytes, seed: int) -> tuple[float, int]:
    """Place a sequence by its content, so that equal ones share a place wherever they are seen.

    Args:
        content: what the sequence is made of.
        seed: another seed gives other places.

    Returns:
        Two independent hashes: a position in `[0, 1)` that chooses the split, and a priority.
    """
    digest = hashlib.blake2b(content, digest_size=16, key=str(seed).encode()).digest()
    place, priority = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
    return (place >> 11) / 2**53, priority >> 1


def entered_sums(packed: PackedTokens, positions: int) -> Sums:
    """Count sequences and tokens by split, and sum train input embeddings by position.

    Args:
        packed: the sequences.
        positions: P, the number of positions from the first.

    Returns:
        Numbers of `sequences` and `tokens`, `[3]`; `position_sum`, `[P, M]`, and
        `position_count`, `[P]`. All float64.
    """
    splits = torch.arange(len(SPLITS), device=packed.split.device)
    members = (packed.split[:, None] == splits).double()  # [S, 3]
    ends = packed.lengths.cumsum(0)
    starts = (ends - packed.lengths).repeat_interleave(packed.lengths)
    position = torch.arange(len(starts), device=starts.device) - starts
    counted = (packed.split == TRAIN).repeat_interleave(packed.lengths) & (position < positions)
    entered, position = packed.hidden[0, counted].double(), position[counted]
    total = entered.new_zeros(positions, entered.shape[1])
    return {
        "sequences": members.sum(0),
        "tokens": (members * packed.lengths[:, None]).sum(0),
        "position_sum": total.index_add_(0, position, entered),
        "position_count": position.bincount(minlength=positions).double(),
    }


def equation_sums(packed: PackedTokens, targets: Sequence[Target]) -> Sums:
    """Sum the normal equations of the train and validation splits.

    Args:
        packed: the sequences.
        targets: what to recover.

    Returns:
        Entries of the equations by target and name, `[2, L, …]` float64.
    """
    sums: Sums = {}
    for target in targets:
        parts = [
            normal_equations(*packed.select(packed.split == split).with_target(target))
            for split in (TRAIN, VALIDATION)
        ]
        for name, *entries in zip(NormalEquations._fields, *parts, strict=True):
            sums[f"{target}.{name}"] = torch.stack(entries)
    return sums


def summed_equations(sums: Sums, split: int, target: Target) -> NormalEquations:
    """Read the equations of a split off sums of :func:`equation_sums`.

    Args:
        sums: the sums.
        split: `TRAIN` or `VALIDATION`.
        target: what to recover.

    Returns:
        The equations of all layers.
    """
    return NormalEquations(*(sums[f"{target}.{name}"][split] for name in NormalEquations._fields))
