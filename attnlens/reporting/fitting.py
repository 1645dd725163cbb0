"""How much of the maps a page has room for, and in what detail."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlens.reporting.examples import ExampleMaps
from attnlens.reporting.quantising import packed, unit_of
from attnlens.results import LayerKey

BITS = (24, 20, 16, 14, 12, 11, 10, 9, 8)
LEAST_TOKENS = 32
_FRAME = 130  # bytes of a block, and of a map, that do not shrink with its cells
_NORM = 7  # bytes of the norm of a value
_SAMPLE = 12  # blocks that are packed to estimate the size of all


@dataclass(frozen=True)
class Detail:
    """What of the maps to include.

    Attributes:
        bits: of their entries, in units of their own.
        tokens: most tokens of an example, from the first.
        heads: most heads of a layer, those with the largest share of null attention first.
        examples: how many examples, from the first.
    """

    bits: int
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

    def fitted(self, tokens: int, room: int) -> tuple[Detail, list[list[dict[str, Any]]]]:
        """Choose the finest detail that fits, and pack.

        Bits go first, then tokens beyond the 32nd, then heads, then examples.

        Args:
            tokens: most tokens of an example.
            room: bytes there are.

        Returns:
            The detail, and the maps of each block; none for a block that was left out.
        """
        finest = Detail(BITS[0], tokens, self.heads, self.examples)
        if not self.maps:
            return finest, []
        budget = float(room)
        while True:
            detail = next(d for d in self._coarser(finest) if self._estimate(d) <= max(0, budget))
            blocks = [self.packed(example, detail) for example in self.maps]
            size = sum(len(json.dumps(block)) + _FRAME for block in blocks if block)
            if size <= room or not detail.examples:
                return detail, blocks
            budget = 0.98 * min(budget, self._estimate(detail)) * room / size

    def packed(self, example: ExampleMaps, detail: Detail) -> list[dict[str, Any]]:
        """Pack the maps of one block, head by head, so that each is unpacked by itself."""
        heads = [example.heads.index(head) for head in self.heads_of(example, detail)]
        part = example.within(detail.tokens)
        null = part.raw.double() - part.effective.double()
        minimal = [] if part.minimal is None else [part.minimal.double()]
        planes = torch.stack([part.raw.double(), null, *minimal], 1)
        largest = planes.abs().nan_to_num(0.0, 0.0, 0.0).flatten(1)
        largest = largest.amax(1) if largest.shape[1] else largest.sum(1)
        fractions, entropies = _fractions(part), _entropies(part)
        maps = []
        for head in heads:
            unit = unit_of(float(largest[head]), detail.bits)
            entry: dict[str, Any] = {
                "unit": unit,
                "packed": packed(planes[head], unit, detail.bits),
                "fraction": number(fractions[head]),
                "entropy": number(entropies[head]),
            }
            if part.norms is not None:
                entry["norms"] = [number(norm, 4) or 0.0 for norm in part.norms[head]]
            maps.append(entry)
        return maps

    def heads_of(self, example: ExampleMaps, detail: Detail) -> list[int]:
        """Heads of a block that are included, ascending."""
        if self._order.index(example.index) >= detail.examples:
            return []
        return sorted(set(self._ranking[example.layer][: detail.heads]) & set(example.heads))

    def _coarser(self, finest: Detail) -> Iterator[Detail]:
        """Every detail worth trying, finest first; the last is nothing at all."""
        detail = finest
        for bits in BITS:
            detail = replace(finest, bits=bits)
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
        density = self._density(detail.bits)
        return sum(
            heads * (density * _area(example, detail.tokens) + _FRAME + _norms(example, detail))
            + _FRAME
            for example in self.maps
            if (heads := len(self.heads_of(example, detail)))
        )

    def _density(self, bits: int) -> float:
        if bits not in self._densities:
            step = max(1, len(self.maps) // _SAMPLE)
            sample = sorted(self.maps, key=lambda example: example.raw.numel())[step // 2 :: step]
            detail = Detail(bits, 96, self.heads, self.examples)
            maps = [entry for example in sample for entry in self.packed(example, detail)]
            cells = sum(len(example.heads) * _area(example, detail.tokens) for example in sample)
            self._densities[bits] = sum(len(entry["packed"]) for entry in maps) / max(1, cells)
        return self._densities[bits]


def _by_null_share(maps: Sequence[ExampleMaps]) -> dict[LayerKey, list[int]]:
    """Heads of each layer, those with the largest share of null attention first."""
    sums: dict[LayerKey, dict[int, Tensor]] = {}
    for example in maps:
        of_layer = sums.setdefault(example.layer, {})
        for head, pair in zip(example.heads, _squares(example).unbind(1), strict=True):
            of_layer[head] = of_layer.get(head, 0) + pair
    return {
        layer: sorted(heads, key=lambda head: float(-heads[head][0] / (heads[head][2] or 1.0)))
        for layer, heads in sums.items()
    }


def _squares(example: ExampleMaps) -> Tensor:
    """`‖A − A⊥‖²`, `‖A⊥‖²` and `‖A‖²` of every head, `[3, h]`."""
    raw, effective = example.raw.double(), example.effective.double()
    return torch.stack([raw - effective, effective, raw]).square().sum((-2, -1))


def _fractions(example: ExampleMaps) -> Tensor:
    """`‖A⊥‖² / ‖A‖²` of every head."""
    _, effective, raw = _squares(example).unbind()
    return effective / raw


def _entropies(example: ExampleMaps) -> Tensor:
    """Mean entropy of the rows of every head, in nats."""
    entropies: Tensor = torch.special.entr(example.raw.double()).sum(-1).mean(-1)
    return entropies


def number(value: Tensor, digits: int = 6) -> float | None:
    """Round to significant digits, for JSON.

    Args:
        value: a number.
        digits: how many.

    Returns:
        The number, or None where it is not finite.
    """
    return float(f"{float(value):.{digits}g}") if value.isfinite() else None


def _area(example: ExampleMaps, tokens: int) -> int:
    part = example.within(tokens)
    return part.raw.shape[1] * part.raw.shape[2]


def _norms(example: ExampleMaps, detail: Detail) -> int:
    """Bytes of the norms of a head's values."""
    if example.norms is None:
        return 0
    return _NORM * min(detail.tokens, example.norms.shape[1])


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
    if detail.bits < BITS[0]:
        error = 100 / (2**detail.bits - 2)
        notes.append(
            f"Map values are rounded to {detail.bits} bits, to ±{error:.2g} % of the largest of "
            f"each map, to keep the file small."
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
