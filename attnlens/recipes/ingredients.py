"""What recipes share: models by name, word of progress, and documents for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlens.files import json_text, versions
from attnlens.results import plain
from attnlens.texts.batching import TextModel, TokenisedTexts
from attnlens.texts.loading import load_text_model

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is to do."""


Loaded = TypeVar("Loaded")


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
    return model if isinstance(model, TextModel) else load_named(model, load_text_model, progress)


def load_named(name: str, load: Callable[[str], Loaded], progress: Progress) -> Loaded:
    """Load a model by name, and tell of it.

    Args:
        name: a local folder, or a name on the Hugging Face Hub.
        load: loads it.
        progress: told before and after.

    Returns:
        What was loaded.
    """
    progress(f"Loading {name}", 0, 1)
    loaded = load(name)
    progress(f"Loading {name}", 1, 1)
    return loaded


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
