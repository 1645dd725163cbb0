"""Results and captures as plain files: safetensors with a JSON header, written whole or not at all.

save(statistics.compute(), "heads.safetensors", model="my/model")
result = load("heads.safetensors")
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors import torch as tensor_files
from torch import Tensor

from attnlens.capture import Capture, Masking, OutputProjection
from attnlens.errors import InputError
from attnlens.observers import (
    AttentionMap,
    AttributionMatrices,
    HeadStatisticsResult,
    HiddenTokenAttributionResult,
    TokenIdentifiabilityResult,
    TokenSaliencyResult,
)

FORMAT = 2
_KEY = "attnlens"
_SEAL = "sha256"
_BLANK = "0" * 64
_RESULTS = (
    HeadStatisticsResult,
    HiddenTokenAttributionResult,
    TokenIdentifiabilityResult,
    TokenSaliencyResult,
)
_ENTRIES = (Capture, AttentionMap, AttributionMatrices)  # come in lists
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*_RESULTS, *_ENTRIES)}
_PARTS: dict[str, type] = {kind.__name__: kind for kind in (Masking, OutputProjection)}
_STATE = "state"
_PACKAGES = ("attnlens", "torch", "transformers", "safetensors")


def save(
    result: Any,
    path: str | os.PathLike[str],
    *,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
) -> None:
    """Write a result, or a list of captures, maps or matrices, to a safetensors file.

    The file's metadata holds, under `attnlens`, a JSON header with the format version, the kind
    of result, what is no tensor, names and shapes of the tensors, and the versions of the
    libraries; and under `sha256` a digest of the file. An existing file is replaced at once or,
    if anything fails, left as it is.

    Args:
        result: what an observer computed: statistics, aggregates, or a list of
            :class:`~attnlens.Capture`, :class:`~attnlens.observers.AttentionMap` or
            :class:`~attnlens.observers.AttributionMatrices`.
        path: where to; the folder must exist.
        model: name of the model, for the record.
        settings: anything JSON can hold, for the record.
        tokens: tokens of each example, for the record.

    Raises:
        InputError: if there is no form for such a result.
    """
    several = isinstance(result, (list, tuple))
    kinds = {type(entry).__name__ for entry in (result if several else [result])}
    allowed = {kind.__name__ for kind in (_ENTRIES if several else _RESULTS)}
    if len(kinds) != 1 or not kinds <= allowed:
        raise InputError(
            f"Results to save are one of {', '.join(k.__name__ for k in _RESULTS)}, or a list of "
            f"one of {', '.join(k.__name__ for k in _ENTRIES)}. Got {', '.join(sorted(kinds))}"
            f"{' in a list' if several else ''}."
        )
    writer = _Writer()
    content = writer.entries(result) if several else writer.fields_of(result)
    tensors = {name: tensor.detach().contiguous() for name, tensor in writer.tensors.items()}
    header = {
        "format": FORMAT,
        "kind": kinds.pop(),
        "entries" if several else "fields": content,
        "parts": writer.parts,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "model": model,
        "settings": dict(settings or {}),
        "tokens": None if tokens is None else [list(example) for example in tokens],
        "versions": versions(),
    }
    write_atomically(path, _sealed(tensors, json.dumps(header)))


def load(path: str | os.PathLike[str]) -> Any:
    """Read what :func:`save` wrote.

    Args:
        path: the file.

    Returns:
        The result or the list, bit-identical to what was saved, on the CPU.

    Raises:
        InputError: if the file is damaged, not from attnlens, or of another format.
        FileNotFoundError: if there is no file.
    """
    header, tensors = _read(path)
    kind = _KINDS[header["kind"]]
    reader = _Reader(path, header, tensors)
    try:
        if "entries" in header:
            return [reader.build(kind, entry) for entry in header["entries"]]
        return reader.build(kind, header["fields"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"The attnlens header of {path} is damaged: {error!r}.") from error


def save_captures(
    captures: Sequence[Capture],
    path: str | os.PathLike[str],
    *,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
) -> None:
    """Write captures, with tensors that they share written once.

    Args:
        captures: at least one.
        path: where to; the folder must exist.
        model: name of the model, for the record.
        settings: anything JSON can hold, for the record.
        tokens: tokens of each example, for the record.
    """
    save(list(captures), path, model=model, settings=settings, tokens=tokens)


def load_captures(path: str | os.PathLike[str]) -> list[Capture]:
    """Read captures that :func:`save_captures` wrote.

    Args:
        path: the file.

    Returns:
        The captures, on the CPU; what they derive is computed again.

    Raises:
        InputError: if the file is damaged, or holds something else.
    """
    found = load(path)
    if not (isinstance(found, list) and all(isinstance(entry, Capture) for entry in found)):
        raise InputError(f"{path} holds {read_header(path)['kind']}, no captures. Use load().")
    return found


def save_state(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], about: Mapping[str, Any]
) -> None:
    """Write named tensors, such as an observer's `state_dict()`, to a sealed safetensors file.

    Args:
        tensors: what to write.
        path: where to; the folder must exist.
        about: anything JSON can hold, returned with them.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
        "kind": _STATE,
        "fields": dict(about),
        "shapes": {name: list(tensor.shape) for name, tensor in own.items()},
        "versions": versions(),
    }
    write_atomically(path, _sealed(own, json.dumps(header)))


