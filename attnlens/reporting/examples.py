"""Maps and attribution taken apart by example, and the tokens of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlens.attention.maps import AttentionMap
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.errors import InputError
from attnlens.results import LayerKey


@dataclass(frozen=True)
class Axis:
    """Tokens along one side of a map.

    Attributes:
        positions: which of them are real, all of them.
        padded: how many there are with padding.
    """

    positions: Tensor
    padded: int


@dataclass(frozen=True)
class ExampleMaps:
    """Maps of one layer and example, cut to real tokens; possibly to the first of them.

    Attributes:
        layer: stack and layer.
        index: of the example, among all.
        heads: indices of the heads, h of them.
        raw: `[h, q, k]`.
        effective: `[h, q, k]`.
        queries: the tokens down.
        keys: the tokens across.
        kind: `"encoder"`, `"decoder"` or `"cross"`.
        norms: `[h, k]` norms of the values, or None.
        minimal: `[h, q, k]`, the distribution of least norm, or None.
        ends: the last row of each call, where one generated text was seen in several.
        model: 0, or 1 for the second of two models.
    """

    layer: LayerKey
    index: int
    heads: tuple[int, ...]
    raw: Tensor
    effective: Tensor
    queries: Axis
    keys: Axis
    kind: str
    norms: Tensor | None
    minimal: Tensor | None = None
    ends: tuple[int, ...] = ()
    model: int = 0

    @property
    def first(self) -> int:
        """Position of the first query among the keys: 0 unless earlier ones were in a cache."""
        ahead = len(self.keys.positions) - len(self.queries.positions)
        return max(0, ahead) if self.kind == "decoder" else 0

    def within(self, tokens: int) -> ExampleMaps:
        """Cut to the first tokens.

        Args:
            tokens: most of them.

        Returns:
            The maps of those tokens.
        """
        window = (..., slice(max(0, tokens - self.first)), slice(tokens))
        norms = None if self.norms is None else self.norms[:, :tokens]
        return replace(
            self,
            raw=self.raw[window],
            effective=self.effective[window],
            norms=norms,
            minimal=None if self.minimal is None else self.minimal[window],
        )


@dataclass(frozen=True)
class ExampleAttribution:
    """Contributions to one example's tokens, cut to real tokens.

    Attributes:
        layers: stack and layer of each row.
        index: of the example, among all.
        contribution: `[L, s, t]`.
        sources: `[s]`, positions among the real tokens.
        targets: `[t]`, positions among the real tokens.
        keys: all tokens.
    """

    layers: tuple[LayerKey, ...]
    index: int
    contribution: Tensor
    sources: Tensor
    targets: Tensor
    keys: Axis


@dataclass(frozen=True)
class Wanted:
    """Which maps to show.

    Attributes:
        example: index of the only example, or None for all.
        layers: layers, or None for all.
        heads: heads, or None for all.
    """

    example: int | None = None
    layers: frozenset[int] | None = None
    heads: frozenset[int] | None = None


def maps_by_example(
    maps: Sequence[AttentionMap], wanted: Wanted, model: int = 0
) -> list[ExampleMaps]:
    """Take maps apart by example; each layer counts its examples as they come.

    Args:
        maps: maps as they were seen; `raw` and `effective` may hold the first tokens alone, and
            `mask` tells of all.
        wanted: which of them to keep.
        model: 0, or 1 for the second of two models.

    Returns:
        One entry per example and layer; the steps of a generated text are one.

    Raises:
        InputError: if no map is of a layer, head or example that was asked for.
    """
    for name, asked, available in (
        ("layers", wanted.layers, {entry.layer for entry in maps}),
        ("heads", wanted.heads, {head for entry in maps for head in entry.heads}),
    ):
        if maps and asked is not None and not asked <= available:
            raise InputError(
                f"{name} must be some of {_listed(available)}, whose maps were kept. Got "
                f"{_listed(asked)}."
            )
    counts: Counter[LayerKey] = Counter()
    examples: list[ExampleMaps] = []
    for calls in _generations(maps):
        entry = calls[0] if len(calls) == 1 else _joined(calls)
        key = entry.stack, entry.layer
        if wanted.layers is None or entry.layer in wanted.layers:
            sizes = torch.tensor([call.raw.shape[-2] for call in calls])
            for example in _of_map(entry, key, counts[key], wanted.heads):
                real = [int((example.queries.positions < end).sum()) for end in sizes.cumsum(0)]
                ends = tuple(rows - 1 for rows in real) if len(calls) > 1 else ()
                examples.append(replace(example, ends=ends, model=model))
        counts[key] += len(entry.raw)
    if wanted.example is None or (model and not maps):
        return examples
    there = {example.index for example in examples}
    if wanted.example not in there:
        seen = f"Those of {_listed(there)} were." if there else "Use EffectiveAttention()."
        raise InputError(f"No maps of example {wanted.example} were kept. {seen}")
    return [example for example in examples if example.index == wanted.example]


def _generations(maps: Iterable[AttentionMap]) -> list[list[AttentionMap]]:
    """Calls by what they are of: each its own, but for those that go on with cached keys."""
    latest: dict[LayerKey, list[AttentionMap]] = {}
    groups: list[list[AttentionMap]] = []
    stepping = False  # whether the decoder's latest call went on; then what it looks at is the same
    for entry in maps:
        before = latest.get((entry.stack, entry.layer))
        if entry.kind == "decoder":
            stepping = before is not None and _goes_on(before[-1], entry)
        if stepping and before is not None and entry.kind != "encoder":
            before.append(entry)
        else:
            latest[entry.stack, entry.layer] = [entry]
            groups.append(latest[entry.stack, entry.layer])
    return groups


def _goes_on(before: AttentionMap, entry: AttentionMap) -> bool:
    """Whether a call of the decoder has the keys of the one before, and those of its queries."""
    queries, keys = entry.mask.shape[-2:]
    whole = entry.raw.shape[-2:] == (queries, keys)
    cached = before.mask.shape[-1]
    return whole and 0 < cached == keys - queries and len(before.raw) == len(entry.raw)


def _joined(calls: Sequence[AttentionMap]) -> AttentionMap:
    """Calls of one generated text under one another, zero at keys that were yet to come."""
    last = calls[-1]
    width = last.raw.shape[-1]

    def stacked(name: str) -> Tensor:
        parts = [getattr(call, name) for call in calls]
        padding = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts]
        return torch.cat(padding, -2)

    names = ["raw", "effective", "mask", *(() if last.minimal is None else ("minimal",))]
    maps: dict[str, Any] = {name: stacked(name) for name in names}
    return replace(last, **maps)


def _of_map(
    entry: AttentionMap, key: LayerKey, first: int, heads: frozenset[int] | None
) -> Iterator[ExampleMaps]:
    """The examples of a map, counted from the first."""
    places = [place for place, head in enumerate(entry.heads) if heads is None or head in heads]
    names = tuple(entry.heads[place] for place in places)
    for row in range(len(entry.raw) if places else 0):
        allowed = entry.mask[row].any(0)
        queries, keys = (allowed.any(axis).nonzero()[:, 0] for axis in (1, 0))
        height, width = entry.raw.shape[-2:]
        window = row, places, queries[queries < height], keys[keys < width]
        norms = entry.value_norm
        yield ExampleMaps(
            key,
            first + row,
            names,
            _picked(entry.raw, *window),
            _picked(entry.effective, *window),
            Axis(queries, allowed.shape[-2]),
            Axis(keys, allowed.shape[-1]),
            entry.kind,
            None if norms is None else norms[row, places, 0][:, window[-1]],
            None if entry.minimal is None else _picked(entry.minimal, *window),
        )


def _picked(maps: Tensor, row: int, heads: list[int], queries: Tensor, keys: Tensor) -> Tensor:
    """Maps of an example's real tokens, `[h, q, k]`."""
    return maps[row, heads][:, queries][..., keys]


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
                    Axis(real.nonzero()[:, 0], real.numel()),
                )
            )
        counts[entry.stack] += len(entry.mask)
    return examples


