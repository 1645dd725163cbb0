"""What a page shows, gathered from results as plain JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attnlens.attention.maps import AttentionMap
from attnlens.attention.recording import Recording
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.errors import InputError
from attnlens.reporting.examples import (
    ExampleAttribution,
    ExampleMaps,
    Wanted,
    attribution_by_example,
    axes_by_example,
    maps_by_example,
    names_on,
    of_real,
)
from attnlens.reporting.fitting import BITS, Detail, MapBlocks, notes_on
from attnlens.reporting.grids import head_grids, layer_curves
from attnlens.reporting.pictures import placed
from attnlens.reporting.quantising import packed
from attnlens.results import LayeredResult, LayerKey

_SHARE = 1e-4  # unit of contributions: hundredths of a percent


@dataclass(frozen=True)
class Names:
    """What the tokens of the examples are; see :func:`attnlens.reporting.page.report`.

    Attributes:
        tokens: of each example.
        targets: of its decoder.
        segments: text of a pair that each token is of.
        pictures: what a vision model saw.
    """

    tokens: Sequence[Sequence[str]] | None = None
    targets: Sequence[Sequence[str]] | None = None
    segments: Sequence[Sequence[int]] | None = None
    pictures: Sequence[Any] | None = None


class Content:
    """Results taken apart for a page.

    Args:
        results: see :func:`attnlens.reporting.page.report`.
        second: results of the second of two models, or None.
        names: see there.
        wanted: which maps to include.

    Raises:
        InputError: if there is nothing to show, or tokens do not fit the maps.
    """

    def __init__(
        self,
        results: Any,
        second: Any,
        names: Names,
        wanted: Wanted,
    ) -> None:
        entries = list(_computed(results))
        layered = [entry for entry in entries if isinstance(entry, LayeredResult)]
        maps = [entry for entry in entries if isinstance(entry, AttentionMap)]
        others = [entry for entry in _computed(second or []) if isinstance(entry, AttentionMap)]
        matrices = [entry for entry in entries if isinstance(entry, AttributionMatrices)]
        strangers = {
            type(entry).__name__
            for entry in entries
            if not isinstance(entry, (LayeredResult, AttentionMap, AttributionMatrices))
        }
        if strangers:
            listed = ", ".join(sorted(strangers))
            raise InputError(f"There is no view of {listed}. Pass the other results alone.")
        first, second_maps = maps_by_example(maps, wanted), maps_by_example(others, wanted, 1)
        self._blocks = MapBlocks([*first, *second_maps])
        self._attributions = attribution_by_example(matrices)
        keys = [key for result in layered for key in result.layers]
        keys += [example.layer for example in self._blocks.maps]
        keys += [key for example in self._attributions for key in example.layers]
        if not keys:
            raise InputError(
                "There is nothing to show. Pass a lens that has looked, observers, or results."
            )
        self._keys = list(dict.fromkeys(keys))
        self._examples = _examples([*self._blocks.maps, *self._attributions], names)
        self._grids = head_grids(layered, self._keys)
        self._curves = layer_curves(layered, self._keys)

    def without_maps(self, max_tokens: int) -> dict[str, Any]:
        """Return everything but the maps, ready for JSON.

        Args:
            max_tokens: most tokens of an example.

        Returns:
            The document.
        """
        return self._document(Detail(BITS[0], max_tokens, heads=0, examples=0), [])

    def with_maps(self, max_tokens: int, room: int) -> dict[str, Any]:
        """Return everything, with as much of the maps as there is room for, ready for JSON.

        Args:
            max_tokens: most tokens of an example.
            room: bytes that the maps may take.

        Returns:
            The document; its notes say what was left out.
        """
        detail, blocks = self._blocks.fitted(max_tokens, room)
        lengths = [example["length"] for example in self._examples]
        notes = notes_on(detail, self._blocks, max_tokens, lengths)
        return self._document(detail, blocks) | {"notes": notes}

    def _document(self, detail: Detail, blocks: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            "layers": _layer_labels(self._keys),
            "examples": [_cut(example, detail.tokens) for example in self._examples],
            "grids": self._grids,
            "curves": self._curves,
            "maps": self._maps(detail, blocks),
            "attribution": [
                self._attribution(example, detail.tokens) for example in self._attributions
            ],
            "notes": [],
        }

    def _maps(self, detail: Detail, blocks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        if not blocks:
            return []
        return [
            {
                "model": example.model,
                "example": example.index,
                "layer": self._keys.index(example.layer),
                "kind": example.kind,
                "first": example.first,
                "heads": self._blocks.heads_of(example, detail),
                "rows": example.within(detail.tokens).raw.shape[1],
                "columns": example.within(detail.tokens).raw.shape[2],
                "bits": detail.bits,
                "maps": maps,
            }
            for example, maps in zip(self._blocks.maps, blocks, strict=True)
            if maps
        ]

    def _attribution(self, example: ExampleAttribution, tokens: int) -> dict[str, Any]:
        sources, targets = example.sources < tokens, example.targets < tokens
        shown = example.contribution[:, sources][..., targets]
        return {
            "example": example.index,
            "layers": [self._keys.index(key) for key in example.layers],
            "sources": example.sources[sources].tolist(),
            "targets": example.targets[targets].tolist(),
            "packed": packed(shown.clamp(-1e5, 1e5), _SHARE, 32),
        }


def _examples(
    examples: Sequence[ExampleMaps | ExampleAttribution], names: Names
) -> list[dict[str, Any]]:
    """What is known of each example's tokens."""
    texts, targets = axes_by_example(examples)
    count = max((example.index for example in examples), default=-1) + 1
    tokens = names_on(texts, names.tokens, count)
    answers = names_on(targets, names.targets, count, "targets")
    ends = {
        example.index: example.ends
        for example in examples
        if isinstance(example, ExampleMaps) and example.ends and example.kind == "decoder"
    }
    entries: list[dict[str, Any]] = []
    for index in range(count):
        entry: dict[str, Any] = {"tokens": tokens[index], "length": len(tokens[index])}
        if index in targets:
            entry["targets"] = answers[index]
        if names.segments is not None and index in texts:
            segments = of_real(names.segments[index], texts[index], index, "segments")
            entry["segments"] = [int(segment) for segment in segments]
        if index in ends:
            entry["steps"] = list(ends[index])
        if names.pictures is not None:
            entry["picture"], patches = placed(names.pictures[index], len(tokens[index]))
            entry["tokens"] = patches if names.tokens is None else tokens[index]
        entries.append(entry)
    return entries


