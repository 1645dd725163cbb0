"""The outcome of a scan: its observers, and their results in files."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlens.corpus.named import name_of
from attnlens.corpus.resuming import Counts, State
from attnlens.corpus.shards import Shard
from attnlens.errors import AttnLensError, AttnLensWarning
from attnlens.files import write_json
from attnlens.observer import Observer
from attnlens.saving import has_form, save


@dataclass(frozen=True, eq=False)
class Scan:
    """The outcome of a scan.

    Attributes:
        observers: the observers. They have seen the whole corpus if `shard.complete`, else the
            part of this process.
        counts: how much was read.
        shard: the part of the corpus that this process read.
        results: result of each observer by the name of its file; empty in a process that writes
            no files.
    """

    observers: tuple[Observer, ...]
    counts: Counts
    shard: Shard = field(default_factory=Shard)
    results: Mapping[str, Any] = field(default_factory=dict)


def write_results(
    folder: Path, state: State, about: Mapping[str, Any], model: str
) -> dict[str, Any]:
    """Write the result of every observer, and `scan.json`, into a folder.

    Args:
        folder: exists.
        state: state of the whole corpus.
        about: model, settings and observers of the scan.
        model: name of the model, for the record.

    Returns:
        The results by name. A warning tells of an observer that has no result, and of a result
        that cannot be saved.
    """
    results = _computed([sums.observer for sums in state.observers])
    for name, result in results.items():
        path = folder / f"{name}.safetensors"
        if has_form(result):
            save(result, path, model=model, settings=about)
        else:
            kind = type(result).__name__
            warnings.warn(
                f"{path.name} was not written: a {kind} has no form in a file.",
                AttnLensWarning,
                stacklevel=2,
            )
    write_json(folder / "scan.json", {"name": model, **about, **state.progress()})
    return results


def _computed(observers: Sequence[Observer]) -> dict[str, Any]:
    """Results by name: `head-statistics`, `head-statistics-2` and so on."""
    results: dict[str, Any] = {}
    times: Counter[str] = Counter()
    for observer in observers:
        name = name_of(type(observer))
        times[name] += 1
        name = name if times[name] == 1 else f"{name}-{times[name]}"
        try:
            results[name] = observer.compute()
        except AttnLensError as error:
            warnings.warn(f"There is no result of {name}: {error}", AttnLensWarning, stacklevel=2)
    return results
