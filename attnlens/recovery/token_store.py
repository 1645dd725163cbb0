"""A bounded random sample of sequences with the hidden states of their tokens."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from attnlens.errors import AttnLensWarning, InputError
from attnlens.files import write_tensors
from attnlens.recovery.packed_tokens import (
    TEST,
    TRAIN,
    VALIDATION,
    PackedTokens,
    TokenSequence,
)

_SHARD_BYTES = 2**27
_ALL = 2**63 - 1  # above every priority, and an int64


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
        self._files: dict[Path, list[tuple[int, int]]] = {}  # priorities and tokens of each
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the sequences held in memory."""
        return sum(sequence.nbytes for sequence in self._buffer)

    @property
    def tokens(self) -> int:
        """Number of tokens kept."""
        return sum(tokens for _, tokens in self._members())

    def clear(self) -> None:
        """Forget everything, and remove the files."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = {}
        self._written = 0
        self._buffer: list[TokenSequence] = []
        self._cut = _ALL  # priorities from here on are left out

    def extend(self, sequences: Iterable[TokenSequence]) -> None:
        """Offer sequences.

        Args:
            sequences: all with the same L, M and W.

        Raises:
            InputError: if numbers do not fit into the float16 of a folder; nothing is then taken.
        """
        offered = [self._narrowed(s) for s in sequences if s.priority < self._cut]
        if not offered:
            return
        self._buffer += offered
        capacity, total = self._capacity(offered[0]), 0
        for priority, tokens in sorted(self._members()):
            total += tokens
            if total > capacity:
                if self._cut == _ALL:
                    warnings.warn(
                        "There are more tokens than may be kept; a random sample of the sequences "
                        "is. Raise max_tokens or max_bytes to keep more.",
                        AttnLensWarning,
                        stacklevel=2,
                    )
                self._leave_out(priority)
                break
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
        in_memory = sorted(
            (s for s in self._buffer if s.split == split), key=lambda s: (s.priority, s.tokens)
        )
        parts = [partial(PackedTokens.of, group) for group in _groups(in_memory)]
        parts += [partial(self._load, path) for path in self._files if _split_of(path) == split]
        return [partial(_in_float, part) for part in parts]

    def merge(self, other: TokenStore) -> None:
        """Offer what another store has kept, and leave out what it left out.

        Args:
            other: left unchanged; of the same limits.
        """
        self._leave_out(other._cut)
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
        self._leave_out(int(state["cut"]))
        if "hidden" in state:
            self.extend(_of_names(state).sequences())

    def identity(self) -> str:
        """Return a digest of which sequences are kept."""
        priorities = sorted(priority for priority, _ in self._members())
        return hashlib.blake2b(repr(priorities).encode(), digest_size=16).hexdigest()

    def _capacity(self, sequence: TokenSequence) -> int:
        """Most tokens to keep, given what each takes."""
        numbers = sequence.hidden[:, 0].nbytes + sequence.words[0].nbytes
        limit = self.max_bytes // (numbers + 8)
        return limit if self.max_tokens is None else min(limit, self.max_tokens)

    def _members(self) -> Iterator[tuple[int, int]]:
        """Priority and number of tokens of every sequence kept."""
        yield from ((s.priority, s.tokens) for s in self._buffer)
        for members in self._files.values():
            yield from (member for member in members if member[0] < self._cut)

    def _leave_out(self, cut: int) -> None:
        """Let go of the sequences with priorities from a number on."""
        if cut >= self._cut:
            return
        self._cut = cut
        self._buffer = [s for s in self._buffer if s.priority < cut]
        for path, members in list(self._files.items()):
            left = sum(tokens for priority, tokens in members if priority < cut)
            # What is left of a file that is mostly obsolete is taken back into memory.
            if 2 * left < sum(tokens for _, tokens in members):
                self._buffer += self._load(path).sequences() if left else []
                del self._files[path]
                path.unlink()

    def _narrowed(self, sequence: TokenSequence) -> TokenSequence:
        dtype = torch.float32 if self.folder is None else torch.float16
        hidden, words = sequence.hidden.to(dtype), sequence.words.to(dtype)
        for wide, narrow in ((sequence.hidden, hidden), (sequence.words, words)):
            if self.folder is not None and not bool(narrow.isfinite().all()):
                raise InputError(
                    f"Hidden states or words of up to {wide.abs().max():.3g} do not fit into the "
                    f"float16 numbers of a folder. Keep them in memory: folder=None."
                )
        return sequence._replace(hidden=hidden, words=words)

    def _flush(self, folder: Path) -> None:
        """Write the splits of which enough is in memory."""
        for split in (TRAIN, VALIDATION, TEST):
            full = [s for s in self._buffer if s.split == split]
            if sum(sequence.nbytes for sequence in full) < _SHARD_BYTES:
                continue
            path = folder / f"{split}-{self._written:06}.safetensors"
            self._written += 1
            write_tensors(path, PackedTokens.of(full)._asdict())
            self._files[path] = [(s.priority, s.tokens) for s in full]
            self._buffer = [s for s in self._buffer if s.split != split]

    def _load(self, path: Path) -> PackedTokens:
        """Read a file, without the sequences that are no longer kept."""
        packed = _of_names(load_file(path))
        current = packed.priority < self._cut
        return packed if bool(current.all()) else packed.select(current)


def _of_names(tensors: Mapping[str, Tensor]) -> PackedTokens:
    return PackedTokens(*(tensors[name] for name in PackedTokens._fields))


def _split_of(path: Path) -> int:
    return int(path.name.partition("-")[0])


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


def _in_float(load: Callable[[], PackedTokens]) -> PackedTokens:
    packed = load()
    return packed._replace(hidden=packed.hidden.float(), words=packed.words.float())
