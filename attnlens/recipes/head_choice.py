"""Choose heads by a score on texts, tell what they do, and remove them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlens.files import versions, write_json
from attnlens.pruning.checkpoint import save_pruned
from attnlens.pruning.plan import Plan
from attnlens.pruning.removal import PruningReport, prune_heads
from attnlens.pruning.scores import STATISTICS
from attnlens.pruning.sweep import pruning_curve
from attnlens.recipes.ingredients import Progress, reader, silent
from attnlens.texts.batching import TextModel

SCORES = (*STATISTICS, "magnitude", "random")  # those that need no labels


@dataclass(frozen=True, eq=False)
class HeadChoice:
    """Heads of lowest score, and the model they are of.

    Attributes:
        model: the model.
        plan: the heads.
        heads: number of heads in all layers.
        cosine: of last hidden states without these heads and with all, the mean over tokens.
        settings: how they were chosen.
        batch: the batch that the removal is timed on.
    """

    model: TextModel
    plan: Plan
    heads: int
    cosine: float
    settings: Mapping[str, Any]
    batch: Mapping[str, Tensor]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, with how it came about.

        Args:
            path: the file; its folder must exist.
        """
        write_json(path, {**self.to_dict(), "versions": versions()})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan and how it came about, ready for JSON."""
        notes = {"model": self.model.name, "cosine": self.cosine, **self.settings}
        return {**self.plan.to_dict(), **notes}

    def remove(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> PruningReport:
        """Remove the heads from the model, and write it and its tokenizer.

        Args:
            folder: where to.
            overwrite: write into a folder that holds something else.

        Returns:
            What that changed.
        """
        report = prune_heads(self.model.model, self.plan, timing=self.batch)
        save_pruned(self.model.model, folder, overwrite=overwrite)
        self.model.tokenizer.save_pretrained(folder)
        return report


def choose_heads(
    model: TextModel | str,
    texts: Sequence[str],
    *,
    score: str = "effective_norm",
    fraction: float = 0.5,
    per_layer: bool = False,
    seed: int = 0,
    batch_size: int = 8,
    max_length: int | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> HeadChoice:
    """Choose the heads of lowest score on texts, and tell what they do.

    Args:
        model: the model, or its name.
        texts: at least one.
        score: what ranks the heads: `"effective_norm"`, `"effective_fraction"`, `"output_norm"`,
            `"attention_norm"`, `"magnitude"` or `"random"`.
        fraction: share of the heads to choose, in `[0, 1]`.
        per_layer: take the same share of every layer, instead of the lowest of all.
        seed: for the score `"random"`.
        batch_size: most texts in a batch.
        max_length: most tokens of a text; by default what the model can read.
        about: what else to record as settings, such as where the texts are from.
        progress: told how far it is.

    Returns:
        The choice.
    """
    text_model = reader(model, progress)
    batches = list(text_model.batches(text_model.tokenise(texts, max_length), batch_size))
    curve = pruning_curve(
        text_model.model,
        _Likeness(batches),
        [score],
        [0.0, fraction] if fraction else [0.0],
        batches=batches,
        per_layer=per_layer,
        seeds=[seed],
    )
    last = curve.points[-1]
    options = {"seed": seed, "score": score, "fraction": fraction, "per_layer": per_layer}
    settings = {**(about or {}), **options}
    return HeadChoice(text_model, last.plan, curve.heads, last.value, settings, batches[0])


class _Likeness:
    """The mean cosine of last hidden states with those of the first model evaluated."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._batches = batches
        self._first: list[Tensor] | None = None

    @torch.no_grad()
    def __call__(self, model: Any) -> float:
        states = [model(**batch).last_hidden_state for batch in self._batches]
        self._first = self._first or states
        similar, tokens = 0.0, 0
        for batch, before, after in zip(self._batches, self._first, states, strict=True):
            real = batch.get("attention_mask", torch.ones(before.shape[:2])).bool()
            similar += float(torch.cosine_similarity(before[real], after[real], -1).sum())
            tokens += int(real.sum())
        return similar / tokens
