"""What recipes share: models by name, word of progress, and documents for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlens.files import versions
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


def plain(document: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a document into what JSON can hold.

    Args:
        document: tensors, numbers and text, or mappings and sequences of these, by name.

    Returns:
        The same with lists for tensors, and None for numbers that are not finite.
    """
    return {name: _plain(entry) for name, entry in document.items()}


def _plain(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return _plain(entry.tolist())
    if isinstance(entry, Mapping):
        return plain(entry)
    if isinstance(entry, (list, tuple)):
        return [_plain(part) for part in entry]
    return None if isinstance(entry, float) and not math.isfinite(entry) else entry


def as_json(document: Mapping[str, Any]) -> str:
    """Write a document as JSON, with the versions of the libraries that made it.

    Args:
        document: see :func:`plain`.

    Returns:
        The text, encodable as UTF-8 whatever the document holds.
    """
    entries = plain({**document, "versions": versions()})
    text = json.dumps(entries, indent=1, allow_nan=False, ensure_ascii=False)
    # Names of files may hold lone surrogates, whose escape in Python is that of JSON.
    return text.encode(errors="backslashreplace").decode()
