"""`merge_shards`: take the parts of a corpus together that were scanned as jobs of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlens.corpus.identity import observer_identity, require_same
from attnlens.corpus.named import named_observer
from attnlens.corpus.outcome import Scan, write_results
from attnlens.corpus.resuming import State, made, shard_files
from attnlens.errors import InputError
from attnlens.files import load_state
from attnlens.observer import Observer


def merge_shards(
    out: str | os.PathLike[str],
    folders: Iterable[str | os.PathLike[str]],
    observers: Sequence[Observer] | None = None,
) -> Scan:
    """Take the shards of a corpus together, and write the results of the whole.

    Args:
        out: folder for the results.
        folders: where scans with `shard=(i, n)` left their checkpoints; all n must be there.
        observers: equal to those of the scans, to take up what they saw; by default made anew
            from the names that the scans were given.

    Returns:
        The observers with what all shards saw.

    Raises:
        InputError: if a shard is missing, not finished, or of another scan.
    """
    paths = _complete([Path(folder) for folder in folders])
    first = load_state(paths[0])[1]
    again = _made_again(first, paths[0]) if observers is None else tuple(observers)
    about = {name: first[name] for name in ("model", "settings", "corpus")}
    about["observers"] = [observer_identity(observer) for observer in again]
    state = State.of(again)
    for path in paths:
        tensors, noted = load_state(path)
        require_same(noted, about, str(path), "Merge shards of one scan.")
        if not noted["finished"]:
            raise InputError(f"{path} is not finished. Run its scan again, which resumes it.")
        state.add(tensors, noted)
    results = write_results(made(Path(out)), state, about, first["name"])
    return Scan(again, state.counts, results=results)


def _complete(folders: Sequence[Path]) -> list[Path]:
    """The files of all shards in order, of which none may be missing or there twice."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"There is no folder {folder}.")
    files = [(shard, path) for folder in folders for path, shard in shard_files(folder)]
    if not files:
        raise InputError(f"No shard of a scan is in {', '.join(map(str, folders)) or 'no folder'}.")
    count = files[0][0].count
    by_index: dict[int, Path] = {}
    for shard, path in files:
        if shard.count != count:
            raise InputError(f"{path} is one of {shard.count} shards, {files[0][1]} of {count}.")
        if shard.index in by_index:
            raise InputError(f"{path} is the same shard as {by_index[shard.index]}.")
        by_index[shard.index] = path
    missing = [str(index) for index in range(count) if index not in by_index]
    if missing:
        raise InputError(f"Of {count} shards, these are missing: {', '.join(missing)}.")
    return [by_index[index] for index in range(count)]


def _made_again(noted: Mapping[str, Any], path: Path) -> tuple[Observer, ...]:
    """Observers like those of a scan that named them."""
    if not all(noted["named"]):
        raise InputError(
            f"The observers of {path} were given as objects, not by name. Merge in Python, with "
            f"observers equal to them."
        )
    described = zip(noted["named"], noted["observers"], strict=True)
    return tuple(named_observer(name, entry.get("label_names", ())) for name, entry in described)
