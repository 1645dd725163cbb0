"""`merge_shards`: merge the shards of a corpus that separate jobs have scanned."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlens.corpus.identity import observer_identity, require_same
from attnlens.corpus.named import named_observer
from attnlens.corpus.outcome import Scan, write_results
from attnlens.corpus.resuming import State, shard_files
from attnlens.errors import InputError
from attnlens.files import load_state, make_folder
from attnlens.observer import Observer


def merge_shards(
    out: str | os.PathLike[str],
    folders: Iterable[str | os.PathLike[str]],
    observers: Sequence[Observer] | None = None,
    *,
    overwrite: bool = False,
) -> Scan:
    """Merge the shards of a corpus, and write the results of the whole corpus.

    Args:
        out: folder for the results.
        folders: the folders of scans with `shard=(i, n)`. The checkpoints of all n shards must be
            in them.
        observers: observers with the settings of those in the scans; by default they are made
            from the names that the scans were given.
        overwrite: allow a folder for the results that holds something else, but no shard.

    Returns:
        The observers with what all shards saw.

    Raises:
        InputError: if a shard is missing, not finished, or of another scan.

    Examples:
        >>> given = (model, tokenizer, ["One sentence.", "And another."], ["head-statistics"])
        >>> for shard in ((0, 2), (1, 2)):
        ...     outcome = scan(*given, out=folder / "parts", shard=shard)
        >>> merge_shards(folder / "all", [folder / "parts"]).counts.records
        2
    """
    shards = [Path(folder) for folder in folders]
    paths = _complete(shards)
    folder = make_folder(out, inputs=shards, overwrite=overwrite)
    first = load_state(paths[0])[1]
    again = _made_again(first, paths[0]) if observers is None else tuple(observers)
    about = {name: first[name] for name in ("model", "settings", "corpus", "versions")}
    about["observers"] = [observer_identity(observer) for observer in again]
    state = State.of(again)
    for path in paths:
        tensors, noted = load_state(path)
        require_same(noted, about, str(path), "Merge shards of one scan.")
        if not noted["finished"]:
            raise InputError(f"{path} is not finished. Run its scan again, which resumes it.")
        state.add(tensors, noted)
    results = write_results(folder, state, about, first["name"])
    return Scan(again, state.counts, results=results)


def _complete(folders: Sequence[Path]) -> list[Path]:
    """The file of every shard in order; each must exist exactly once."""
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
    """Make the observers of a scan again from their names."""
    if not all(noted["named"]):
        raise InputError(
            f"The observers of {path} were given as objects, not by name. Merge in Python, with "
            f"observers equal to them."
        )
    described = zip(noted["named"], noted["observers"], strict=True)
    return tuple(named_observer(name, entry.get("label_names", ())) for name, entry in described)
