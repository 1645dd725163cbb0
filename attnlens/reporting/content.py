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
    LayerKey,
    attribution_by_example,
    maps_by_example,
    tokens_by_example,
)
from attnlens.reporting.fitting import Detail, MapBlocks, notes_on
from attnlens.reporting.fixed_point import packed, whole
from attnlens.reporting.grids import head_grids, layer_curves
from attnlens.results import LayeredResult

SHARE_DECIMALS = 4  # of contributions: hundredths of a percent


def document(
    results: Any,
    tokens: Sequence[Sequence[str]] | None,
    layers: set[int] | None,
    heads: set[int] | None,
    max_tokens: int,
    room: int,
) -> dict[str, Any]:
    """Gather what a page shows.

    Args:
        results: see :func:`attnlens.reporting.page.report`.
        tokens: tokens of each example.
        layers: layers of the maps to include, or None.
        heads: heads of the maps to include, or None.
        max_tokens: most tokens of an example.
        room: bytes there are for it.

    Returns:
        A document for JSON.

    Raises:
        InputError: if there is nothing to show, or tokens do not fit the maps.
    """
    found = list(_computed(results))
    maps = maps_by_example((r for r in found if isinstance(r, AttentionMap)), layers, heads)
    attributions = attribution_by_example(r for r in found if isinstance(r, AttributionMatrices))
    layered = [result for result in found if isinstance(result, LayeredResult)]
    shown = (AttentionMap, AttributionMatrices, LayeredResult)
    others = sorted({type(r).__name__ for r in found if not isinstance(r, shown)})
    if others:
        raise InputError(f"There is no view of {', '.join(others)}. Pass the other results alone.")
    if not (maps or attributions or layered):
        raise InputError(
            "There is nothing to show. Pass a lens that has looked, observers, or results."
        )
    keys = list(
        dict.fromkeys(
            [key for result in layered for key in result.layers]
            + [seen.layer for seen in maps]
            + [key for seen in attributions for key in seen.layers]
        )
    )
    names = tokens_by_example([*maps, *attributions], tokens)
    grids, curves = head_grids(layered, keys), layer_curves(layered, keys)
    room -= sum(len(token.encode()) * 2 + 3 for example in names for token in example)
    room -= sum(25 * len(row) for part in (*grids, *curves) for row in part["values"])
    room -= sum(len(_attribution(seen, keys, max_tokens)["packed"]) for seen in attributions)
    blocks = MapBlocks(maps)
    detail, texts = blocks.fitted(max_tokens, room)
    return {
        "layers": _layer_labels(keys),
        "examples": [
            {"tokens": example[: detail.tokens], "length": len(example)} for example in names
        ],
        "grids": grids,
        "curves": curves,
        "decimals": detail.decimals,
        "maps": _maps(blocks, detail, texts, keys),
        "attribution": [_attribution(seen, keys, detail.tokens) for seen in attributions],
        "notes": notes_on(detail, blocks, max_tokens, list(map(len, names))),
    }


def _layer_labels(keys: Sequence[LayerKey]) -> list[str]:
    """The index of each layer, with its stack where several stacks have layers of that kind."""
    # attention modules lie inside layers, whose own results have the shorter name of the layer
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


def _maps(
    blocks: MapBlocks, detail: Detail, texts: Sequence[str], keys: Sequence[LayerKey]
) -> list[dict[str, Any]]:
    return [
        {
            "example": seen.example,
            "layer": keys.index(seen.layer),
            "heads": blocks.heads_of(seen, detail),
            "rows": min(seen.raw.shape[1], detail.tokens),
            "columns": min(seen.raw.shape[2], detail.tokens),
            "packed": text,
        }
        for seen, text in zip(blocks.maps, texts, strict=True)
        if text
    ]


def _attribution(seen: ExampleAttribution, keys: Sequence[LayerKey], tokens: int) -> dict[str, Any]:
    sources, targets = seen.sources < tokens, seen.targets < tokens
    shown = seen.contribution[:, sources][..., targets]
    return {
        "example": seen.example,
        "layers": [keys.index(key) for key in seen.layers],
        "sources": seen.sources[sources].tolist(),
        "targets": seen.targets[targets].tolist(),
        "packed": packed([whole(shown, SHARE_DECIMALS)]),
    }
