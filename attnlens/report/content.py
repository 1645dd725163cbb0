"""What a page shows, gathered from results as plain JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import InputError
from attnlens.report.text import MEANINGS

# The grids that open first, where present.
_FIRST = ("effective_fraction", "rank", "entropy", "importance")
LayerKey = tuple[str, int]


@dataclass(frozen=True)
class ExampleMaps:
    """Maps of one layer and example, cut to real tokens.

    Attributes:
        layer: stack and layer.
        example: index of the example.
        heads: indices of the heads, h of them.
        raw: `[h, q, k]`.
        effective: `[h, q, k]`.
        positions: which of the K keys are real, `[k]`.
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
        results: see :func:`attnlens.report.page.report`.
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
    maps = list(_by_example([r for r in found if hasattr(r, "effective")], layers, heads))
    attributions = list(_attributions([r for r in found if hasattr(r, "contribution")]))
    layered = [r for r in found if hasattr(r, "layers") and hasattr(r, "tensors")]
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
    notes: list[str] = []
    examples = _examples([*maps, *attributions], tokens, max_tokens, notes)
    attribution = [_encoded_attribution(seen, keys, max_tokens) for seen in attributions]
    room -= sum(len(entry["values"]) for entry in attribution)
    room -= sum(len(token.encode()) * 2 + 3 for example in examples for token in example["tokens"])
    encoded = _encoded_maps(maps, keys, max_tokens, room, notes)
    return {
        "layers": _layer_labels(keys),
        "examples": examples,
        "grids": _grids(layered, keys),
        "curves": _curves(layered, keys),
        "maps": encoded,
        "attribution": attribution,
        "notes": notes,
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
        if type(results).__name__ != "Recording":
            yield from _computed(results.compute())
    else:
        yield results


def _by_example(
    maps: Iterable[Any], layers: set[int] | None, heads: set[int] | None
) -> Iterator[ExampleMaps]:
    """Take maps apart by example; each layer counts its examples as they come."""
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
            yield ExampleMaps(
                key,
                first + place,
                tuple(entry.heads[i] for i in kept),
                entry.raw[place, kept][:, rows][..., columns],
                entry.effective[place, kept][:, rows][..., columns],
                columns,
                entry.raw.shape[-1],
            )


def _attributions(matrices: Iterable[Any]) -> Iterator[ExampleAttribution]:
    seen: dict[str, int] = {}
    for entry in matrices:
        first = seen.get(entry.stack, 0)
        seen[entry.stack] = first + entry.mask.shape[0]
        for place, real in enumerate(entry.mask):
            count = real.cumsum(0) - 1
            sources, targets = real[entry.sources], real[entry.targets]
            yield ExampleAttribution(
                tuple((entry.stack, layer) for layer in entry.layers),
                first + place,
                entry.contribution[:, place][:, sources][..., targets],
                count[entry.sources[sources]],
                count[entry.targets[targets]],
                real.nonzero()[:, 0],
                real.numel(),
            )


def _examples(
    seen: Sequence[ExampleMaps | ExampleAttribution],
    tokens: Sequence[Sequence[str]] | None,
    max_tokens: int,
    notes: list[str],
) -> list[dict[str, Any]]:
    """Tokens of every example that has maps, cut to a window."""
    sizes: dict[int, ExampleMaps | ExampleAttribution] = {}
    for entry in seen:
        sizes.setdefault(entry.example, entry)
    if tokens is not None and len(tokens) <= max(sizes, default=-1):
        raise InputError(f"tokens are of {len(tokens)} examples, but {len(sizes)} were seen.")
    examples: list[dict[str, Any]] = []
    for index in range(max(sizes, default=-1) + 1):
        length = len(sizes[index].positions) if index in sizes else 0
        names = [str(position) for position in range(length)]
        if tokens is not None and index in sizes:
            names = _names(tokens[index], sizes[index], index)
        examples.append({"tokens": names[:max_tokens], "length": length})
    longer = [example["length"] for example in examples if example["length"] > max_tokens]
    if longer:
        notes.append(
            f"{len(longer)} of {len(examples)} examples have more than {max_tokens} tokens (up to "
            f"{max(longer)}); their first {max_tokens} are shown. Everything was computed over "
            f"whole examples."
        )
    return examples


def _names(
    tokens: Sequence[str], seen: ExampleMaps | ExampleAttribution, example: int
) -> list[str]:
    if len(tokens) == len(seen.positions):
        return [str(token) for token in tokens]
    if len(tokens) == seen.padded:
        return [str(tokens[position]) for position in seen.positions.tolist()]
    raise InputError(
        f"Example {example} has {len(seen.positions)} real tokens of {seen.padded}. Got "
        f"{len(tokens)} token strings."
    )


def _grids(layered: Sequence[Any], keys: Sequence[LayerKey]) -> list[dict[str, Any]]:
    """Layer × head quantities, the most telling first."""
    found: dict[str, dict[str, Any]] = {}
    for result in layered:
        if hasattr(result, "labels"):
            continue
        for name, values in result.tensors().items():
            if values.dim() == 2:
                found[name] = {
                    "name": name.replace("_", " "),
                    "meaning": MEANINGS.get(name, ""),
                    "layers": [keys.index(key) for key in result.layers],
                    "values": _numbers(values),
                }
    first = [name for name in _FIRST if name in found]
    return [found[name] for name in [*first, *(name for name in found if name not in first)]]


def _curves(layered: Sequence[Any], keys: Sequence[LayerKey]) -> list[dict[str, Any]]:
    """Quantities by layer, with a line for each label."""
    curves = []
    for result in layered:
        labels = getattr(result, "labels", None)
        for name, values in result.tensors().items():
            if labels is None and values.dim() != 1:
                continue
            if labels is not None and tuple(values.shape) != (len(result.layers), len(labels)):
                continue
            if name.endswith(("_error", "tokens")):
                continue
            curves.append({
                "name": f"{type(result).__name__.removesuffix('Result')}: {name.replace('_', ' ')}",
                "layers": [keys.index(key) for key in result.layers],
                "labels": list(labels or [""]),
                "values": _numbers(values.reshape(len(result.layers), -1).T),
            })
    return curves


def _encoded_attribution(
    seen: ExampleAttribution, keys: Sequence[LayerKey], max_tokens: int
) -> dict[str, Any]:
    sources, targets = seen.sources < max_tokens, seen.targets < max_tokens
    return {
        "example": seen.example,
        "layers": [keys.index(key) for key in seen.layers],
        "sources": seen.sources[sources].tolist(),
        "targets": seen.targets[targets].tolist(),
        "values": _base64(seen.contribution[:, sources][..., targets], torch.float16),
    }


def _encoded_maps(
    maps: Sequence[ExampleMaps],
    keys: Sequence[LayerKey],
    max_tokens: int,
    room: int,
    notes: list[str],
) -> dict[str, Any]:
    """As many maps as there is room for, as precise as there is room for."""
    chosen, dtype = _fitting(maps, max_tokens, room, notes)
    entries = []
    for seen in maps:
        window = (slice(max_tokens), slice(max_tokens))
        for place, head in enumerate(seen.heads):
            if (seen.layer, head) not in chosen[seen.example]:
                continue
            raw, effective = (m[place][window] for m in (seen.raw, seen.effective))
            entries.append({
                "example": seen.example,
                "layer": keys.index(seen.layer),
                "head": head,
                "rows": raw.shape[0],
                "columns": raw.shape[1],
                "raw": _base64(raw, dtype),
                "effective": _base64(effective, dtype),
            })
    return {"half": dtype == torch.float16, "entries": entries}


def _fitting(
    maps: Sequence[ExampleMaps], max_tokens: int, room: int, notes: list[str]
) -> tuple[dict[int, set[tuple[LayerKey, int]]], torch.dtype]:
    """Choose the heads to include for each example: all, or those that lose most, per layer."""
    cells = {
        (seen.example, seen.layer): min(seen.raw.shape[1], max_tokens)
        * min(seen.raw.shape[2], max_tokens)
        for seen in maps
    }
    ranking = _ranking(maps)
    most = max((len(heads) for heads in ranking.values()), default=0)
    examples = sorted({seen.example for seen in maps})

    def size(count: int, width: int, examples: Sequence[int]) -> int:
        """Bytes of base64 with the JSON around it."""
        return sum(
            min(count, len(ranking[layer]))
            * (2 * (width * cells[example, layer] + 2) * 4 // 3 + 99)
            for example, layer in cells
            if example in examples
        )

    dtype = torch.float32 if size(most, 4, examples) <= room else torch.float16
    if dtype == torch.float16:
        notes.append("Map values are rounded to half precision, about three digits.")
    width = dtype.itemsize
    count = most
    while count > 1 and size(count, width, examples) > room:
        count -= 1
    every = len(examples)
    while examples and size(count, width, examples) > room:
        examples.pop()
    if count < most:
        notes.append(
            f"There is room for maps of {count} of {most} heads per layer: those of which most "
            f"is null. Choose others with heads= and layers=, or raise max_bytes=."
        )
    if len(examples) < every:
        notes.append(f"There is room for maps of {len(examples)} of {every} examples.")
    heads = {(layer, head) for layer, order in ranking.items() for head in order[:count]}
    return {seen.example: heads if seen.example in examples else set() for seen in maps}, dtype


def _ranking(maps: Sequence[ExampleMaps]) -> dict[LayerKey, list[int]]:
    """Heads of each layer, those with the largest share of null attention first."""
    null: dict[LayerKey, dict[int, tuple[float, float]]] = {}
    for seen in maps:
        whole = seen.raw.double().square().sum((1, 2)).tolist()
        lost = (seen.raw - seen.effective).double().square().sum((1, 2)).tolist()
        of_layer = null.setdefault(seen.layer, {})
        for head, part, total in zip(seen.heads, lost, whole, strict=True):
            before = of_layer.get(head, (0.0, 0.0))
            of_layer[head] = (before[0] + part, before[1] + total)
    return {
        layer: sorted(heads, key=lambda head: -heads[head][0] / (heads[head][1] or 1.0))
        for layer, heads in null.items()
    }


def _base64(values: Tensor, dtype: torch.dtype) -> str:
    array = values.to(dtype).contiguous().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _numbers(values: Tensor) -> list[list[float | None]]:
    """Rows of numbers to six digits, None where there is none."""
    return [[float(f"{x:.6g}") if np.isfinite(x) else None for x in row] for row in values.tolist()]
