"""Maps and attribution taken apart by example, and the tokens of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnlens.attention.maps import AttentionMap
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.errors import InputError

LayerKey = tuple[str, int]


@dataclass(frozen=True)
class ExampleMaps:
    """Maps of one layer and example, cut to real tokens; possibly to the first of them.

    Attributes:
        layer: stack and layer.
        example: index of the example.
        heads: indices of the heads, h of them.
        raw: `[h, q, k]`.
        effective: `[h, q, k]`.
        positions: which of the K keys are real, all of them.
        padded: K.
    """

    layer: LayerKey
    example: int
    heads: tuple[int, ...]
    raw: Tensor
    effective: Tensor
    positions: Tensor
    padded: int


@dataclass(frozen=True)
class ExampleAttribution:
    """Contributions to one example's tokens, cut to real tokens.

    Attributes:
        layers: stack and layer of each row.
        example: index of the example.
        contribution: `[L, s, t]`.
        sources: `[s]`, positions among the real tokens.
        targets: `[t]`, positions among the real tokens.
        positions: which of the K tokens are real.
        padded: K.
    """

    layers: tuple[LayerKey, ...]
    example: int
    contribution: Tensor
    sources: Tensor
    targets: Tensor
    positions: Tensor
    padded: int


def maps_by_example(
    maps: Iterable[AttentionMap], layers: set[int] | None, heads: set[int] | None
) -> list[ExampleMaps]:
    """Take maps apart by example; each layer counts its examples as they come.

    Args:
        maps: maps as they were seen; `raw` and `effective` may hold the first tokens alone, and
            `mask` tells of all.
        layers: layers to keep, or None for all.
        heads: heads to keep, or None for all.

    Returns:
        One entry per example and attention call.

    Raises:
        InputError: if no map is of a layer or head that was asked for.
    """
    every = list(maps)
    for name, wanted, there in (
        ("layers", layers, {entry.layer for entry in every}),
        ("heads", heads, {head for entry in every for head in entry.heads}),
    ):
        if every and wanted is not None and not wanted <= there:
            raise InputError(
                f"{name} must be some of {_ranges(there)}, whose maps were kept. Got "
                f"{_ranges(wanted)}."
            )
    return list(_map_entries(every, layers, heads))


def _map_entries(
    maps: Iterable[AttentionMap], layers: set[int] | None, heads: set[int] | None
) -> Iterator[ExampleMaps]:
    seen: dict[LayerKey, int] = {}
    for entry in maps:
        key = (entry.stack, entry.layer)
        first = seen.get(key, 0)
        seen[key] = first + entry.raw.shape[0]
        if layers is not None and entry.layer not in layers:
            continue
        kept = [i for i, head in enumerate(entry.heads) if heads is None or head in heads]
        for place in range(entry.raw.shape[0] if kept else 0):
            allowed = entry.mask[place].any(0)
            rows, columns = (allowed.any(axis).nonzero()[:, 0] for axis in (1, 0))
            held = rows[rows < entry.raw.shape[-2]], columns[columns < entry.raw.shape[-1]]
            raw, effective = (
                maps[place, kept][:, held[0]][..., held[1]] for maps in (entry.raw, entry.effective)
            )
            heads_kept = tuple(entry.heads[i] for i in kept)
            yield ExampleMaps(
                key, first + place, heads_kept, raw, effective, columns, allowed.shape[-1]
            )


def attribution_by_example(matrices: Iterable[AttributionMatrices]) -> list[ExampleAttribution]:
    """Take attribution apart by example; each stack counts its examples as they come.

    Args:
        matrices: as they were seen.

    Returns:
        One entry per example.
    """
    seen: dict[str, int] = {}
    found = []
    for entry in matrices:
        first = seen.get(entry.stack, 0)
        seen[entry.stack] = first + entry.mask.shape[0]
        for place, real in enumerate(entry.mask):
            count = real.cumsum(0) - 1
            sources, targets = real[entry.sources], real[entry.targets]
            found.append(
                ExampleAttribution(
                    tuple((entry.stack, layer) for layer in entry.layers),
                    first + place,
                    entry.contribution[:, place][:, sources][..., targets],
                    count[entry.sources[sources]],
                    count[entry.targets[targets]],
                    real.nonzero()[:, 0],
                    real.numel(),
                )
            )
    return found


def tokens_by_example(
    seen: Sequence[ExampleMaps | ExampleAttribution], tokens: Sequence[Sequence[str]] | None
) -> list[list[str]]:
    """Name the real tokens of every example.

    Args:
        seen: what there is of the examples.
        tokens: of each example, padding left out or kept; None for their positions.

    Returns:
        Names by example; none for an example of which nothing was seen.

    Raises:
        InputError: if the tokens do not fit.
    """
    first: dict[int, ExampleMaps | ExampleAttribution] = {}
    for entry in seen:
        first.setdefault(entry.example, entry)
    count = max(first, default=-1) + 1
    if tokens is not None and len(tokens) < count:
        raise InputError(f"tokens are of {len(tokens)} examples, but {count} were seen.")
    return [
        _names(None if tokens is None else tokens[index], first[index]) if index in first else []
        for index in range(count)
    ]


def _names(tokens: Sequence[str] | None, seen: ExampleMaps | ExampleAttribution) -> list[str]:
    if tokens is None:
        return [str(position) for position in range(len(seen.positions))]
    if len(tokens) == len(seen.positions):
        return [str(token) for token in tokens]
    if len(tokens) == seen.padded:
        return [str(tokens[position]) for position in seen.positions.tolist()]
    raise InputError(
        f"Example {seen.example} has {len(seen.positions)} real tokens of {seen.padded}. Got "
        f"{len(tokens)} token strings."
    )


def _ranges(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(numbers)))
