"""Which heads to mask or prune, checked against the heads there are."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlens.errors import InputError, UnsupportedAttentionError
from attnlens.files import read_json
from attnlens.pruning.heads import LayerHeads
from attnlens.results import LayerKey
from attnlens.saving import storable

_FORMAT = 1


@storable()
@dataclass(frozen=True)
class Plan:
    """Heads chosen to be masked or pruned.

    Attributes:
        heads: by stack and layer, the chosen heads in ascending order; layers without are left
            out.

    Examples:
        >>> with mask_heads(model, {0: [3, 7]}) as plan:
        ...     len(plan)
        2
    """

    heads: Mapping[LayerKey, tuple[int, ...]]

    def __len__(self) -> int:
        """Number of heads."""
        return sum(map(len, self.heads.values()))

    def __str__(self) -> str:
        rows = (f"{stack} {layer}: {list(heads)}" for (stack, layer), heads in self.heads.items())
        return "; ".join(rows)

    def of(self, layer: LayerHeads) -> tuple[int, ...]:
        """Return the chosen heads of a layer."""
        return self.heads.get(layer.key, ())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        rows = [
            {"stack": stack, "layer": layer, "heads": list(heads)}
            for (stack, layer), heads in self.heads.items()
        ]
        return {"format": _FORMAT, "heads": rows}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Plan:
        """Read what :meth:`to_dict` returned.

        Args:
            document: the plain values; further entries are ignored.

        Returns:
            The plan.

        Raises:
            InputError: if it is not a head plan, or of a newer format.
        """
        try:
            readable = document["format"] <= _FORMAT
            heads = {
                (str(row["stack"]), int(row["layer"])): tuple(map(int, row["heads"]))
                for row in document["heads"]
            }
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"This is not a head plan: {error!r}.") from error
        if not readable:
            raise InputError(f"Head plan of format {document['format']}; known is {_FORMAT}.")
        return cls(heads)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a JSON file.

        Returns:
            The plan.

        Raises:
            InputError: if the file holds no head plan.
        """
        document = read_json(path, "a head plan")
        try:
            return cls.from_dict(document)
        except InputError as error:
            raise InputError(f"Cannot read a head plan from {path}: {error}") from error


# layer → heads; a boolean [L, H]; or a plan
Heads = Mapping[Any, Iterable[int]] | Tensor | Plan


def resolve(heads: Heads, layers: Sequence[LayerHeads]) -> Plan:
    """Check which heads are meant.

    Args:
        heads: `{layer: [head, …]}`, a boolean `[L, H]` tensor whose rows are `layers`, or a plan.
            A layer is an index (negative ones count from the end) or `(stack, index)`.
        layers: the heads there are.

    Returns:
        The plan; it may be empty.

    Raises:
        InputError: if a layer or head does not exist or is named twice, or a tensor has the wrong
            shape or type.
        UnsupportedAttentionError: if the output projection of a chosen layer is not known.
    """
    if isinstance(heads, Plan):
        heads = heads.heads
    if isinstance(heads, Tensor):
        heads = _of_tensor(heads, layers)
    if not isinstance(heads, Mapping):
        raise InputError(
            f"heads must be {{layer: [head, ...]}} or a boolean [L, H] tensor. Got {heads!r}."
        )
    resolved: dict[LayerKey, tuple[int, ...]] = {}
    for key, numbers in heads.items():
        layer = _layer(key, layers)
        if layer.key in resolved:
            raise InputError(f"heads names {layer.label} twice. Got keys {list(heads)}.")
        resolved[layer.key] = _checked(numbers, layer)
    return Plan({layer.key: resolved[layer.key] for layer in layers if resolved.get(layer.key)})


def head_mask(plan: Plan, layers: Sequence[LayerHeads]) -> Tensor:
    """Write a plan as a tensor.

    Args:
        plan: chosen heads.
        layers: the rows of the tensor.

    Returns:
        `[L, H]` bool, True for chosen heads.
    """
    mask = torch.zeros_like(existing_heads(layers))
    for row, layer in zip(mask, layers, strict=True):
        row[list(plan.of(layer))] = True
    return mask


def existing_heads(layers: Sequence[LayerHeads]) -> Tensor:
    """Tell which entries of an `[L, H]` tensor are heads.

    Args:
        layers: the rows of the tensor.

    Returns:
        `[L, H]` bool, False where a layer has fewer heads than the widest.
    """
    counts = torch.tensor([layer.heads for layer in layers])
    return torch.arange(int(counts.max())) < counts[:, None]


def require_same_in_shared_layers(plan: Plan, layers: Sequence[LayerHeads]) -> None:
    """Refuse plans that treat layers with the same weights differently.

    Args:
        plan: chosen heads.
        layers: the heads there are.

    Raises:
        InputError: if two layers share their output projection, but not their chosen heads.
    """
    first: dict[int, LayerHeads] = {}
    for layer in layers:
        other = first.setdefault(id(layer.projection), layer)
        if layer.projection is not None and plan.of(layer) != plan.of(other):
            raise InputError(
                f"Layers {other.layer} and {layer.layer} share the weights of {layer.site}, so "
                f"the same heads must go in both. Got {list(plan.of(other))} and "
                f"{list(plan.of(layer))}. mask_heads treats shared layers separately."
            )


def _of_tensor(heads: Tensor, layers: Sequence[LayerHeads]) -> dict[LayerKey, list[int]]:
    shape = existing_heads(layers).shape
    if heads.dtype != torch.bool or heads.shape != shape:
        raise InputError(
            f"heads must be bool {list(shape)}. Got {heads.dtype} {list(heads.shape)}."
        )
    return {
        layer.key: row.nonzero()[:, 0].tolist()
        for layer, row in zip(layers, heads.cpu(), strict=True)
        if row.any()
    }


def _layer(key: Any, layers: Sequence[LayerHeads]) -> LayerHeads:
    """Find the layer that a key of a plan names."""
    stacks = list(dict.fromkeys(layer.stack for layer in layers))
    if isinstance(key, tuple) and len(key) == 2 and key[0] in stacks:
        stack, index = key
    elif len(stacks) > 1:
        raise InputError(
            f"The model has several stacks of layers, so layers are named (stack, index), with "
            f"stack one of {stacks}. Got {key!r}."
        )
    else:
        stack, index = stacks[0], key
    members = {layer.layer: layer for layer in layers if layer.stack == stack}
    number = _integer(index)
    if number is not None and number < 0:
        number += next(iter(members.values())).depth
    if number not in members:
        raise InputError(f"There is no layer {key!r}: {stack} has layers {sorted(members)}.")
    return members[number]


def _checked(numbers: Iterable[int], layer: LayerHeads) -> tuple[int, ...]:
    """The chosen heads of one layer in ascending order."""
    given = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    heads = []
    for number in given:
        head = _integer(number)
        if head is None or not 0 <= head < layer.heads:
            raise InputError(f"{layer.label} has heads 0 to {layer.heads - 1}. Got {number!r}.")
        heads.append(head)
    if len(set(heads)) < len(heads):
        raise InputError(f"heads of {layer.label} holds duplicates. Got {given}.")
    if heads and layer.projection is None:
        raise UnsupportedAttentionError(
            f"The heads of {layer.label} cannot be told apart behind the attention: {layer.reason}."
        )
    return tuple(sorted(heads))


def _integer(number: Any) -> int | None:
    """The number as an integer, or None if it is not one."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None
