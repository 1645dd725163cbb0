"""Results and captures as plain files: safetensors with a JSON header, written whole or not at all.

save(statistics.compute(), "heads.safetensors", model="my/model")
result = load("heads.safetensors")
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors import torch as tensor_files
from torch import Tensor

from attnlens.capture import Capture
from attnlens.errors import InputError
from attnlens.storage.forms import ENTRIES, RESULTS, Reader, Writer, storable

__all__ = [
    "load",
    "load_captures",
    "read_header",
    "save",
    "save_captures",
    "storable",
    "versions",
    "write_atomically",
]

FORMAT = 2
_KEY = "attnlens"
_SEAL = "sha256"
_BLANK = "0" * 64
_PACKAGES = ("attnlens", "torch", "transformers", "safetensors")


def save(
    result: Any,
    path: str | os.PathLike[str],
    *,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
) -> None:
    """Write a result, or a list of captures, maps, matrices or passes, to a safetensors file.

    The file's metadata holds, under `attnlens`, a JSON header with the format version, the kind
    of result, what is no tensor, names and shapes of the tensors, and the versions of the
    libraries; and under `sha256` a digest of the file. An existing file is replaced at once or,
    if anything fails, left as it is.

    Args:
        result: what an observer or a function of attnlens returned, or a list of
            :class:`~attnlens.Capture`, :class:`~attnlens.observers.AttentionMap`,
            :class:`~attnlens.observers.AttributionMatrices` or
            :class:`~attnlens.observers.PassSaliency`.
        path: where to; the folder must exist.
        model: name of the model, for the record.
        settings: anything JSON can hold, for the record.
        tokens: tokens of each example, for the record.

    Raises:
        InputError: if there is no form for such a result.
    """
    several = isinstance(result, (list, tuple))
    kinds = {type(entry).__name__ for entry in (result if several else [result])}
    if len(kinds) != 1 or not kinds <= (ENTRIES if several else RESULTS).keys():
        raise InputError(
            f"Results to save are one of {', '.join(RESULTS)}, or a list of one of "
            f"{', '.join(ENTRIES)}. Got {', '.join(sorted(kinds))}"
            f"{' in a list' if several else ''}."
        )
    writer = Writer()
    content = writer.entries(result) if several else writer.fields_of(result)
    tensors = _apart(writer.tensors)
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
    kind = (RESULTS | ENTRIES)[header["kind"]]
    reader = Reader(path, header, tensors)
    try:
        if "entries" in header:
            return [reader.build(kind, entry) for entry in header["entries"]]
        return reader.build(kind, header["fields"])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
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


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors with memory of their own; views of one tensor become copies."""
    taken: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        memory = whole.untyped_storage().data_ptr()
        found[name] = whole.clone() if memory in taken else whole
        taken.add(memory)
    return found


def _sealed(tensors: dict[str, Tensor], header: str) -> bytes:
    """The file, with the digest that it has while the digest itself is blank."""
    content = tensor_files.save(tensors, {_KEY: header, _SEAL: _BLANK})
    blank, seal = (f'"{_SEAL}":"{digest}"' for digest in (_BLANK, sha256(content).hexdigest()))
    return content.replace(blank.encode(), seal.encode(), 1)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = Path(path).read_bytes()
    try:
        tensors = tensor_files.load(content)
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a complete safetensors file: {error}. Write it again."
        ) from error
    header = _checked_header(path, metadata.get(_KEY))
    _check_seal(path, header["format"], metadata.get(_SEAL), content)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if header.get("shapes") != shapes:
        raise InputError(f"{path} is damaged: its tensors are not of the shapes noted in it.")
    return header, tensors


def _check_seal(
    path: str | os.PathLike[str], written: int, seal: str | None, content: bytes
) -> None:
    """Compare the file with the digest noted in it; format 1 had none."""
    if written == 1 and seal is None:
        return
    seal = seal or ""
    blank = content.replace(seal.encode(), _BLANK.encode(), 1)
    if len(seal) != len(_BLANK) or sha256(blank).hexdigest() != seal:
        raise InputError(f"{path} is damaged: its contents do not have the digest noted in it.")


def _checked_header(path: str | os.PathLike[str], text: str | None) -> dict[str, Any]:
    if text is None:
        raise InputError(f"{path} is a safetensors file, but attnlens did not write it.")
    try:
        header = json.loads(text)
        written, kind = int(header["format"]), str(header["kind"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"The attnlens header of {path} is damaged: {error!r}.") from error
    if not 1 <= written <= FORMAT:
        raise InputError(
            f"{path} has format {written}; this attnlens reads up to {FORMAT}. Update attnlens."
        )
    known = RESULTS if "fields" in header else ENTRIES if "entries" in header else {}
    if kind not in known:
        raise InputError(f"{path} holds a {kind!r}. Readable: {', '.join(RESULTS | ENTRIES)}.")
    return {**header, "format": written}
