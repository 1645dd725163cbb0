"""What recipes share: models by name, word of progress, and documents for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attnlens.files import json_text, versions
from attnlens.pruning import is_pruned, load_pruned
from attnlens.results import plain
from attnlens.texts.batching import TextModel, TokenisedTexts
from attnlens.texts.loading import load_model, load_text_model

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is to do."""


def silent(doing: str, done: int, total: int) -> None:
    """Tell nobody of progress."""


def reader(model: TextModel | str, progress: Progress = silent) -> TextModel:
    """Load a text model unless it is loaded already.

    Args:
        model: the model, a local folder, or a name on the Hugging Face Hub.
        progress: told before and after.

    Returns:
        The model with its tokenizer, in evaluation mode.
    """
    if isinstance(model, TextModel):
        return model
    return load_text_model(model, lambda name: load(name, progress))


def load(name: str, progress: Progress) -> Any:
    """Load a model by name, one with pruned heads too, and tell of it.

    Args:
        name: a local folder, or a name on the Hugging Face Hub.
        progress: told before and after.

    Returns:
        The model, in evaluation mode.
    """
    progress(f"Loading {name}", 0, 1)
    model = load_pruned(name).base_model if is_pruned(name) else load_model(name)
    progress(f"Loading {name}", 1, 1)
    return model


def run_batches(
    model: TextModel, texts: TokenisedTexts, batch_size: int, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    """Run texts through a model, batch after batch, without gradients.

    Args:
        model: the model.
        texts: its tokens.
        batch_size: most texts in a batch.
        progress: told after each batch.

    Yields:
        Each batch, once the model has read it.
    """
    done, total = 0, len(texts.lengths)
    progress("Reading", done, total)
    for batch in model.batches(texts, batch_size):
        with torch.no_grad():
            model.model(**batch)
        yield batch
        done += len(batch["input_ids"])
        progress("Reading", done, total)


def as_json(document: Mapping[str, Any]) -> str:
    """Write a document as JSON, with the versions of the libraries that made it.

    Args:
        document: see :func:`attnlens.results.plain`.

    Returns:
        The text, encodable as UTF-8 whatever the document holds.
    """
    return json_text(plain({**document, "versions": versions()}))