def axes_by_example(
    examples: Sequence[ExampleMaps | ExampleAttribution],
) -> tuple[dict[int, Axis], dict[int, Axis]]:
    """Find the tokens of every example, and those of its decoder where it has its own.

    Args:
        examples: maps and attribution of each.

    Returns:
        The axes by index of the example.
    """
    texts: dict[int, Axis] = {}
    targets: dict[int, Axis] = {}
    for example in examples:
        if isinstance(example, ExampleMaps) and example.kind == "cross":
            targets.setdefault(example.index, example.queries)
    for example in examples:
        decoder = isinstance(example, ExampleMaps) and example.kind == "decoder"
        side = targets if decoder and example.index in targets else texts
        side.setdefault(example.index, example.keys)
    return texts, targets


def names_on(
    axes: dict[int, Axis], tokens: Sequence[Sequence[str]] | None, count: int, what: str = "tokens"
) -> list[list[str]]:
    """Name the real tokens of every example.

    Args:
        axes: tokens by index of the example.
        tokens: of each example, padding left out or kept; None for their positions.
        count: number of examples.
        what: which tokens they are, for errors.

    Returns:
        Names by example; none for an example that has no axis.

    Raises:
        InputError: if the tokens do not fit.
    """
    if not isinstance(tokens, Sequence | None) or isinstance(tokens, str):
        raise InputError(
            f"{what} are lists of texts, one for each example, such as "
            f"[tokenizer.tokenize(text)]. Got {type(tokens).__name__}."
        )
    if tokens is not None and len(tokens) < count:
        raise InputError(f"{what} are of {len(tokens)} examples, but {count} were seen.")
    names: list[list[str]] = [[] for _ in range(count)]
    for index, axis in axes.items():
        if tokens is None:
            names[index] = [str(position) for position in range(len(axis.positions))]
        else:
            names[index] = [str(name) for name in of_real(tokens[index], axis, index, what)]
    return names


def of_real(entries: Sequence[Any], axis: Axis, index: int, what: str) -> list[Any]:
    """Pick what is of real tokens.

    Args:
        entries: one for each token, padding left out or kept.
        axis: the tokens.
        index: of the example.
        what: the entries are, for errors.

    Returns:
        One for each real token.

    Raises:
        InputError: if there are as many neither of real tokens nor of all.
    """
    if len(entries) == len(axis.positions):
        return list(entries)
    if len(entries) == axis.padded:
        return [entries[position] for position in axis.positions.tolist()]
    raise InputError(
        f"Example {index} has {len(axis.positions)} real tokens of {axis.padded}. "
        f"Got {len(entries)} {what}."
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
