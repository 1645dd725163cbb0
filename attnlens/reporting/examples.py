"""Maps and attribution taken apart by example, and the tokens of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from attnlens.attention.maps import AttentionMap
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.errors import InputError
from attnlens.results import LayerKey


@dataclass(frozen=True)
class ExampleMaps:
    """Maps of one layer and example, cut to real tokens; possibly to the first of them.

    Attributes:
        layer: stack and layer.
        index: of the example, among all.
        heads: indices of the heads, h of them.
        raw: `[h, q, k]`.
        effective: `[h, q, k]`.
        positions: which of the K keys are real, all of them.
        padded: K.
    """

    layer: LayerKey
    index: int
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
        index: of the example, among all.
        contribution: `[L, s, t]`.
        sources: `[s]`, positions among the real tokens.
        targets: `[t]`, positions among the real tokens.
        positions: which of the K tokens are real.
        padded: K.
    """

    layers: tuple[LayerKey, ...]
    index: int
    contribution: Tensor
    sources: Tensor
    targets: Tensor
    positions: Tensor
    padded: int


def maps_by_example(
    maps: Sequence[AttentionMap], layers: set[int] | None, heads: set[int] | None
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
    for name, asked, available in (
        ("layers", layers, {entry.layer for entry in maps}),
        ("heads", heads, {head for entry in maps for head in entry.heads}),
    ):
        if maps and asked is not None and not asked <= available:
            raise InputError(
                f"{name} must be some of {_listed(available)}, whose maps were kept. Got "
                f"{_listed(asked)}."
            )
    counts: Counter[LayerKey] = Counter()
    examples: list[ExampleMaps] = []
    for entry in maps:
        key = entry.stack, entry.layer
        if layers is None or entry.layer in layers:
            examples += _of_map(entry, key, counts[key], heads)
        counts[key] += len(entry.raw)
    return examples


def _of_map(
    entry: AttentionMap, key: LayerKey, first: int, heads: set[int] | None
) -> Iterator[ExampleMaps]:
    """The examples of a map, counted from the first."""
    places = [place for place, head in enumerate(entry.heads) if heads is None or head in heads]
    names = tuple(entry.heads[place] for place in places)
    for row in range(len(entry.raw) if places else 0):
        allowed = entry.mask[row].any(0)
        queries, keys = (allowed.any(axis).nonzero()[:, 0] for axis in (1, 0))
        height, width = entry.raw.shape[-2:]
        raw, effective = (
            maps[row, places][:, queries[queries < height]][..., keys[keys < width]]
            for maps in (entry.raw, entry.effective)
        )
        yield ExampleMaps(key, first + row, names, raw, effective, keys, allowed.shape[-1])


def attribution_by_example(matrices: Iterable[AttributionMatrices]) -> list[ExampleAttribution]:
    """Take attribution apart by example; each stack counts its examples as they come.

    Args:
        matrices: as they were seen.

    Returns:
        One entry per example.
    """
    counts: Counter[str] = Counter()
    examples = []
    for entry in matrices:
        layers = tuple((entry.stack, layer) for layer in entry.layers)
        for place, real in enumerate(entry.mask):
            position = real.cumsum(0) - 1
            sources, targets = real[entry.sources], real[entry.targets]
            examples.append(
                ExampleAttribution(
                    layers,
                    counts[entry.stack] + place,
                    entry.contribution[:, place][:, sources][..., targets],
                    position[entry.sources[sources]],
                    position[entry.targets[targets]],
                    real.nonzero()[:, 0],
                    real.numel(),
                )
            )
        counts[entry.stack] += len(entry.mask)
    return examples


def tokens_by_example(
    examples: Sequence[ExampleMaps | ExampleAttribution],
    tokens: Sequence[Sequence[str]] | None,
) -> list[list[str]]:
    """Name the real tokens of every example.

    Args:
        examples: maps and attribution of each.
        tokens: of each example, padding left out or kept; None for their positions.

    Returns:
        Names by example; none for an example that has neither maps nor attribution.

    Raises:
        InputError: if the tokens do not fit.
    """
    by_index = {example.index: example for example in reversed(examples)}  # the first counts
    count = max(by_index, default=-1) + 1
    if not isinstance(tokens, Sequence | None) or isinstance(tokens, str):
        raise InputError(
            f"tokens are lists of texts, one for each example, such as "
            f"[tokenizer.tokenize(text)]. Got {type(tokens).__name__}."
        )
    if tokens is not None and len(tokens) < count:
        raise InputError(f"tokens are of {len(tokens)} examples, but {count} were seen.")
    names: list[list[str]] = [[] for _ in range(count)]
    for index, example in by_index.items():
        names[index] = _names(None if tokens is None else tokens[index], example)
    return names


def _names(tokens: Sequence[str] | None, example: ExampleMaps | ExampleAttribution) -> list[str]:
    if tokens is None:
        return [str(position) for position in range(len(example.positions))]
    if len(tokens) == len(example.positions):
        return [str(token) for token in tokens]
    if len(tokens) == example.padded:
        return [str(tokens[position]) for position in example.positions.tolist()]
    raise InputError(
        f"Example {example.index} has {len(example.positions)} real tokens of {example.padded}. "
        f"Got {len(tokens)} token strings."
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
