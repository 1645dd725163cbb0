"""The state of a scan between two chunks, and the file it is saved to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from attnlens.corpus.identity import require_same
from attnlens.corpus.shards import Shard
from attnlens.corpus.sums import ExactSums
from attnlens.errors import InputError
from attnlens.files import load_state, save_state
from attnlens.observer import Observer, part_of

ANEW = "Choose another folder, or begin anew with resume=False."
FILES = "*shard-*-of-*"
"""Names of the files of a scan in its folder, the locks included."""

_NAME = re.compile(r"shard-(\d+)-of-(\d+)\.safetensors")


@dataclass
class Counts:
    """How much of a corpus was read.

    Attributes:
        records: number of examples that the model read.
        tokens: number of their tokens, including special tokens.
        truncated: number of examples that were cut to the longest length the model can read.
        rejected: number of entries of the corpus that are no examples.
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
        observers: the observers with their sums.
        chunks: number of chunks of the whole corpus up to here, also those of other processes.
        digest: digest of the records in these chunks.
        finished: whether the corpus ends with these chunks.
        counts: how much this process has read.
    """

    observers: tuple[ExactSums, ...]
    chunks: int = 0
    digest: str = ""
    finished: bool = False
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def of(cls, observers: Sequence[Observer]) -> State:
        """Reset observers and begin with them."""
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
        """Return everything but tensors, ready for JSON."""
        return {
            "corpus": {"chunks": self.chunks, "digest": self.digest},
            "finished": self.finished,
            "counts": asdict(self.counts),
        }

    def restore(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Replace the state by a saved one.

        Args:
            tensors: what :meth:`tensors` returned.
            progress: what :meth:`progress` returned.
        """
        for place, sums in enumerate(self.observers):
            sums.load_state_dict(part_of(tensors, f"{place}/"))
        self.counts = Counts()
        self._move(progress)

    def add(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Add what another process has seen of its part of the corpus.

        Args:
            tensors: what its :meth:`tensors` returned.
            progress: what its :meth:`progress` returned.
        """
        for place, sums in enumerate(self.observers):
            sums.add_state(part_of(tensors, f"{place}/"))
        self._move(progress)

    def _move(self, progress: Mapping[str, Any]) -> None:
        self.chunks, self.digest = progress["corpus"]["chunks"], progress["corpus"]["digest"]
        self.finished = progress["finished"]
        self.counts.add(Counts(**progress["counts"]))


def shard_path(folder: Path, shard: Shard) -> Path:
    """Return the path of the file of a shard."""
    return folder / f"shard-{shard.index}-of-{shard.count}.safetensors"


def shard_files(folder: Path) -> Iterator[tuple[Path, Shard]]:
    """Find the files of shards in a folder.

    Args:
        folder: the folder.

    Yields:
        The path of each file and its shard.
    """
    for path in sorted(folder.iterdir()):
        if name := _NAME.fullmatch(path.name):
            yield path, Shard(int(name[1]), int(name[2]))


def write(path: Path, state: State, about: Mapping[str, Any]) -> None:
    """Write a checkpoint.

    Args:
        path: the file.
        state: the state.
        about: model, settings and observers of the scan.
    """
    save_state(state.tensors(), path, {**about, **state.progress()})


def resume(path: Path, state: State, about: Mapping[str, Any]) -> None:
    """Load a checkpoint into a state, if the file exists.

    Args:
        path: the file.
        state: replaced by the checkpoint.
        about: model, settings and observers of the scan, which must be those of the checkpoint.
    """
    if path.exists():
        tensors, noted = load_state(path)
        require_same(noted, about, str(path), ANEW)
        state.restore(tensors, noted)


@contextmanager
def locked(folder: Path, shard: Shard) -> Iterator[None]:
    """Let no other process scan the same shard into a folder.

    Args:
        folder: the folder.
        shard: the shard.

    Raises:
        InputError: if another process does.
    """
    path = shard_path(folder, shard)
    lock = FileLock(path.with_name(f".{path.stem}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise InputError(
            f"Another scan is writing to {folder}. Wait for its end, or choose another folder."
        ) from error
    try:
        yield
    finally:
        lock.release()


def require_one_layout(folder: Path, shard: Shard) -> None:
    """Refuse a folder with shards of a corpus that was cut into another number of shards.

    Args:
        folder: the folder.
        shard: the shard of this process.

    Raises:
        InputError: if the folder holds such a shard.
    """
    for path, other in shard_files(folder):
        if other.count != shard.count:
            raise InputError(
                f"{path} is one of {other.count} shards, and here the corpus is cut into "
                f"{shard.count}. Choose another folder."
            )
