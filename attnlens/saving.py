"""Results and captures as plain files: safetensors with a JSON header, written whole or not at all.

save(statistics.compute(), "heads.safetensors", model="my/model")
result = load("heads.safetensors")

What can be saved enters a registry by a decorator, :func:`storable`; nothing is known here of any
quantity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor

from attnlens.errors import InputError
from attnlens.files import STATE, read_sealed, write_sealed

Kind = TypeVar("Kind", bound=type)

RESULTS: dict[str, type] = {}
ENTRIES: dict[str, type] = {}  # these come in lists
PARTS: dict[str, type] = {}  # these occur inside others only


def storable(
    of: Literal["result", "entry", "part"] = "result",
) -> Callable[[Kind], Kind]:
    """Let a dataclass of tensors and plain values be saved; a decorator.

    Args:
        of: `"result"` stands alone, `"entry"` comes in lists, `"part"` occurs inside others only.

    Returns:
        A decorator that leaves the class as it is.
    """
    registry = {"result": RESULTS, "entry": ENTRIES, "part": PARTS}[of]

    def register(kind: Kind) -> Kind:
        registry[kind.__name__] = kind
        return kind

    return register


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
            :class:`~attnlens.Capture`, :class:`~attnlens.attention.maps.AttentionMap`,
            :class:`~attnlens.attribution.contributions.AttributionMatrices` or
            :class:`~attnlens.attribution.saliency.PassSaliency`.
        path: where to; the folder must exist.
        model: name of the model, for the record.
        settings: anything JSON can hold, for the record.
        tokens: tokens of each example, for the record.

    Raises:
        InputError: if there is no form for such a result, JSON cannot hold the settings, or the
            file cannot be written.

    Examples:
        >>> save(record(model, **batch), folder / "captures.safetensors")
        >>> len(load(folder / "captures.safetensors"))
        6
    """
    several, kinds = _kinds_of(result)
    if not has_form(result):
        raise InputError(
            f"Results to save are one of {', '.join(RESULTS | ENTRIES)}, or a list of one of "
            f"{', '.join(ENTRIES)}. Got {', '.join(sorted(kinds))}"
            f"{' in a list' if several else ''}."
        )
    writer = _Writer()
    if several:  # tensors are named `index.field`
        content: Any = [writer.fields_of(e, f"{place}.") for place, e in enumerate(result)]
    else:
        content = writer.fields_of(result)
    header = {
        "kind": kinds.pop(),
        "entries" if several else "fields": content,
        "parts": writer.parts,
        "model": model,
        "settings": dict(settings or {}),
        "tokens": None if tokens is None else [list(example) for example in tokens],
    }
    write_sealed(path, writer.tensors, header)


def has_form(result: Any) -> bool:
    """Tell whether a result, or a list, is one that :func:`save` can write."""
    several, kinds = _kinds_of(result)
    return len(kinds) == 1 and kinds <= (ENTRIES if several else RESULTS | ENTRIES).keys()


def _kinds_of(result: Any) -> tuple[bool, set[str]]:
    several = isinstance(result, (list, tuple))
    return several, {type(entry).__name__ for entry in (result if several else [result])}


