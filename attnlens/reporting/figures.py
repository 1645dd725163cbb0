"""Figures for papers, drawn with `matplotlib`; each function returns the `Axes` it drew on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from attnlens.errors import InputError

Array = np.ndarray[Any, Any]
Values = Tensor | Array | Sequence[float]

# Okabe and Ito's palette, distinct with every kind of colour vision.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vPX"
_DISTANCES = ("1", "2", "3", "4–5", "6–10", "≥ 11")


def correlation_by_length(length: Values, correlation: Values, *, axes: Any = None) -> Any:
    """Draw the correlation of raw and effective attention against the length of the input.

    Args:
        length: tokens of each example, `[N]`.
        correlation: Pearson's r of each, `[N]` in `[-1, 1]`.
        axes: where to draw; new ones by default.

    Returns:
        The axes.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, figure 2.

    Examples:
        >>> axes = correlation_by_length([10, 20, 40], [1.0, 1.0, 0.5])
    """
    axes = _axes(axes, "tokens", "correlation of raw and effective attention")
    axes.scatter(_array(length), _array(correlation), s=9, alpha=0.5, color=_COLOURS[0], lw=0)
    return axes


def attention_by_token_type(
    raw: Values, effective: Values, types: Sequence[str], *, axes: Any = None
) -> Any:
    """Draw how much raw and effective attention each type of token gets, by layer.

    Args:
        raw: share of each type, `[L, H, G]` or `[L, G]`; heads give means and a spread, and
            those that are NaN are left out.
        effective: the same of effective attention.
        types: names of the G types.
        axes: where to draw; new ones by default.

    Returns:
        The axes: solid lines for raw, dashed for effective.

    Raises:
        InputError: if there are not as many types as columns.

    Examples:
        >>> raw, effective = torch.rand(2, 6, 12)
        >>> axes = attention_by_token_type(raw[..., None], effective[..., None], ["[CLS]"])
    """
    axes = _axes(axes, "layer", "attention")
    for values, style, kind in ((raw, "-", "raw"), (effective, "--", "effective")):
        array = _array(values)
        heads = array[:, None] if array.ndim == 2 else array
        if heads.shape[-1] != len(types):
            raise InputError(f"{len(types)} types for values of shape {list(array.shape)}.")
        layers = np.arange(len(heads))
        for place, name in enumerate(types):
            mean, spread = np.nanmean(heads[..., place], 1), np.nanstd(heads[..., place], 1)
            axes.plot(layers, mean, ls=style, label=f"{name}, {kind}", **_look(place))
            _band(axes, place, layers, mean - spread, mean + spread)
    return _legend(axes)


def own_contribution(result: Any, *, axes: Any = None) -> Any:
    """Draw by layer how much of a hidden state comes from its own token.

    Args:
        result: a :class:`~attnlens.attribution.contributions.HiddenTokenAttributionResult`.
        axes: where to draw; new ones by default.

    Returns:
        The axes: a box for each layer of the first label, and the mean of every label.

    Examples:
        >>> attribution = HiddenTokenAttribution(probes=1)
        >>> with Lens(model, attribution), torch.no_grad():
        ...     output = model(**batch)
        >>> axes = own_contribution(attribution.compute())
    """
    axes = _axes(axes, "layer", "own contribution")
    names = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(names, row, strict=True)) for row in result.own_box[:, 0].tolist()]
    axes.bxp(boxes, positions=_layers(result), showfliers=False, widths=0.5)
    return _by_label(axes, _layers(result), result.own, result.labels)


def not_main_share(result: Any, *, axes: Any = None) -> Any:
    """Draw by layer the share of tokens to which another token contributes most.

    Args:
        result: as for :func:`own_contribution`.
        axes: where to draw; new ones by default.

    Returns:
        The axes.

    Examples:
        >>> attribution = HiddenTokenAttribution(probes=1)
        >>> with Lens(model, attribution), torch.no_grad():
        ...     output = model(**batch)
        >>> axes = not_main_share(attribution.compute())
    """
    axes = _axes(axes, "layer", "tokens with another main contributor")
    return _by_label(axes, _layers(result), result.not_main, result.labels)


def contribution_by_distance(result: Any, *, label: int = 0, axes: Any = None) -> Any:
    """Draw by layer the contribution of neighbours at each distance, in percent over layers.

    Args:
        result: as for :func:`own_contribution`.
        label: which label of target tokens.
        axes: where to draw; new ones by default.

    Returns:
        The axes.

    Examples:
        >>> attribution = HiddenTokenAttribution(probes=1)
        >>> with Lens(model, attribution), torch.no_grad():
        ...     output = model(**batch)
        >>> axes = contribution_by_distance(attribution.compute())
    """
    axes = _axes(axes, "layer", "share of a distance's contribution, %")
    return _by_label(axes, _layers(result), result.distance_profile[:, label], _DISTANCES)


def contribution_by_offset(result: Any, *, label: int = 0, axes: Any = None) -> Any:
    """Draw the contribution of each relative position, a line for each layer, on axes.

    Args:
        result: as for :func:`own_contribution`.
        label: which label of target tokens.
        axes: where to draw; new ones by default.

    Returns:
        The axes.

    Examples:
        >>> attribution = HiddenTokenAttribution(probes=1)
        >>> with Lens(model, attribution), torch.no_grad():
        ...     output = model(**batch)
        >>> axes = contribution_by_offset(attribution.compute())
    """
    axes = _axes(axes, "offset, tokens", "contribution")
    offsets = _array(result.offset)[:, label]
    radius = offsets.shape[1] // 2
    for place, (_, layer) in enumerate(result.layers):
        look = {**_look(place), "marker": None}
        axes.plot(np.arange(-radius, radius + 1), offsets[place], label=f"layer {layer}", **look)
    return _legend(axes)


def identifiability_curves(
    rates: Mapping[str, Values], *, chance: float | None = None, axes: Any = None
) -> Any:
    """Draw by layer how often a token is recognised in its hidden state.

    Args:
        rates: rate at each layer, `[L]` in `[0, 1]`, by name of the method.
        chance: rate of guessing, drawn as a line.
        axes: where to draw; new ones by default.

    Returns:
        The axes.

    Examples:
        >>> axes = identifiability_curves({"linear map": [1.0, 0.9, 0.8]}, chance=0.1)
    """
    axes = _axes(axes, "layer", "tokens identified")
    for place, (name, values) in enumerate(rates.items()):
        array = _array(values)
        axes.plot(np.arange(len(array)), array, label=name, **_look(place))
    if chance is not None:
        axes.axhline(chance, color="0.5", lw=0.8, ls=":", label="chance")
    axes.set_ylim(0, 1.02)
    return _legend(axes)


def pruning_curves(removed: Values, scores: Mapping[str, Values], *, axes: Any = None) -> Any:
    """Draw what is left of a score as heads are removed.

    Args:
        removed: share of heads removed, `[S]` in `[0, 1]`.
        scores: score at each step, `[S]`, or `[R, S]` for R seeds, by name of the criterion.
        axes: where to draw; new ones by default.

    Returns:
        The axes: means over seeds, with the range as a band.

    Examples:
        >>> axes = pruning_curves([0, 0.5, 1], {"random": [0.9, 0.7, 0.2]})
    """
    axes = _axes(axes, "heads removed", "score")
    steps = _array(removed)
    for place, (name, values) in enumerate(scores.items()):
        runs = np.atleast_2d(_array(values))
        axes.plot(steps, runs.mean(0), label=name, **_look(place))
        if len(runs) > 1:
            _band(axes, place, steps, runs.min(0), runs.max(0))
    return _legend(axes)


def before_and_after(before: Values, after: Values, *, name: str = "", axes: Any = None) -> Any:
    """Draw one number per head before and after fine-tuning against each other.

    Args:
        before: `[L, H]`.
        after: `[L, H]`.
        name: the quantity.
        axes: where to draw; new ones by default.

    Returns:
        The axes: a point for each head, coloured by layer; on the diagonal nothing changed.

    Examples:
        >>> axes = before_and_after(torch.rand(6, 12), torch.rand(6, 12), name="entropy")
    """
    axes = _axes(axes, f"{name} before".strip(), f"{name} after".strip())
    first, second = _array(before), _array(after)
    layers = np.repeat(np.arange(first.shape[0]), first.shape[1])
    points = axes.scatter(first.ravel(), second.ravel(), c=layers, cmap="cividis", s=14, lw=0)
    axes.figure.colorbar(points, ax=axes, label="layer")
    axes.axline((float(np.nanmin(first)),) * 2, slope=1, color="0.5", lw=0.8, ls=":")
    return axes


def _axes(axes: Any, horizontal: str, vertical: str) -> Any:
    """New axes with publication defaults unless there are some, labelled."""
    if axes is None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise InputError(
                'Figures need matplotlib. Install it: pip install "attnlens[report]"'
            ) from error
        figure = Figure(figsize=(3.4, 2.4), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    axes.set_xlabel(horizontal, fontsize=8)
    axes.set_ylabel(vertical, fontsize=8)
    return axes


def _by_label(axes: Any, layers: Sequence[int], values: Any, labels: Sequence[str]) -> Any:
    """A line over layers for each label of `[L, G]`."""
    for place, name in enumerate(labels):
        axes.plot(layers, _array(values)[:, place], label=name, **_look(place))
    return _legend(axes) if len(labels) > 1 else axes


def _layers(result: Any) -> list[int]:
    return [layer for _, layer in result.layers]


def _band(axes: Any, place: int, steps: Array, low: Array, high: Array) -> None:
    axes.fill_between(steps, low, high, alpha=0.13, lw=0, color=_look(place)["color"])


def _look(place: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 3,
        "lw": 1,
    }


def _legend(axes: Any) -> Any:
    axes.legend(fontsize=6, frameon=False)
    return axes


def _array(values: Any) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=float)
