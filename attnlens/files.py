"""Files of attnlens: written whole or not at all, and sealed. The only writer of safetensors."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors import torch as tensor_files
from torch import Tensor

from attnlens.errors import InputError

FORMAT = 1
_KEY = "attnlens"
_SEAL = "sha256"
_BLANK = "0" * 64
STATE = "state"
_PACKAGES = ("attnlens", "torch", "transformers", "safetensors")


def write_sealed(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a JSON header to a safetensors file that holds its own digest.

    The file's metadata holds, under `attnlens`, the header with the format version, the shapes of
    the tensors and the versions of the libraries; and under `sha256` a digest of the file.

    Args:
        path: where to; the folder must exist.
        tensors: what to write.
        header: anything JSON can hold; its `kind` says what the file is.
    """
    own = _apart(tensors)
    document = {
        "format": FORMAT,
        "shapes": {name: list(tensor.shape) for name, tensor in own.items()},
        "versions": versions(),
        **header,
    }
    content = tensor_files.save(own, {_KEY: json.dumps(document), _SEAL: _BLANK})
    blank, seal = (f'"{_SEAL}":"{digest}"' for digest in (_BLANK, sha256(content).hexdigest()))
    write_atomically(path, content.replace(blank.encode(), seal.encode(), 1))


def read_sealed(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what :func:`write_sealed` wrote.

    Args:
        path: the file.

    Returns:
        The header and the tensors, bit-identical to what was written, on the CPU.

    Raises:
        InputError: if the file is damaged, not from attnlens, or of another format.
        FileNotFoundError: if there is no file.
    """
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
    _check_seal(path, metadata.get(_SEAL), content)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if header.get("shapes") != shapes:
        raise InputError(f"{path} is damaged: its tensors are not of the shapes noted in it.")
    return header, tensors


def save_state(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], about: Mapping[str, Any]
) -> None:
    """Write named tensors, such as an observer's `state_dict()`, to a sealed safetensors file.

    Args:
        tensors: what to write.
        path: where to; the folder must exist.
        about: anything JSON can hold, returned with them.
    """
    write_sealed(
        path, {n: t.cpu() for n, t in tensors.items()}, {"kind": STATE, STATE: dict(about)}
    )


def load_state(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_state` wrote.

    Args:
        path: the file.

    Returns:
        The tensors and what was noted about them.

    Raises:
        InputError: if the file is damaged, of another format, or holds something else.
        FileNotFoundError: if there is no file.
    """
    header, tensors = read_sealed(path)
    if header["kind"] != STATE or not isinstance(header.get(STATE), dict):
        raise InputError(f"{path} holds {header['kind']}, no state. Use load().")
    return tensors, header[STATE]


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


def _check_seal(path: str | os.PathLike[str], seal: str | None, content: bytes) -> None:
    """Compare the file with the digest noted in it."""
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
    if written != FORMAT:
        raise InputError(
            f"{path} has format {written}; this attnlens reads format {FORMAT}. Write it again, "
            f"or use the attnlens that wrote it."
        )
    return {**header, "kind": kind}
