"""Files of attnlens: written whole or not at all. The only writer of safetensors."""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors import torch as tensor_files
from torch import Tensor

from attnlens.errors import AttnLensError, InputError

FORMAT = 1
STATE = "state"
_KEY = "attnlens"
_SEAL = "sha256"
_BLANK = "0" * 64
_LONGEST_NAME = 200  # bytes; with its mark, the name of an unfinished file may have 255
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

    Raises:
        InputError: if JSON cannot hold the header, or the file cannot be written.
    """
    own = _apart(tensors)
    document = {
        _SEAL: _BLANK,  # first in the file, so that no other such text can precede it
        "format": FORMAT,
        "shapes": {name: list(tensor.shape) for name, tensor in own.items()},
        "versions": versions(),
        **header,
    }
    try:
        content = tensor_files.save(own, {_KEY: json.dumps(document)})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be written, because what is noted in it is not plain: {error}. Give "
            f"settings of numbers, texts, lists and mappings."
        ) from error
    seal = sha256(content).hexdigest()
    write_atomically(path, content.replace(_BLANK.encode(), seal.encode(), 1))


def read_sealed(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what :func:`write_sealed` wrote.

    Args:
        path: the file.

    Returns:
        The header and the tensors, bit-identical to what was written, on the CPU.

    Raises:
        InputError: if there is no file, or it is damaged, not from attnlens, or of another format.
    """
    content = _read(path)
    try:
        tensors = tensor_files.load(content)
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
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
        InputError: if there is no file, or it is damaged, of another format, or holds something
            else.
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
    with replacing(path) as part:
        tensor_files.save_file(dict(tensors), part, None if metadata is None else dict(metadata))


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a JSON file.

    Args:
        path: where to; the folder must exist.
        document: plain values.
    """
    write_atomically(path, f"{json_text(document)}\n".encode())


def json_text(document: Mapping[str, Any]) -> str:
    """Return plain values as JSON, encodable as UTF-8 whatever they hold.

    Args:
        document: plain values.

    Returns:
        The text.

    Raises:
        InputError: if JSON cannot hold them.
    """
    try:
        text = json.dumps(document, indent=1, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"This cannot be written as JSON: {error}.") from error
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
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"Cannot read {what} from {path}: {error}.") from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all.

    Args:
        path: where to; the folder must exist.
        content: the bytes.
    """
    with replacing(path) as part:
        part.write_bytes(content)


def make_folder(
    path: str | os.PathLike[str],
    *,
    inputs: Iterable[str | os.PathLike[str]] = (),
    own: str = "",
    overwrite: bool = False,
) -> Path:
    """Make a folder for outputs and those above it, or find it fit for them.

    Args:
        path: the folder.
        inputs: files and folders that are read; none may be replaced by what is written.
        own: pattern of names; a folder that holds such a file is one of these outputs.
        overwrite: allow a folder that holds something else.

    Returns:
        Its path.

    Raises:
        InputError: if it cannot be made or written to, is or holds an input, or holds something
            else and that is not allowed.
    """
    folder = Path(path)
    with failures("write", folder):
        if folder.is_file():
            raise InputError(f"Cannot write {folder}: it is a file, no folder.")
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        others = [] if own and any(folder.glob(own)) else sorted(os.listdir(folder))
    for source in inputs:
        inside = os.path.isfile(source) and _same(Path(source).absolute().parent, folder)
        if inside or _same(source, folder):
            what = f"{folder} holds {source}, which is" if inside else f"{folder} is"
            raise InputError(
                f"{what} read, and outputs never replace inputs. Choose another folder."
            )
    if others and not overwrite:
        more = f" and {len(others) - 3} more" if others[3:] else ""
        raise InputError(
            f"The folder {folder} is not empty: it holds {', '.join(others[:3])}{more}. Choose "
            f"another, or pass overwrite=True."
        )
    return folder


def require_writable(
    path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Refuse a file that could not be written, or that is read, before a long run.

    Args:
        path: where a file is to be written.
        inputs: files that are read.

    Raises:
        InputError: if it cannot be.
    """
    with failures("write", path):
        target = Path(os.path.realpath(path))
        _require_ordinary(target)
        if not target.parent.is_dir():
            raise InputError(f"Cannot write {path}: there is no folder {Path(path).parent}.")
        with TemporaryFile(dir=target.parent):
            pass
    if target.exists() and any(_same(s, target) or _same(s, target.parent) for s in inputs):
        raise InputError(f"{path} is read, and outputs never replace inputs. Name another file.")


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove what processes left beside a file that were killed while they wrote it."""
    for part in Path(path).parent.glob(_part_of(Path(path), "*").name):
        part.unlink()


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name beside a file, and rename what was written there at the end.

    A symbolic link is followed, and the permissions of a file that is replaced are kept.
    If it cannot be written, the old file is as it was.

    Args:
        path: where to; the folder must exist.

    Yields:
        The temporary name.
    """
    with failures("write", path), ExitStack() as stack:
        target = Path(os.path.realpath(path))
        part = _part_of(target, uuid4().hex)
        _require_ordinary(target)
        stack.callback(part.unlink, missing_ok=True)
        yield part
        if target.exists():
            shutil.copymode(target, part)
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)


@contextmanager
def failures(doing: str, what: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the failures of a block that reads or writes a file into errors that name it.

    Args:
        doing: what the block does, such as `"write"`.
        what: the file, or some words for it.

    Raises:
        AttnLensError: as the block raised it.
        InputError: if it fails for want of the file, of space or permission, or for what it holds.
    """
    try:
        yield
    except AttnLensError:
        raise
    except (OSError, ValueError, EOFError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"Cannot {doing} {os.fspath(what)}: {reason}.") from error


def _read(path: str | os.PathLike[str]) -> bytes:
    with failures("read", path):
        return Path(path).read_bytes()
    raise AssertionError


def _same(left: str | os.PathLike[str], right: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to one file or folder."""
    try:
        return os.path.samefile(left, right)
    except (OSError, ValueError):  # one is missing
        return False


def _require_ordinary(target: Path) -> None:
    """Refuse what cannot be replaced: folders and devices."""
    with suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
            raise InputError(f"Cannot write {target}: it is {kind}.")


def _part_of(target: Path, mark: str) -> Path:
    name = os.fsencode(target.name)
    stem = target.name if len(name) < _LONGEST_NAME else sha256(name).hexdigest()
    return target.with_name(f".{stem}.{mark}.part")


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
    fits = isinstance(seal, str) and len(seal) == len(_BLANK) and seal.isascii()
    blank = content.replace(seal.encode(), _BLANK.encode(), 1) if fits else b""
    if not fits or sha256(blank).hexdigest() != seal:
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