def load(path: str | os.PathLike[str]) -> Any:
    """Read what :func:`save` wrote.

    Args:
        path: the file.

    Returns:
        The result or the list, bit-identical to what was saved, on the CPU.

    Raises:
        InputError: if there is no file, or it is damaged, not from attnlens, or of another format.

    Examples:
        >>> save(record(model, **batch), folder / "captures.safetensors")
        >>> load(folder / "captures.safetensors")[0].site
        'encoder.layer.0.attention.self'
    """
    header, tensors = read_sealed(path)
    kind = _kind_of(path, header)
    reader = _Reader(path, header, tensors)
    try:
        if "entries" in header:
            return [reader.build(kind, entry) for entry in header["entries"]]
        return reader.build(kind, header["fields"])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"The attnlens header of {path} is damaged: {error!r}.") from error


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save` noted beside the tensors: model, settings, tokens, versions, shapes.

    Args:
        path: the file.

    Returns:
        The header.

    Raises:
        InputError: if there is no file, or it is damaged, not from attnlens, or of another format.
    """
    return read_sealed(path)[0]


def _kind_of(path: str | os.PathLike[str], header: Mapping[str, Any]) -> type:
    readable = ENTRIES if "entries" in header else RESULTS | ENTRIES
    kind = header["kind"]
    if kind == STATE:
        raise InputError(f"{path} holds a state, no result. Use load_state().")
    if kind not in readable:
        raise InputError(f"{path} holds a {kind!r}. Readable: {', '.join(RESULTS | ENTRIES)}.")
    return readable[kind]


class _Writer:
    """Takes objects apart into JSON and tensors, each shared tensor and part once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: list[dict[str, Any]] = []
        self._names: dict[tuple[Any, ...], str] = {}
        self._places: dict[int, int] = {}

    def fields_of(self, entry: Any, prefix: str = "") -> dict[str, Any]:
        """Fields of a dataclass; a tensor of the name it would have anyway is left out."""
        plain = {}
        for field in _fields_of(type(entry)):
            value = getattr(entry, field)
            if isinstance(value, Tensor) and self._name(value, prefix + field) == field:
                continue
            plain[field] = self._plain(value, prefix + field)
        return plain

    def _plain(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._name(value, name)}
        if type(value).__name__ in PARTS | RESULTS:
            return {"part": self._part(value)}
        if isinstance(value, Mapping):
            items = (part for item in value.items() for part in item)
            return {"items": [self._plain(part, f"{name}.{i}") for i, part in enumerate(items)]}
        if isinstance(value, (list, tuple)):
            return [self._plain(part, f"{name}.{place}") for place, part in enumerate(value)]
        return value.item() if isinstance(value, np.generic) else value

    def _part(self, part: Any) -> int:
        if id(part) not in self._places:
            place = self._places[id(part)] = len(self.parts)
            self.parts.append({"kind": type(part).__name__})  # before the parts inside it
            self.parts[place]["fields"] = self.fields_of(part, f"part{place}.")
        return self._places[id(part)]

    def _name(self, tensor: Tensor, name: str) -> str:
        """The name that a tensor was first written under."""
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        first = self._names.setdefault(memory if tensor.numel() else (name,), name)
        if first == name:
            self.tensors[name] = tensor
        return first


class _Reader:
    """Puts objects together again; what was shared is shared."""

    def __init__(
        self, path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self._path = path
        self._tensors = tensors
        self._parts: list[Mapping[str, Any]] = header.get("parts", [])
        self._built: dict[int, Any] = {}

    def build(self, kind: type, entry: Mapping[str, Any]) -> Any:
        """One dataclass from its fields."""
        names = set(_fields_of(kind))
        values = {name: self._value(value) for name, value in entry.items()}
        values |= {n: self._tensors[n] for n in names - values.keys() if n in self._tensors}
        if names != values.keys():
            raise InputError(
                f"{self._path} does not hold a {kind.__name__}: "
                f"{', '.join(sorted(names ^ values.keys()))} missing or unknown."
            )
        return kind(**values)

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):  # JSON's lists are the tuples they were
            return tuple(map(self._value, value))
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self._tensors[value["tensor"]]
        if "items" in value:
            items = [self._value(part) for part in value["items"]]
            return dict(zip(items[::2], items[1::2], strict=True))
        return self._part(value["part"])

    def _part(self, place: int) -> Any:
        if place not in self._built:
            part = self._parts[place]
            self._built[place] = self.build((PARTS | RESULTS)[part["kind"]], part["fields"])
        return self._built[place]


def _fields_of(kind: type) -> list[str]:
    """Names of the fields of a dataclass that are written: those that are not private."""
    return [field.name for field in fields(kind) if not field.name.startswith("_")]
