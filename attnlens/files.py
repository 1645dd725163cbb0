"""Files of attnlens: written whole or not at all. The only writer of safetensors."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
STATE = "state"
_KEY = "attnlens"
_SEAL = "sha256"
_BLANK = "0" * 64
_PACKAGES = ("attnlens", "torch", "transformers", "safetensors")


def write_sealed(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a JSON header to a safetensors file that holds its own digest.

    The file's metadata holds one entry, `attnlens`: the header as JSON, with the digest of the
    file under `sha256`, the format version, the shapes of the tensors and the versions of the
    libraries. The same tensors and header give the same bytes.

    Args:
        path: where to; the folder must exist.
        tensors: what to write.
        header: anything JSON can hold; its `kind` says what the file is.
    """
    own = _apart(tensors)
    document = {
        _SEAL: _BLANK,  # first in the file, so that no other such text can precede it
        "format": FORMAT,
        "shapes": {name: list(tensor.shape) for name, tensor in own.items()},
        "versions": versions(),
        **header,
    }
    content = tensor_files.save(own, {_KEY: json.dumps(document)})
    seal = sha256(content).hexdigest()
    write_atomically(path, content.replace(_BLANK.encode(), seal.encode(), 1))


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
    _check_seal(path, header.pop(_SEAL, None), content)
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
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:  # a checkout on the path, not installed
            installed[package] = "unknown"
    return installed


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a plain safetensors file, without a header of attnlens and without a digest.

    Args:
        path: where to; the folder must exist.
        tensors: contiguous, no two of which share memory.
        metadata: for other libraries that read the file.
    """
    with _replacing(Path(path)) as part:
        tensor_files.save_file(dict(tensors), part, None if metadata is None else dict(metadata))


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a JSON file.

    Args:
        path: where to; the folder must exist.
        document: plain values.
    """
    write_atomically(path, f"{json_text(document)}\n".encode())


def json_text(document: Mapping[str, Any]) -> str:
    """Return plain values as JSON, encodable as UTF-8 whatever they hold."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    # Names of files may hold lone surrogates, whose escape in Python is that of JSON.
    return text.encode(errors="backslashreplace").decode()


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        what: what it should hold, for the error, as in "a head plan".

    Returns:
        The document.

    Raises:
        InputError: if the file cannot be read or holds no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"Cannot read {what} from {path}: {error}.") from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all.

    Args:
        path: where to; the folder must exist.
        content: the bytes.
    """
    with _replacing(Path(path)) as part:
        part.write_bytes(content)


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder and those above it, unless they exist.

    Args:
        path: the folder.

    Returns:
        Its path.

    Raises:
        InputError: if it cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make the folder {folder}: {error.strerror}.") from error
    return folder


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove what processes left beside a file that were killed while they wrote it."""
    for part in Path(path).parent.glob(_part_of(Path(path), "*").name):
        part.unlink()


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Give a temporary name beside a file, and rename what was written there at the end."""
    part = _part_of(target, uuid4().hex)
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _part_of(target: Path, mark: str) -> Path:
    return target.with_name(f".{target.name}.{mark}.part")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors with memory of their own; views of one tensor become copies."""
    taken: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        memory = whole.untyped_storage().data_ptr()
        own[name] = whole.clone() if memory in taken else whole
        taken.add(memory)
    return own


def _check_seal(path: str | os.PathLike[str], seal: Any, content: bytes) -> None:
    """Compare the file with the digest noted in it."""
    blank = content.replace(str(seal).encode(), _BLANK.encode(), 1)
    if len(str(seal)) != len(_BLANK) or sha256(blank).hexdigest() != seal:
        raise InputError(f"{path} is damaged: its contents do not have the digest noted in it.")


def _checked_header(path: str | os.PathLike[str], text: str | None) -> dict[str, Any]:
    if text is None:
        raise InputError(f"{path} is a safetensors file, but attnlens did not write it.")
    try:
        header = json.loads(text)
        written, kind = int(header["format"]), str(header["kind"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InputError(f"The attnlens header of {path} is damaged: {error!r}.") from error
    if written != FORMAT:
        raise InputError(
            f"{path} has format {written}; this attnlens reads format {FORMAT}. Write it again, "
            f"or use the attnlens that wrote it."
        )
    return {**header, "kind": kind}