def load_state(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_state` wrote.

    Args:
        path: the file.

    Returns:
        The tensors and what was noted about them.

    Raises:
        InputError: if the file is damaged, not from attnlens, or of another format.
        FileNotFoundError: if there is no file.
    """
    header, tensors = _read(path, (_STATE,))
    return tensors, header["fields"]


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save` noted beside the tensors: model, settings, tokens, versions, shapes.

    Args:
        path: the file.

    Returns:
        The header.

    Raises:
        InputError: if the file is damaged, not from attnlens, or of another format.
        FileNotFoundError: if there is no file.
    """
    return _read(path)[0]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that shape a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout on the path, not installed
            found[package] = "unknown"
    return found


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole: under a temporary name beside it, then renamed.

    Args:
        path: where to; the folder must exist.
        content: the bytes.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class _Writer:
    """Takes objects apart into JSON and tensors, each shared tensor and part once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: list[dict[str, Any]] = []
        self._names: dict[tuple[Any, ...], str] = {}
        self._places: dict[int, int] = {}

    def entries(self, entries: Sequence[Any]) -> list[dict[str, Any]]:
        """Every entry of a list, its tensors named `index.field`."""
        return [self.fields_of(entry, f"{place}.") for place, entry in enumerate(entries)]

    def fields_of(self, entry: Any, prefix: str = "") -> dict[str, Any]:
        """Fields of a dataclass; a tensor of the name it would have anyway is left out."""
        found = {}
        for field in fields(entry):
            value = getattr(entry, field.name)
            if field.name.startswith("_"):
                continue
            if isinstance(value, Tensor) and self._name(value, prefix + field.name) == field.name:
                continue
            found[field.name] = self._plain(value, prefix + field.name)
        return found

    def _plain(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._name(value, name)}
        if type(value).__name__ in _PARTS:
            return {"part": self._part(value)}
        return value

    def _part(self, part: Any) -> int:
        if id(part) not in self._places:
            place = self._places[id(part)] = len(self.parts)
            kind = type(part).__name__
            self.parts.append({"kind": kind, "fields": self.fields_of(part, f"part{place}.")})
        return self._places[id(part)]

    def _name(self, tensor: Tensor, name: str) -> str:
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        key = memory if tensor.numel() else (name,)
        known = self._names.setdefault(key, name)
        if known == name:
            self.tensors[name] = tensor
        return known


class _Reader:
    """Puts objects together again; what was shared is shared."""

    def __init__(
        self, path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self.path = path
        self.tensors = tensors
        self.parts = [
            self.build(_PARTS[part["kind"]], part["fields"]) for part in header.get("parts", [])
        ]

    def build(self, kind: type, entry: Mapping[str, Any]) -> Any:
        """One dataclass from its fields."""
        names = {field.name for field in fields(kind) if not field.name.startswith("_")}
        found = {name: self._value(value) for name, value in entry.items()}
        found |= {name: tensor for name, tensor in self.tensors.items() if name in names}
        missing = names ^ found.keys()
        if missing:
            raise InputError(
                f"{self.path} does not hold a {kind.__name__}: {', '.join(sorted(missing))} "
                f"missing or unknown."
            )
        return kind(**found)

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.tensors[value["tensor"]] if "tensor" in value else self.parts[value["part"]]
        return _as_tuples(value)


def _sealed(tensors: dict[str, Tensor], header: str) -> bytes:
    """The file, with the digest that it has while the digest itself is blank."""
    content = tensor_files.save(tensors, {_KEY: header, _SEAL: _BLANK})
    blank, seal = (f'"{_SEAL}":"{digest}"' for digest in (_BLANK, sha256(content).hexdigest()))
    return content.replace(blank.encode(), seal.encode(), 1)


def _read(
    path: str | os.PathLike[str], kinds: Iterable[str] = _KINDS
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = Path(path).read_bytes()
    try:
        tensors = tensor_files.load(content)
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a complete safetensors file: {error}. Write it again."
        ) from error
    header = _checked_header(path, metadata.get(_KEY), kinds)
    seal = metadata.get(_SEAL, "")
    blank = content.replace(seal.encode(), _BLANK.encode(), 1)
    if len(seal) != len(_BLANK) or sha256(blank).hexdigest() != seal:
        raise InputError(f"{path} is damaged: its contents do not have the digest noted in it.")
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if header.get("shapes") != shapes:
        raise InputError(f"{path} is damaged: its tensors are not of the shapes noted in it.")
    return header, tensors


def _checked_header(
    path: str | os.PathLike[str], text: str | None, kinds: Iterable[str]
) -> dict[str, Any]:
    if text is None:
        raise InputError(f"{path} is a safetensors file, but attnlens did not write it.")
    try:
        header = json.loads(text)
        written, kind = int(header["format"]), str(header["kind"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"The attnlens header of {path} is damaged: {error!r}.") from error
    if written != FORMAT:
        cure = "Update attnlens." if written > FORMAT else "Write it again."
        raise InputError(f"{path} has format {written}; this attnlens reads {FORMAT}. {cure}")
    if kind not in kinds or not ("fields" in header or "entries" in header):
        raise InputError(f"{path} holds a {kind!r}. Readable kinds: {', '.join(kinds)}.")
    return dict(header)


def _as_tuples(entry: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(map(_as_tuples, entry)) if isinstance(entry, list) else entry
