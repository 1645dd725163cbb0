"""What a page shows, gathered from results as plain JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attnlens.attention.maps import AttentionMap
from attnlens.attention.recording import Recording
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.errors import InputError
from attnlens.reporting.examples import (
    ExampleAttribution,
    attribution_by_example,
    maps_by_example,
    tokens_by_example,
)
from attnlens.reporting.fitting import DECIMALS, Detail, MapBlocks, notes_on
from attnlens.reporting.fixed_point import packed, whole
from attnlens.reporting.grids import head_grids, layer_curves
from attnlens.results import LayeredResult, LayerKey

SHARE_DECIMALS = 4  # of contributions: hundredths of a percent


class Content:
    """Results taken apart for a page.

    Args:
        results: see :func:`attnlens.reporting.page.report`.
        tokens: tokens of each example, or None.
        layers: layers of the maps to include, or None for all.
        heads: heads of the maps to include, or None for all.

    Raises:
        InputError: if there is nothing to show, or tokens do not fit the maps.
    """

    def __init__(
        self,
        results: Any,
        tokens: Sequence[Sequence[str]] | None,
        layers: set[int] | None,
        heads: set[int] | None,
    ) -> None:
        entries = list(_computed(results))
        layered = [entry for entry in entries if isinstance(entry, LayeredResult)]
        maps = [entry for entry in entries if isinstance(entry, AttentionMap)]
        matrices = [entry for entry in entries if isinstance(entry, AttributionMatrices)]
        strangers = {
            type(entry).__name__
            for entry in entries
            if not isinstance(entry, (LayeredResult, AttentionMap, AttributionMatrices))
        }
        if strangers:
            names = ", ".join(sorted(strangers))
            raise InputError(f"There is no view of {names}. Pass the other results alone.")
        self._blocks = MapBlocks(maps_by_example(maps, layers, heads))
        self._attributions = attribution_by_example(matrices)
        keys = [key for result in layered for key in result.layers]
        keys += [example.layer for example in self._blocks.maps]
        keys += [key for example in self._attributions for key in example.layers]
        if not keys:
            raise InputError(
                "There is nothing to show. Pass a lens that has looked, observers, or results."
            )
        self._keys = list(dict.fromkeys(keys))
        self._names = tokens_by_example([*self._blocks.maps, *self._attributions], tokens)
        self._grids = head_grids(layered, self._keys)
        self._curves = layer_curves(layered, self._keys)

    def without_maps(self, max_tokens: int) -> dict[str, Any]:
        """Return everything but the maps, ready for JSON.

        Args:
            max_tokens: most tokens of an example.

        Returns:
            The document.
        """
        return self._document(Detail(DECIMALS[0], max_tokens, heads=0, examples=0), [])

    def with_maps(self, max_tokens: int, room: int) -> dict[str, Any]:
        """Return everything, with as much of the maps as there is room for, ready for JSON.

        Args:
            max_tokens: most tokens of an example.
            room: bytes that the maps may take.

        Returns:
            The document; its notes say what was left out.
        """
        detail, texts = self._blocks.fitted(max_tokens, room)
        lengths = list(map(len, self._names))
        notes = notes_on(detail, self._blocks, max_tokens, lengths)
        return self._document(detail, texts) | {"notes": notes}

    def _document(self, detail: Detail, texts: Sequence[str]) -> dict[str, Any]:
        return {
            "layers": _layer_labels(self._keys),
            "examples": [
                {"tokens": names[: detail.tokens], "length": len(names)} for names in self._names
            ],
            "grids": self._grids,
            "curves": self._curves,
            "decimals": detail.decimals,
            "maps": self._maps(detail, texts),
            "attribution": [
                self._attribution(example, detail.tokens) for example in self._attributions
            ],
            "notes": [],
        }

    def _maps(self, detail: Detail, texts: Sequence[str]) -> list[dict[str, Any]]:
        if not texts:
            return []
        return [
            {
                "example": example.index,
                "layer": self._keys.index(example.layer),
                "heads": self._blocks.heads_of(example, detail),
                "rows": min(example.raw.shape[1], detail.tokens),
                "columns": min(example.raw.shape[2], detail.tokens),
                "packed": text,
            }
            for example, text in zip(self._blocks.maps, texts, strict=True)
            if text
        ]

    def _attribution(self, example: ExampleAttribution, tokens: int) -> dict[str, Any]:
        sources, targets = example.sources < tokens, example.targets < tokens
        shown = example.contribution[:, sources][..., targets]
        return {
            "example": example.index,
            "layers": [self._keys.index(key) for key in example.layers],
            "sources": example.sources[sources].tolist(),
            "targets": example.targets[targets].tolist(),
            "packed": packed([whole(shown, SHARE_DECIMALS)]),
        }


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
