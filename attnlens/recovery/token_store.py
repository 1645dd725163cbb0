"""A bounded random sample of sequences with the hidden states of their tokens."""

from __future__ import annotations

import hashlib
import heapq
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from attnlens.errors import AttnLensWarning, InputError
from attnlens.files import write_tensors

TRAIN, VALIDATION, TEST = range(3)
_SHARD_BYTES = 2**27
_ALL = 2**63 - 1  # above every priority, and an int64


class TokenSequence(NamedTuple):
    """One sequence of real tokens.

    Attributes:
        priority: sequences with the smallest ones are kept, in [0, 2⁶³).
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
        """Pack sequences.

        Args:
            sequences: at least one.

        Returns:
            Copies of their tensors.
        """
        return cls(
            torch.cat([sequence.hidden for sequence in sequences], 1),
            torch.cat([sequence.words for sequence in sequences]),
            torch.cat([sequence.labels for sequence in sequences]),
            torch.tensor([sequence.tokens for sequence in sequences]),
            torch.tensor([sequence.priority for sequence in sequences]),
            torch.tensor([sequence.split for sequence in sequences]),
        )

    def select(self, keep: Tensor) -> PackedTokens:
        """Return some of the sequences.

        Args:
            keep: `[S]` bool.

        Returns:
            Copies of their tensors.
        """
        rows = keep.repeat_interleave(self.lengths)
        per_token = (self.hidden[:, rows], self.words[rows], self.labels[rows])
        return PackedTokens(*per_token, self.lengths[keep], self.priority[keep], self.split[keep])

    def cpu(self) -> PackedTokens:
        """Return the same on the CPU."""
        return PackedTokens(*(tensor.cpu() for tensor in self))

    def sequences(self) -> list[TokenSequence]:
        """Return the sequences, each with tensors of its own."""
        lengths = self.lengths.tolist()
        parts = zip(
            self.priority.tolist(),
            self.split.tolist(),
            self.hidden.split(lengths, 1),
            self.words.split(lengths),
            self.labels.split(lengths),
            strict=True,
        )
        return [TokenSequence(p, s, h.clone(), w.clone(), g.clone()) for p, s, h, w, g in parts]


def fingerprint(content: bytes, seed: int) -> tuple[float, int]:
    """Place a sequence by its content, so that equal ones share a place wherever they are seen.

    Args:
        content: what the sequence is made of.
        seed: another seed gives other places.

    Returns:
        Two independent hashes: a position in [0, 1) that chooses the split, and a priority.
    """
    digest = hashlib.blake2b(content, digest_size=16, key=str(seed).encode()).digest()
    place, priority = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
    return (place >> 11) / 2**53, priority >> 1


class TokenStore:
    """Sequences up to a number of tokens, in memory or in a folder.

    If more are offered, those with the smallest priorities are kept: a random sample that does not
    depend on the order in which they came, nor on whether stores were merged.

    Args:
        max_tokens: most tokens to keep, or None.
        max_bytes: most bytes to keep, in memory or in the folder.
        folder: where to keep them in float16, as safetensors files; in memory if None.

    Raises:
        InputError: if the folder holds files already.
    """

    def __init__(
        self, max_tokens: int | None, max_bytes: int, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.max_tokens, self.max_bytes = max_tokens, max_bytes
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise InputError(f"folder must be empty or new. {self.folder} holds files.")
        self._files: dict[Path, list[tuple[int, int]]] = {}
        self.clear()

    @property
    def on_disk(self) -> bool:
        """Whether sequences go to files."""
        return self.folder is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the sequences held in memory."""
        return sum(sequence.nbytes for sequence in self._buffer)

    @property
    def tokens(self) -> int:
        """Number of tokens kept."""
        return self._tokens

    def clear(self) -> None:
        """Forget everything, and remove the files."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = {}
        self._written = 0
        self._buffer: list[TokenSequence] = []
        self._kept: list[tuple[int, int]] = []  # heap of (−priority, tokens)
        self._tokens = 0
        self._cut = _ALL  # priorities from here on are not kept

    def extend(self, sequences: Iterable[TokenSequence]) -> None:
        """Offer sequences.

        Args:
            sequences: all with the same L, M and W.
        """
        cut = self._cut
        for sequence in sequences:
            if sequence.priority >= self._cut:
                continue
            self._buffer.append(self._narrowed(sequence))
            heapq.heappush(self._kept, (-sequence.priority, sequence.tokens))
            self._tokens += sequence.tokens
            while self._tokens > self._capacity(sequence):
                self._evict()
        if self._cut < cut:
            if cut == _ALL:
                warnings.warn(
                    "There are more tokens than may be kept; a random sample of the sequences is. "
                    "Raise max_tokens or max_bytes to keep more.",
                    AttnLensWarning,
                    stacklevel=2,
                )
            self._buffer = [s for s in self._buffer if s.priority < self._cut]
            self._thin_out()
        if self.folder is not None:
            self._flush(self.folder)

    def shards(self, split: int) -> list[Callable[[], PackedTokens]]:
        """List the parts of a split; each is loaded, in float32, by a call.

        Args:
            split: `TRAIN`, `VALIDATION` or `TEST`.

        Returns:
            Functions without arguments, in an order that depends on the sequences alone if they
            are in memory.
        """
        chosen = sorted(
            (s for s in self._buffer if s.split == split), key=lambda s: (s.priority, s.tokens)
        )
        files = [path for path in self._files if path.name.startswith(f"{split}-")]
        in_memory = [partial(_in_float, PackedTokens.of, group) for group in _groups(chosen)]
        return [*in_memory, *(partial(_in_float, self._load, path) for path in files)]

    def merge(self, other: TokenStore) -> None:
        """Offer what another store has kept, and leave out what it left out.

        Args:
            other: left unchanged; of the same limits.
        """
        self._lower(other._cut)
        for packed in other.packed():
            self.extend(packed.sequences())

    def packed(self) -> Iterator[PackedTokens]:
        """Visit everything kept, a part at a time.

        Yields:
            Sequences of any split.
        """
        for group in _groups(self._buffer):
            yield PackedTokens.of(group)
        for path in self._files:
            yield self._load(path)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything kept as named tensors; in memory, also from a folder."""
        sequences = [sequence for packed in self.packed() for sequence in packed.sequences()]
        cut = {"cut": torch.tensor(self._cut)}
        return cut | (PackedTokens.of(sequences)._asdict() if sequences else {})

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Offer what a state holds.

        Args:
            state: of :meth:`state_dict`.
        """
        self._lower(int(state["cut"]))
        if "hidden" in state:
            self.extend(PackedTokens(*(state[name] for name in PackedTokens._fields)).sequences())

    def identity(self) -> str:
        """Return a digest of which sequences are kept."""
        priorities = sorted(-negative for negative, _ in self._kept)
        return hashlib.blake2b(repr(priorities).encode(), digest_size=16).hexdigest()

    def _capacity(self, sequence: TokenSequence) -> int:
        """Most tokens to keep, given what each takes."""
        numbers = sequence.hidden[:, 0].numel() + sequence.words[0].numel()
        limit = self.max_bytes // (numbers * (2 if self.on_disk else 4) + 8)
        return limit if self.max_tokens is None else min(limit, self.max_tokens)

    def _evict(self) -> None:
        """Let go of the sequence with the largest priority, and of its equals."""
        self._cut = -self._kept[0][0]
        while self._kept and -self._kept[0][0] >= self._cut:
            self._tokens -= heapq.heappop(self._kept)[1]

    def _lower(self, cut: int) -> None:
        """Accept that sequences from a priority on were left out elsewhere."""
        if cut >= self._cut:
            return
        self._cut = cut
        while self._kept and -self._kept[0][0] >= cut:
            self._tokens -= heapq.heappop(self._kept)[1]
        self._buffer = [s for s in self._buffer if s.priority < cut]
        self._thin_out()

    def _narrowed(self, sequence: TokenSequence) -> TokenSequence:
        dtype = torch.float16 if self.on_disk else torch.float32
        hidden, words = sequence.hidden.to(dtype), sequence.words.to(dtype)
        if self.on_disk and not bool(hidden.isfinite().all()):
            raise InputError(
                f"Hidden states of up to {sequence.hidden.abs().max():.3g} do not fit into the "
                f"float16 numbers of a folder. Keep them in memory: folder=None."
            )
        return sequence._replace(hidden=hidden, words=words)

    def _flush(self, folder: Path) -> None:
        """Write the splits of which enough is in memory."""
        for split in (TRAIN, VALIDATION, TEST):
            chosen = [s for s in self._buffer if s.split == split]
            if sum(sequence.nbytes for sequence in chosen) < _SHARD_BYTES:
                continue
            path = folder / f"{split}-{self._written:06}.safetensors"
            self._written += 1
            write_tensors(path, PackedTokens.of(chosen)._asdict())
            self._files[path] = [(s.priority, s.tokens) for s in chosen]
            self._buffer = [s for s in self._buffer if s.split != split]

    def _thin_out(self) -> None:
        """Take what is left of files that are mostly obsolete back into memory."""
        for path, members in list(self._files.items()):
            kept = sum(tokens for priority, tokens in members if priority < self._cut)
            if 2 * kept < sum(tokens for _, tokens in members):
                self._buffer += self._load(path).sequences() if kept else []
                del self._files[path]
                path.unlink()

    def _load(self, path: Path) -> PackedTokens:
        """Read a file, without the sequences that are no longer kept."""
        tensors = load_file(path)
        packed = PackedTokens(*(tensors[name] for name in PackedTokens._fields))
        kept = packed.priority < self._cut
        return packed if bool(kept.all()) else packed.select(kept)


def _groups(sequences: Sequence[TokenSequence]) -> Iterator[list[TokenSequence]]:
    """Cut a list of sequences where `_SHARD_BYTES` are reached."""
    group: list[TokenSequence] = []
    size = 0
    for sequence in sequences:
        group.append(sequence)
        size += sequence.nbytes
        if size >= _SHARD_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _in_float(load: Callable[[Any], PackedTokens], source: Any) -> PackedTokens:
    packed = load(source)
    return packed._replace(hidden=packed.hidden.float(), words=packed.words.float())
