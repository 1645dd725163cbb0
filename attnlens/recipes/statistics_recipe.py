"""Run texts through a model under a lens, and lay out what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from attnlens.attention.statistics import HeadStatistics, HeadStatisticsResult
from attnlens.errors import InputError
from attnlens.files import versions, write_atomically
from attnlens.lens import Lens
from attnlens.observer import Observer
from attnlens.saving import save
from attnlens.texts.loading import TextModel

FIELDS = tuple(f.name for f in fields(HeadStatisticsResult) if f.type == "Tensor")


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        text: where the examples came from.
        lines: whether every line is an example, instead of every paragraph.
        batch_size: most examples in a batch.
        max_length: most tokens of an example, or None for the model's limit.
        layers: layers looked at, or None for all.
    """

    text: str
    lines: bool = False
    batch_size: int = 8
    max_length: int | None = None
    layers: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Run:
    """What came of a run.

    Attributes:
        model: name of the model.
        settings: what was asked for.
        examples: number of texts.
        truncated: number of texts that were cut to the model's limit.
        statistics: the result.
    """

    model: str
    settings: Settings
    examples: int
    truncated: int
    statistics: HeadStatisticsResult

    def to_json(self) -> str:
        """Return everything as a JSON document; missing numbers are null."""
        document = {
            "model": self.model,
            "examples": self.examples,
            "truncated": self.truncated,
            "settings": asdict(self.settings),
            "versions": versions(),
            "statistics": self.statistics.to_dict(),
        }
        return json.dumps(document, indent=1, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Write `head_statistics.safetensors` and `head_statistics.json` into a folder.

        Args:
            folder: exists.

        Raises:
            InputError: if the folder cannot be written to.
        """
        settings: dict[str, Any] = asdict(self.settings)
        try:
            path = folder / "head_statistics.safetensors"
            save(self.statistics, path, model=self.model, settings=settings)
            write_atomically(path.with_suffix(".json"), f"{self.to_json()}\n".encode())
        except OSError as error:
            raise InputError(f"Cannot write to {folder}: {error.strerror or error}.") from error


def measure(
    model: TextModel,
    texts: Sequence[str],
    settings: Settings,
    advance: Callable[[int], None] = lambda examples: None,
    others: Iterable[Observer] = (),
) -> Run:
    """Look at every head of a model while it reads texts.

    Args:
        model: the model.
        texts: at least one.
        settings: how to.
        advance: told after each batch how many texts it held.
        others: observers that look on.

    Returns:
        The result.
    """
    statistics = HeadStatistics()
    lens = Lens(model.model, statistics, *others, layers=settings.layers)
    tokenised = model.tokenise(texts, settings.max_length)
    with lens, torch.no_grad():
        for batch in model.batches(tokenised, settings.batch_size):
            model.model(**batch)
            advance(len(batch["input_ids"]))
    return Run(model.name, settings, len(texts), tokenised.truncated, statistics.compute())
