"""The state of a scan between two chunks, and its file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from attnlens.corpus.identity import require_same
from attnlens.corpus.shards import Shard
from attnlens.corpus.sums import ExactSums
from attnlens.errors import InputError
from attnlens.files import load_state, save_state
from attnlens.observer import Observer, part_of

ANEW = "Choose another folder, or begin anew with resume=False."
_NAME = re.compile(r"shard-(\d+)-of-(\d+)\.safetensors")


@dataclass
class Counts:
    """How much was read.

    Attributes:
        records: examples that went through the model.
        tokens: their tokens, special tokens included.
        truncated: examples that were cut to what the model can read.
        rejected: entries of the corpus that were none.
    """

    records: int = 0
    tokens: int = 0
    truncated: int = 0
    rejected: int = 0

    def add(self, other: Counts) -> None:
        """Add other counts to these.

        Args:
            other: left unchanged.
        """
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(eq=False)
class State:
    """What a process has seen of its part of a corpus.

    Attributes:
        observers: with their sums.
        chunks: number of chunks of the whole corpus that are done or belong to others.
        digest: of the records in them.
        finished: whether the corpus ended there.
        counts: how much was read.
    """

    observers: tuple[ExactSums, ...]
    chunks: int = 0
    digest: str = ""
    finished: bool = False
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def of(cls, observers: Sequence[Observer]) -> State:
        """Begin with observers that have seen nothing."""
        for observer in observers:
            observer.reset()
        return cls(tuple(map(ExactSums, observers)))

    def tensors(self) -> dict[str, Tensor]:
        """Return the states of the observers as named tensors."""
        return {
            f"{place}/{name}": tensor
            for place, sums in enumerate(self.observers)
            for name, tensor in sums.state_dict().items()
        }

    def progress(self) -> dict[str, Any]:
        """Return what is no tensor, ready for JSON."""
        return {
            "corpus": {"chunks": self.chunks, "digest": self.digest},
            "finished": self.finished,
            "counts": asdict(self.counts),
        }

    def restore(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Take up what :meth:`tensors` and :meth:`progress` returned.

        Args:
            tensors: the former.
            progress: the latter.
        """
        for place, sums in enumerate(self.observers):
            sums.load_state_dict(part_of(tensors, f"{place}/"))
        self.counts = Counts()
        self._move(progress)

    def add(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Add what another process has seen of its part of the corpus.

        Args:
            tensors: of the other.
            progress: of the other.
        """
        for place, sums in enumerate(self.observers):
            sums.add_state(part_of(tensors, f"{place}/"))
        self._move(progress)

    def _move(self, progress: Mapping[str, Any]) -> None:
        self.chunks, self.digest = progress["corpus"]["chunks"], progress["corpus"]["digest"]
        self.finished = progress["finished"]
        self.counts.add(Counts(**progress["counts"]))


def shard_path(folder: Path, shard: Shard) -> Path:
    """Name the file of a shard."""
    return folder / f"shard-{shard.index}-of-{shard.count}.safetensors"


def shard_files(folder: Path) -> Iterator[tuple[Path, Shard]]:
    """Find the files of shards in a folder.

    Args:
        folder: the folder.

    Yields:
        Paths, and which shard each is.
    """
    for path in sorted(folder.iterdir()):
        if name := _NAME.fullmatch(path.name):
            yield path, Shard(int(name[1]), int(name[2]))


def write(path: Path, state: State, about: Mapping[str, Any]) -> None:
    """Write a checkpoint, whole or not at all.

    Args:
        path: the file.
        state: the state.
        about: what the scan is made of.

    Raises:
        InputError: if it cannot be written.
    """
    try:
        save_state(state.tensors(), path, {**about, **state.progress()})
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from error


def resume(path: Path, state: State, about: Mapping[str, Any]) -> None:
    """Take up a checkpoint, if there is one.

    Args:
        path: the file.
        state: takes it up.
        about: what the scan is made of, which must be what it was made of.
    """
    if path.exists():
        tensors, noted = load_state(path)
        require_same(noted, about, str(path), ANEW)
        state.restore(tensors, noted)


def made(folder: Path) -> Path:
    """Make a folder, unless there is one.

    Args:
        folder: the folder.

    Returns:
        The same.

    Raises:
        InputError: if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make the folder {folder}: {error.strerror}.") from error
    return folder


def require_one_layout(folder: Path, shard: Shard) -> None:
    """Refuse a folder with results of the same corpus cut into another number of parts.

    Args:
        folder: the folder.
        shard: the part of this process.

    Raises:
        InputError: if there is one.
    """
    for path, other in shard_files(folder):
        if other.count != shard.count:
            raise InputError(
                f"{path} is one of {other.count} shards, and here the corpus is cut into "
                f"{shard.count}. Choose another folder."
            )