def _cut(example: dict[str, Any], tokens: int) -> dict[str, Any]:
    """An example as far as it is shown."""
    shown = {
        name: entry[:tokens] if name in ("tokens", "targets", "segments") else entry
        for name, entry in example.items()
    }
    if "steps" in shown:
        shown["steps"] = [row for row in shown["steps"] if row < tokens]
    return shown


def _layer_labels(keys: Sequence[LayerKey]) -> list[str]:
    """The index of each layer, with its stack where several stacks have layers of that kind."""
    # Attention modules lie inside layers, whose own results have the shorter name of the layer.
    inner = {stack for stack, _ in keys}
    outer = {stack for stack in inner if any(other.startswith(f"{stack}.") for other in inner)}
    several = {stack for kind in (outer, inner - outer) if len(kind) > 1 for stack in kind}
    return [f"{stack} {layer}" if stack in several else str(layer) for stack, layer in keys]


def _computed(results: Any) -> Iterator[Any]:
    """Flatten lenses, observers and lists into what observers computed."""
    if hasattr(results, "observers"):
        yield from _computed(results.observers)
    elif isinstance(results, (list, tuple)):
        for entry in results:
            yield from _computed(entry)
    elif hasattr(results, "compute"):
        yield from getattr(results, "matrices", [])
        if not isinstance(results, Recording):
            yield from _computed(results.compute())
    else:
        yield results
