"""Layer × head grids and curves over layers, as plain JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlens.recovery import TokenIdentifiabilityResult
from attnlens.results import LayeredResult, LayerKey

# The grids that open first, where present.
_FIRST = ("effective_fraction", "rank", "entropy", "importance")


def _rank(field: str) -> int:
    return _FIRST.index(field) if field in _FIRST else len(_FIRST)


def head_grids(results: Sequence[LayeredResult], keys: Sequence[LayerKey]) -> list[dict[str, Any]]:
    """Lay out quantities of one number per head, the most telling first.

    Args:
        results: results of any kind; those with labels, or of layers alone, hold no such quantity.
        keys: all layers, in the order of the page.

    Returns:
        A grid for each quantity.
    """
    grids: dict[str, dict[str, Any]] = {}
    for result in results:
        if hasattr(result, "labels") or "head" not in result.axes:
            continue
        matrices = {name: values for name, values in result.tensors().items() if values.dim() == 2}
        for field, values in matrices.items():
            name = field.replace("_", " ")
            if field in grids:  # another result has it as well
                name = f"{name}, {in_words(result).lower()}"
            grids[name if field in grids else field] = {
                "name": name,
                "meaning": result.meanings.get(field, ""),
                "layers": [keys.index(key) for key in result.layers],
                "values": numbers(values),
                **_examples(result),
            }
    return [grids[name] for name in sorted(grids, key=_rank)]


def layer_curves(
    results: Sequence[LayeredResult], keys: Sequence[LayerKey]
) -> list[dict[str, Any]]:
    """Lay out quantities by layer, with a line for each label.

    Args:
        results: results of any kind.
        keys: all layers, in the order of the page.

    Returns:
        A curve for each quantity.
    """
    rates = [result for result in results if isinstance(result, TokenIdentifiabilityResult)]
    others = [result for result in results if not isinstance(result, TokenIdentifiabilityResult)]
    return [
        *_identified(rates, keys),
        *(curve for result in rates for curve in _rates_apart(result, keys)),
        *(curve for result in others for curve in _by_label(result, keys)),
    ]


def _identified(
    results: Sequence[TokenIdentifiabilityResult], keys: Sequence[LayerKey]
) -> list[dict[str, Any]]:
    """Tokens identified by each map, beside what guessing would identify."""
    curves = []
    for layers in dict.fromkeys(result.layers for result in results):
        same = [result for result in results if result.layers == layers]
        lines = {f"{result.map}, {result.distance}": result.rate for result in same}
        lines["control: position alone"] = same[0].position.expand(len(layers))
        lines["control: chance"] = same[0].chance.expand(len(layers))
        meaning = (
            f"share of tokens of {int(same[0].sequences[2])} held-out sequences that a map finds "
            f"again among the tokens of their sequence, from their hidden state alone"
        )
        curves.append(_curve("Tokens identified", layers, keys, lines, meaning))
    return curves


def _rates_apart(
    result: TokenIdentifiabilityResult, keys: Sequence[LayerKey]
) -> list[dict[str, Any]]:
    """Tokens identified by label, and neighbours by offset, where there are several."""
    curves = []
    if len(result.labels) > 1:
        lines = dict(zip(result.labels, result.by_label.T, strict=True))
        curves.append(
            _curve(f"Tokens identified by label, {result.map}", result.layers, keys, lines)
        )
    if result.offsets:
        names = [f"{offset:+d}".replace("-", "−") for offset in result.offsets]
        lines = dict(zip(names, result.neighbours.T, strict=True))
        curves.append(_curve(f"Neighbours identified, {result.map}", result.layers, keys, lines))
    return curves


def _by_label(result: LayeredResult, keys: Sequence[LayerKey]) -> list[dict[str, Any]]:
    """Quantities `[L]` or, by label, `[L, G]`; of `[L, H, G]` the mean over the heads."""
    labels = getattr(result, "labels", None)
    curves = []
    for name, values in result.tensors().items():
        if name.endswith(("_error", "tokens")):
            continue
        if "head" in result.axes:
            values = values.nanmean(1) if values.dim() == 3 else values[:0]
        by_layer = (len(result.layers), *(() if labels is None else (len(labels),)))
        if tuple(values.shape) != by_layer:
            continue
        lines = dict(zip(labels or [""], values.reshape(len(result.layers), -1).T, strict=True))
        title = f"{in_words(result)}: {name.replace('_', ' ')}"
        curves.append(_curve(title, result.layers, keys, lines, result.meanings.get(name, "")))
    return curves


def _curve(
    name: str,
    layers: Sequence[LayerKey],
    keys: Sequence[LayerKey],
    lines: dict[str, Tensor],
    meaning: str = "",
) -> dict[str, Any]:
    return {
        "name": name,
        "meaning": meaning,
        "layers": [keys.index(key) for key in layers],
        "labels": list(lines),
        "values": numbers(torch.stack([values.double() for values in lines.values()])),
    }


def _examples(result: LayeredResult) -> dict[str, int]:
    """How many examples a result is of, where it says so."""
    counted = result.tensors().get("examples")
    if counted is None or not counted.isfinite().any():
        return {}
    return {"examples": int(counted[counted.isfinite()].max())}


def in_words(result: LayeredResult) -> str:
    """Name a kind of result in words, as in `Label attention`.

    Args:
        result: of any kind.

    Returns:
        The name.
    """
    name = type(result).__name__.removesuffix("Result")
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", name).capitalize()


def numbers(values: Tensor) -> list[list[float | None]]:
    """Rows of numbers to six digits, None where there is none.

    Args:
        values: a matrix.

    Returns:
        Its rows.
    """
    return [
        [float(f"{x:.6g}") if math.isfinite(x) else None for x in row] for row in values.tolist()
    ]
