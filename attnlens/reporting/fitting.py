"""How much of the maps a page has room for, and in what detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlens.reporting.examples import ExampleMaps
from attnlens.reporting.fixed_point import map_planes, packed
from attnlens.results import LayerKey

DECIMALS = (6, 5, 4, 3)
LEAST_TOKENS = 32
_REMAINS = 100  # bytes of a block that do not shrink with its cells
_SAMPLE = 12  # blocks that are packed to estimate the size of all


@dataclass(frozen=True)
class Detail:
    """What of the maps to include.

    Attributes:
        decimals: decimals of their values.
        tokens: most tokens of an example, from the first.
        heads: most heads of a layer, those with the largest share of null attention first.
        examples: how many examples, from the first.
    """

    decimals: int
    tokens: int
    heads: int
    examples: int


class MapBlocks:
    """Maps to be packed, a block for each example and attention call.

    Args:
        maps: the maps.
    """

    def __init__(self, maps: Sequence[ExampleMaps]) -> None:
        self.maps = maps
        self._order = sorted({example.index for example in maps})
        self._ranking = _by_null_share(maps)
        self._densities: dict[int, float] = {}
        self.examples = len(self._order)
        self.heads = max(map(len, self._ranking.values()), default=0)

    def fitted(self, tokens: int, room: int) -> tuple[Detail, list[str]]:
        """Choose the finest detail that fits, and pack.

        Decimals go first, then tokens beyond the 32nd, then heads, then examples.

        Args:
            tokens: most tokens of an example.
            room: bytes there are.

        Returns:
            The detail and the blocks; an empty string for a block that was left out.
        """
        finest = Detail(DECIMALS[0], tokens, self.heads, self.examples)
        if not self.maps:
            return finest, []
        budget = float(room)
        while True:
            detail = next(d for d in self._coarser(finest) if self._estimate(d) <= max(0, budget))
            blocks = [self.packed(example, detail) for example in self.maps]
            size = sum(
                len(block) + _frame(len(example.heads))
                for example, block in zip(self.maps, blocks, strict=True)
                if block
            )
            if size <= room or not detail.examples:
                return detail, blocks
            budget = 0.98 * min(budget, self._estimate(detail)) * room / size

    def packed(self, example: ExampleMaps, detail: Detail) -> str:
        """Pack the maps of one block."""
        heads = self.heads_of(example, detail)
        if not heads:
            return ""
        window = ([example.heads.index(head) for head in heads], slice(detail.tokens))
        raw, effective = (m[window][..., : detail.tokens] for m in (example.raw, example.effective))
        return packed(map_planes(raw, effective, detail.decimals))

    def heads_of(self, example: ExampleMaps, detail: Detail) -> list[int]:
        """Heads of a block that are included, ascending."""
        if self._order.index(example.index) >= detail.examples:
            return []
        return sorted(set(self._ranking[example.layer][: detail.heads]) & set(example.heads))

    def _coarser(self, finest: Detail) -> Iterator[Detail]:
        """Every detail worth trying, finest first; the last is nothing at all."""
        detail = finest
        for decimals in DECIMALS:
            detail = replace(finest, decimals=decimals)
            yield detail
        longest = max((max(example.raw.shape[1:]) for example in self.maps), default=0)
        for tokens in range(min(longest, finest.tokens) - 1, LEAST_TOKENS - 1, -1):
            detail = replace(detail, tokens=tokens)
            yield detail
        for heads in range(finest.heads - 1, 0, -1):
            detail = replace(detail, heads=heads)
            yield detail
        for examples in range(finest.examples - 1, -1, -1):
            yield replace(detail, examples=examples)

    def _estimate(self, detail: Detail) -> float:
        """Bytes that a detail will take, judged by a sample."""
        density = self._density(detail.decimals)
        counts = [(example, len(self.heads_of(example, detail))) for example in self.maps]
        return sum(
            density * heads * _area(example, detail.tokens) + _frame(heads) + _REMAINS
            for example, heads in counts
            if heads
        )

    def _density(self, decimals: int) -> float:
        if decimals not in self._densities:
            step = max(1, len(self.maps) // _SAMPLE)
            sample = sorted(self.maps, key=lambda example: example.raw.numel())[step // 2 :: step]
            detail = Detail(decimals, 96, self.heads, self.examples)
            bytes_ = sum(len(self.packed(example, detail)) for example in sample)
            cells = sum(len(example.heads) * _area(example, detail.tokens) for example in sample)
            self._densities[decimals] = bytes_ / max(1, cells)
        return self._densities[decimals]


def _by_null_share(maps: Sequence[ExampleMaps]) -> dict[LayerKey, list[int]]:
    """Heads of each layer, those with the largest share of null attention first."""
    sums: dict[LayerKey, dict[int, Tensor]] = {}
    for example in maps:
        raw, effective = example.raw.double(), example.effective.double()
        squares = torch.stack([(raw - effective).square(), raw.square()]).sum((-2, -1))  # [2, h]
        of_layer = sums.setdefault(example.layer, {})
        for head, pair in zip(example.heads, squares.unbind(1), strict=True):
            of_layer[head] = of_layer.get(head, 0) + pair
    return {
        layer: sorted(heads, key=lambda head: -float(heads[head][0] / (heads[head][1] or 1.0)))
        for layer, heads in sums.items()
    }


def _area(example: ExampleMaps, tokens: int) -> int:
    rows, columns = (min(size, tokens) for size in example.raw.shape[1:])
    return rows * columns


def _frame(heads: int) -> int:
    """Bytes of JSON around the block of so many heads."""
    return 100 + 4 * heads


def notes_on(detail: Detail, blocks: MapBlocks, asked: int, lengths: Sequence[int]) -> list[str]:
    """Say what was left out of the maps, and how to get it.

    Args:
        detail: what was included.
        blocks: the maps.
        asked: most tokens of an example that were asked for.
        lengths: tokens of each example.

    Returns:
        Sentences.
    """
    notes = []
    remedy = (
        "Choose layers or heads (layers=, heads=; --layers, --heads), pass fewer examples, or "
        "allow a larger file (max_bytes=; --megabytes)."
    )
    if detail.decimals < DECIMALS[0]:
        notes.append(
            f"Map values are rounded to {detail.decimals} decimals to keep the file small."
        )
    longer = [length for length in lengths if length > detail.tokens]
    if longer:
        reason = "" if detail.tokens == asked else ", so that maps of all heads fit into the file"
        cure = "Raise max_tokens= (--max-tokens)." if detail.tokens == asked else remedy
        notes.append(
            f"{len(longer)} of {len(lengths)} examples have more than {detail.tokens} tokens, up "
            f"to {max(longer)}; the first {detail.tokens} are shown{reason}. Everything was "
            f"computed over whole examples. {cure}"
        )
    if detail.heads < blocks.heads and detail.examples:
        notes.append(
            f"Maps of {detail.heads} of {blocks.heads} heads per layer are in the file: those of "
            f"which most is null. {remedy}"
        )
    if detail.examples < blocks.examples:
        notes.append(
            f"Maps of {detail.examples} of {blocks.examples} examples are in the file. {remedy}"
        )
    return notes
