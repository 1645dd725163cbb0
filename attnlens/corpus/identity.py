"""Model, tokenizer and observers of a scan in a form that can be saved and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from torch import nn

from attnlens.errors import InputError
from attnlens.observer import Observer
from attnlens.texts.batching import TextModel

_SAMPLE = 1024
_SENTENCE = "The 2nd test, naïvely: don't tokenise “this” twice!"


def model_identity(model: TextModel) -> dict[str, str]:
    """Describe a model and its tokenizer by digests of what they are, not by their name.

    Args:
        model: the model.

    Returns:
        Digests of weights and tokenizer. The former covers shape, type and a sample of every
        tensor: fine-tuning changes it, and a large model is not read in full.
    """
    tokenizer = model.tokenizer
    words = blake2b(type(tokenizer).__name__.encode(), digest_size=16)
    for token, index in sorted(tokenizer.get_vocab().items()):
        words.update(f"{token}\t{index}\n".encode(errors="surrogatepass"))
    words.update(repr(tokenizer(_SENTENCE)["input_ids"]).encode())
    return {"weights": _weights(model.model), "tokenizer": words.hexdigest()}


def _weights(model: nn.Module) -> str:
    digest = blake2b(type(model).__name__.encode(), digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        step = max(1, tensor.numel() // _SAMPLE)
        sample = tensor.detach().flatten()[::step].to("cpu")
        digest.update(repr(sample.tolist()).encode())
    return digest.hexdigest()


def observer_identity(observer: Observer) -> dict[str, Any]:
    """Describe an observer by its class and those of its settings that are plain values.

    Args:
        observer: the observer.

    Returns:
        Class and settings by name, as they are read back from JSON.
    """
    settings = {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in vars(observer).items()
        if not name.startswith("_") and _is_plain(value)
    }
    described = {"class": type(observer).__name__, **settings}
    return dict(json.loads(json.dumps(described)))


def require_same(
    written: Mapping[str, Any], expected: Mapping[str, Any], where: str, cure: str
) -> None:
    """Refuse the checkpoint of another scan.

    Args:
        written: the entries of the checkpoint.
        expected: entries that it must hold, perhaps among others.
        where: the file.
        cure: what the user can do, for the error.

    Raises:
        InputError: naming the entries that differ.
    """
    for part in expected:
        if written.get(part) != expected[part]:
            raise InputError(
                f"{where} belongs to another scan, which differs in its {part}: "
                f"{_difference(written.get(part), expected[part])}. {cure}"
            )


def _difference(written: Any, expected: Any) -> str:
    """The entries in which two descriptions differ."""
    both = (written, expected)
    if all(isinstance(one, Mapping) for one in both):
        names = [n for n in written | expected if written.get(n) != expected.get(n)]
        return ", ".join(f"{n} is {written.get(n)!r}, not {expected.get(n)!r}" for n in names)
    if all(isinstance(one, list) for one in both) and len(written) == len(expected):
        pairs = zip(written, expected, strict=True)
        return "; ".join(_difference(one, other) for one, other in pairs if one != other)
    return f"{written!r}, not {expected!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))
