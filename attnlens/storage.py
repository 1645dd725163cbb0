"""Results as plain files: safetensors with a JSON header, written whole or not at all.

save(statistics.compute(), "heads.safetensors", model="my/model")
result = load("heads.safetensors")
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors import torch as tensor_files
from torch import Tensor

from attnlens.errors import InputError
from attnlens.observers import HeadStatisticsResult, LabelAttentionResult

FORMAT = 1
_KEY = "attnlens"
Result = HeadStatisticsResult | LabelAttentionResult
_KINDS = {kind.__name__: kind for kind in (HeadStatisticsResult, LabelAttentionResult)}
_PACKAGES = ("attnlens", "torch", "transformers", "safetensors")


def save(
    result: Result,
    path: str | os.PathLike[str],
    *,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a result to a safetensors file.

    The file's metadata holds, under `attnlens`, a JSON header with the format version, the kind
    of result, its fields that are no tensors, names and shapes of the tensors, and the versions
    of the libraries. An existing file is replaced at once or, if anything fails, left as it is.

    Args:
        result: what to write.
        path: where to; the folder must exist.
        model: name of the model, for the record.
        settings: anything JSON can hold, for the record.
    """
    tensors = {name: tensor.contiguous() for name, tensor in result.tensors().items()}
    header = {
        "format": FORMAT,
        "kind": type(result).__name__,
        "fields": {
            field.name: getattr(result, field.name)
            for field in fields(result)
            if field.name not in tensors
        },
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "model": model,
        "settings": dict(settings or {}),
        "versions": versions(),
    }
    write_atomically(path, tensor_files.save(tensors, {_KEY: json.dumps(header)}))


def load(path: str | os.PathLike[str]) -> Result:
    """Read a result that :func:`save` wrote.

    Args:
        path: the file.

    Returns:
        The result, equal to what was saved.

    Raises:
        InputError: if the file is damaged, not from attnlens, or of a newer format.
        FileNotFoundError: if there is no file.
    """
    header, tensors = _read(path)
    kind = _KINDS[header["kind"]]
    found: dict[str, Any] = {name: _as_tuples(entry) for name, entry in header["fields"].items()}
    found |= tensors
    missing = {field.name for field in fields(kind)} ^ found.keys()
    if missing:
        raise InputError(
            f"{path} does not hold a {kind.__name__}: {', '.join(sorted(missing))} missing or "
            f"unknown."
        )
    return kind(**found)


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save` noted beside the tensors: model, settings, versions, shapes.

    Args:
        path: the file.

    Returns:
        The header.

    Raises:
        InputError: if the file is damaged, not from attnlens, or of a newer format.
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


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            header = _checked_header(path, (file.metadata() or {}).get(_KEY))
            return header, {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise InputError(
            f"{path} is not a complete safetensors file: {error}. Write it again."
        ) from error


def _checked_header(path: str | os.PathLike[str], text: str | None) -> dict[str, Any]:
    if text is None:
        raise InputError(f"{path} is a safetensors file, but attnlens did not write it.")
    try:
        header = json.loads(text)
        written, kind = int(header["format"]), str(header["kind"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"The attnlens header of {path} is damaged: {error!r}.") from error
    if written > FORMAT:
        raise InputError(
            f"{path} has format {written}; this attnlens reads up to {FORMAT}. Update attnlens."
        )
    if kind not in _KINDS or not isinstance(header.get("fields"), dict):
        raise InputError(f"{path} holds a {kind!r}. Readable kinds: {', '.join(_KINDS)}.")
    return dict(header)


def _as_tuples(entry: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(map(_as_tuples, entry)) if isinstance(entry, list) else entry
