"""How far the heads of two models are apart on the same texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from attnlens.comparison import HeadDrift, compare
from attnlens.errors import InputError
from attnlens.recipes.ingredients import Progress, reader, silent
from attnlens.recipes.page_content import PageContent, lay_out, look_closely
from attnlens.reporting.page import Report
from attnlens.results import cell, plain
from attnlens.texts.batching import TextModel

DriftField = Literal["effective_cosine", "raw_cosine", "effective_fraction_change"]


@dataclass(frozen=True, eq=False)
class TextDrift:
    """The drift of every head from one model to another on texts.

    Attributes:
        model_a: name of the first model.
        model_b: name of the second.
        examples: number of texts.
        truncated: number of texts that were cut to the models' limit.
        identical: whether all weights of the models are equal.
        drift: one number per head and quantity.
        page: the page, if there is to be one.
    """

    model_a: str
    model_b: str
    examples: int
    truncated: int
    identical: bool
    drift: HeadDrift
    page: Report | None = None

    def words(self, field: DriftField) -> str:
        """Say which head moved most.

        Args:
            field: by which quantity.

        Returns:
            A sentence.
        """
        if self.identical:
            return f"{self.model_a} and {self.model_b} are identical."
        values = self.drift.tensors()[field]
        like = field.endswith("cosine")
        moved = (1 - values if like else values.abs()).nan_to_num(-1.0)
        row, head = divmod(int(moved.argmax()), values.shape[1])
        place = f"head {head} of {self.drift.row_labels()[row]}"
        value = cell(values[row, head].item())
        if like and value == cell(1.0):
            value = f"1 − {moved[row, head].item():.0e}"
        return f"From {self.model_a} to {self.model_b}, {place} moved most: {value}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the page, ready for JSON."""
        return plain({name: part for name, part in vars(self).items() if name != "page"})


def compare_on_texts(
    model_a: TextModel | str,
    model_b: TextModel | str,
    texts: Sequence[str],
    *,
    layers: Iterable[int | str] | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    page: PageContent | None = None,
    progress: Progress = silent,
) -> TextDrift:
    """Compare every head of a model with the same head of another, on the same texts.

    Args:
        model_a: where the drift begins: a model, or its name.
        model_b: where it has led to.
        texts: at least one.
        layers: indices or module names of the layers to look at; None looks at all.
        batch_size: most texts in a batch.
        max_length: most tokens of a text; by default what the first model can read.
        page: what a page of both models is to hold; None makes none.
        progress: told how far it is.

    Returns:
        The drift.

    Raises:
        InputError: if the models read the texts as different tokens.
    """
    before, after = reader(model_a, progress), reader(model_b, progress)
    tokenised, other = (model.tokenise(texts, max_length) for model in (before, after))
    if list(tokenised.columns["input_ids"]) != list(other.columns["input_ids"]):
        raise InputError(
            f"{before.name} and {after.name} read the text as different tokens, so their maps "
            f"cannot be compared. Compare a model with one that was trained from it."
        )
    layers = None if layers is None else tuple(layers)
    batches = before.batches(tokenised, batch_size)
    drift = compare(before.model, after.model, batches, layers=layers)
    identical = _same_weights(before.model, after.model)
    result = TextDrift(before.name, after.name, len(texts), tokenised.truncated, identical, drift)
    if page is None:
        return result
    first, second = (
        look_closely(model, texts, page, layers, max_length, progress) for model in (before, after)
    )
    notes = page.notes(len(texts))
    if tokenised.truncated:
        notes.append(f"{tokenised.truncated} of {len(texts)} examples were too long and were cut.")
    settings = {"batch_size": batch_size, "max_length": max_length, "layers": layers}
    other_model = after.name, second
    laid_out = lay_out([drift], first, page, before.name, settings, notes, other_model)
    return replace(result, page=laid_out)


def _same_weights(left: nn.Module, right: nn.Module) -> bool:
    own, others = left.state_dict(), right.state_dict()
    return own.keys() == others.keys() and all(torch.equal(own[n], others[n]) for n in own)
