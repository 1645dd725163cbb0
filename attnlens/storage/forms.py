"""Dataclasses taken apart into JSON and tensors, and put together again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from attnlens.capture import Capture, Masking, OutputProjection
from attnlens.errors import InputError
from attnlens.functional.identifiability import Identifiability
from attnlens.functional.witnesses import RealisabilityRank, SimplexWitness, SoftmaxWitness
from attnlens.observers import (
    AttentionMap,
    AttributionMatrices,
    HeadImportanceResult,
    HeadStatisticsResult,
    HiddenTokenAttributionResult,
    LabelAttentionResult,
    PassSaliency,
    TokenIdentifiabilityResult,
    TokenSaliencyResult,
)

Kind = TypeVar("Kind", bound=type)

# What a file can be of; results of upper parts are added with `storable`.
RESULTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        HeadStatisticsResult,
        HeadImportanceResult,
        HiddenTokenAttributionResult,
        LabelAttentionResult,
        TokenSaliencyResult,
        TokenIdentifiabilityResult,
        Identifiability,
        SimplexWitness,
        SoftmaxWitness,
        RealisabilityRank,
    )
}
ENTRIES: dict[str, type] = {  # these come in lists
    kind.__name__: kind for kind in (Capture, AttentionMap, AttributionMatrices, PassSaliency)
}
_PARTS: dict[str, type] = {kind.__name__: kind for kind in (Masking, OutputProjection)}


def storable(part: bool = False) -> Callable[[Kind], Kind]:
    """Let a dataclass of tensors and plain values be saved; a decorator.

    Args:
        part: it only occurs inside others.

    Returns:
        A decorator that leaves the class as it is.
    """

    def known(kind: Kind) -> Kind:
        (_PARTS if part else RESULTS)[kind.__name__] = kind
        return kind

    return known


class Writer:
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
        if type(value).__name__ in _PARTS | RESULTS:
            return {"part": self._part(value)}
        if isinstance(value, Mapping):
            items = (part for item in value.items() for part in item)
            return {"items": [self._plain(part, f"{name}.{i}") for i, part in enumerate(items)]}
        if isinstance(value, (list, tuple)):
            return [self._plain(part, f"{name}.{place}") for place, part in enumerate(value)]
        if isinstance(value, np.generic):
            return value.item()
        return value

    def _part(self, part: Any) -> int:
        if id(part) not in self._places:
            place = self._places[id(part)] = len(self.parts)
            self.parts.append({"kind": type(part).__name__})  # before the parts inside it
            self.parts[place]["fields"] = self.fields_of(part, f"part{place}.")
        return self._places[id(part)]

    def _name(self, tensor: Tensor, name: str) -> str:
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        key = memory if tensor.numel() else (name,)
        known = self._names.setdefault(key, name)
        if known == name:
            self.tensors[name] = tensor
        return known


class Reader:
    """Puts objects together again; what was shared is shared.

    Args:
        path: of the file, for messages.
        header: the file's header.
        tensors: by name.
    """

    def __init__(
        self, path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self.path = path
        self.tensors = tensors
        self._parts: list[Mapping[str, Any]] = header.get("parts", [])
        self._built: dict[int, Any] = {}

    def build(self, kind: type, entry: Mapping[str, Any]) -> Any:
        """One dataclass from its fields."""
        names = {field.name for field in fields(kind) if not field.name.startswith("_")}
        found = {name: self._value(value) for name, value in entry.items()}
        found |= {name: t for name, t in self.tensors.items() if name in names - found.keys()}
        missing = names ^ found.keys()
        if missing:
            raise InputError(
                f"{self.path} does not hold a {kind.__name__}: {', '.join(sorted(missing))} "
                f"missing or unknown."
            )
        return kind(**found)

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):  # JSON's lists are the tuples they were
            return tuple(map(self._value, value))
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self.tensors[value["tensor"]]
        if "items" in value:
            items = [self._value(part) for part in value["items"]]
            return dict(zip(items[::2], items[1::2], strict=True))
        return self._part(value["part"])

    def _part(self, place: int) -> Any:
        if place not in self._built:
            part = self._parts[place]
            kind = (_PARTS | RESULTS)[part["kind"]]
            self._built[place] = self.build(kind, part["fields"])
        return self._built[place]
