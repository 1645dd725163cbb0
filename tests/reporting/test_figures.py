"""Figures, compared by the data they hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attnlens
from attnlens import HiddenTokenAttribution, Lens
from attnlens.errors import InputError
from attnlens.reporting import figures
from tests.support import heads, models

GENERATOR = torch.Generator().manual_seed(0)
L, G, R = 3, 2, 4
RESULT = SimpleNamespace(
    layers=tuple(("stack", layer) for layer in range(L)),
    labels=("noun", "verb"),
    own=torch.rand(L, G, generator=GENERATOR),
    own_box=torch.rand(L, G, 5, generator=GENERATOR).sort(-1).values,
    not_main=torch.rand(L, G, generator=GENERATOR),
    distance_profile=torch.rand(L, G, 6, generator=GENERATOR),
    offset=torch.rand(L, G, 2 * R + 1, generator=GENERATOR),
)


def lines(axes):
    """Data of every labelled line."""
    return {
        line.get_label(): np.asarray(line.get_ydata(), dtype=float)
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def rendered(axes):
    axes.figure.canvas.draw()
    assert axes.get_xlabel() and axes.get_ylabel()
    return axes


def test_correlation_by_length():
    axes = rendered(figures.correlation_by_length([10, 20, 30], torch.tensor([1.0, 0.5, 0.2])))
    np.testing.assert_allclose(axes.collections[0].get_offsets()[:, 1], [1.0, 0.5, 0.2], rtol=1e-6)


def test_attention_by_token_type():
    raw, effective = torch.rand(L, 4, G, generator=GENERATOR), torch.rand(L, G)
    axes = rendered(figures.attention_by_token_type(raw, effective, ["[CLS]", "other"]))
    found = lines(axes)
    np.testing.assert_allclose(found["other, raw"], raw.mean(1)[:, 1], rtol=1e-6)
    np.testing.assert_allclose(found["[CLS], effective"], effective[:, 0], rtol=1e-6)
    with pytest.raises(InputError, match="3 types"):
        figures.attention_by_token_type(raw, effective, ["a", "b", "c"])


def test_own_contribution_and_its_boxes():
    axes = rendered(figures.own_contribution(RESULT))
    np.testing.assert_allclose(lines(axes)["verb"], RESULT.own[:, 1], rtol=1e-6)
    heights = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
    for box in RESULT.own_box[:, 0]:
        assert any(len(h) == 2 and np.allclose(h, box[2]) for h in heights)


def test_not_main_share():
    found = lines(rendered(figures.not_main_share(RESULT)))
    np.testing.assert_allclose(found["noun"], RESULT.not_main[:, 0], rtol=1e-6)


def test_contribution_by_distance_and_by_offset():
    found = lines(rendered(figures.contribution_by_distance(RESULT, label=1)))
    np.testing.assert_allclose(found["4–5"], RESULT.distance_profile[:, 1, 3], rtol=1e-6)
    axes = rendered(figures.contribution_by_offset(RESULT))
    np.testing.assert_allclose(lines(axes)["layer 2"], RESULT.offset[2, 0], rtol=1e-6)
    assert axes.get_lines()[0].get_xdata().tolist() == list(range(-R, R + 1))


def test_identifiability_curves():
    axes = rendered(figures.identifiability_curves({"linear": [1.0, 0.9, 0.7]}, chance=0.1))
    found = lines(axes)
    np.testing.assert_allclose(found["linear"], [1.0, 0.9, 0.7])
    np.testing.assert_allclose(found["chance"], [0.1, 0.1])


def test_pruning_curves_average_over_seeds():
    scores = {"random": [[0.9, 0.5], [0.8, 0.3]], "effective": [0.9, 0.8]}
    found = lines(rendered(figures.pruning_curves([0.0, 0.5], scores)))
    np.testing.assert_allclose(found["random"], [0.85, 0.4])
    np.testing.assert_allclose(found["effective"], [0.9, 0.8])


def test_before_and_after():
    before, after = torch.rand(2, 3, generator=GENERATOR), torch.rand(2, 3, generator=GENERATOR)
    axes = rendered(figures.before_and_after(before, after, name="entropy"))
    points = axes.collections[0]
    np.testing.assert_allclose(points.get_offsets()[:, 1], after.flatten(), rtol=1e-6)
    assert points.get_array().tolist() == [0, 0, 0, 1, 1, 1]
    assert axes.get_xlabel() == "entropy before"


def test_figures_draw_on_axes_they_are_given():
    axes = figures.not_main_share(RESULT)
    assert figures.correlation_by_length([1], [0.5], axes=axes) is axes


def test_heads_that_a_layer_does_not_have_are_left_out():
    raw = torch.rand(L, 4, G, generator=GENERATOR)
    raw[1, 3] = torch.nan
    found = lines(rendered(figures.attention_by_token_type(raw, raw, ["a", "b"])))
    np.testing.assert_allclose(found["b, raw"][1], raw[1, :3, 1].mean(), rtol=1e-6)


def test_results_of_the_package_can_be_drawn():
    model = models.build("bert")
    attribution = HiddenTokenAttribution(2)
    with Lens(model, attribution), torch.no_grad():
        model(**models.inputs("bert"))
    result = attribution.compute()
    for draw in (
        figures.own_contribution,
        figures.not_main_share,
        figures.contribution_by_distance,
        figures.contribution_by_offset,
    ):
        rendered(draw(result))
    drift = attnlens.compare(model, model, models.inputs("bert"))
    axes = figures.before_and_after(drift.before.entropy, drift.after.entropy, name="entropy")
    points = np.asarray(rendered(axes).collections[0].get_offsets())
    np.testing.assert_array_equal(points[:, 0], drift.before.entropy.flatten())
    np.testing.assert_array_equal(points[:, 0], points[:, 1])
    order = torch.arange(8.0).reshape(2, 4)
    curve = attnlens.pruning.pruning_curve(
        heads.build("bert"), lambda model: 0.5, {"size": order}, 2
    )
    scores = {"size": [[point.value for point in line] for line in curve.curves("size")]}
    axes = rendered(figures.pruning_curves(curve.fractions, scores))
    np.testing.assert_allclose(lines(axes)["size"], [0.5] * 3)
