"""Model, tokenizer and observers of a scan in a form that can be saved and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.errors import InputError
from attnlens.observer import Observer
from attnlens.texts.batching import TextModel

_SENTENCE = "The 2nd test, naïvely: don't tokenise “this” twice!"
# What tells where a model is from; its type is part of its weights.
_NAMES = ("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype")
_MOST = 4  # differences that are named
_SIDES = ("padding_side", "truncation_side", "model_max_length", "special_tokens_map")


def model_identity(model: TextModel) -> dict[str, Any]:
    """Describe a model and its tokenizer by what they are, not by their name.

    Args:
        model: the model.

    Returns:
        The whole configuration, the attention implementation, settings of the tokenizer, and
        digests: of all weights, of what modules hold beside them, and of the tokenizer.
    """
    config = model.model.config
    settings = json.loads(config.to_json_string(use_diff=False))
    tokenizer = model.tokenizer
    return {
        "weights": _weights(model.model),
        "modules": _modules(model.model),
        "config": {name: value for name, value in settings.items() if name not in _NAMES},
        "attention": config._attn_implementation,
        "tokenizer": _tokenizer(tokenizer),
        **{name: _described(getattr(tokenizer, name)) for name in _SIDES},
    }


def _tokenizer(tokenizer: Any) -> str:
    digest = blake2b(type(tokenizer).__name__.encode(), digest_size=16)
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\t{index}\n".encode(errors="surrogatepass"))
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        for changed_by_calls in ("truncation", "padding"):
            rules.pop(changed_by_calls, None)
        rules.pop("model", None)  # the vocabulary, which is known
        digest.update(json.dumps(rules, sort_keys=True).encode())
    digest.update(repr(tokenizer(_SENTENCE)["input_ids"]).encode())
    return digest.hexdigest()


def _weights(model: nn.Module) -> str:
    """Digest of every parameter and buffer, by content."""
    digest = blake2b(type(model).__name__.encode(), digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def _modules(model: nn.Module) -> str:
    """Digest of the kinds of modules and of their plain attributes, such as `eps`."""
    digest = blake2b(digest_size=16)
    for name, module in model.named_modules():
        attributes = {
            key: value if _is_plain(value) else getattr(value, "__name__", "")
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key not in ("training", *_NAMES)
        }
        digest.update(f"{name} {type(module).__name__} {attributes!r}\n".encode())
    return digest.hexdigest()


def observer_identity(observer: Observer) -> dict[str, Any]:
    """Describe an observer by its class and its settings.

    Args:
        observer: the observer, which has seen nothing.

    Returns:
        Class and settings by name, as they are read back from JSON. Modules and tensors are
        described by digests; what is none of these, by its class.
    """
    settings = {n: _described(value) for n, value in vars(observer).items() if n[0] != "_"}
    described = {"class": type(observer).__name__, **settings}
    return dict(json.loads(json.dumps(described)))


def _described(value: Any) -> Any:
    if _is_plain(value):
        return sorted(value) if isinstance(value, frozenset) else value
    if isinstance(value, Mapping):
        return {str(name): _described(entry) for name, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _described(asdict(value))
    if isinstance(value, Tensor):
        value = nn.ParameterList([nn.Parameter(value, requires_grad=False)])
    if isinstance(value, nn.Module):
        return _weights(value)
    return type(value).__name__


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


def _difference(written: Any, expected: Any, place: str = "") -> str:
    """The entries in which two descriptions differ."""
    if isinstance(written, Mapping) and isinstance(expected, Mapping):
        inside = place and f"{place}."
        names = [n for n in {**written, **expected} if written.get(n) != expected.get(n)]
        parts = [_difference(written.get(n), expected.get(n), f"{inside}{n}") for n in names]
        more = f" and {len(parts) - _MOST} more" if parts[_MOST:] else ""
        return ", ".join(parts[:_MOST]) + more
    lists = isinstance(written, list) and isinstance(expected, list)
    if lists and len(written) == len(expected):
        pairs = zip(written, expected, strict=True)
        return "; ".join(_difference(one, other, place) for one, other in pairs if one != other)
    return f"{place and f'{place} is '}{written!r}, not {expected!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))
