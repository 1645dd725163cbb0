"""Scores of heads against slow twins, and curves against a model whose worth is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from attnlens import HeadStatistics, Lens, prune_heads
from attnlens.errors import InputError, NonFiniteError
from attnlens.pruning import pruning_curve
from attnlens.pruning.curve import PruningCurve
from attnlens.pruning.scores import SCORES, STATISTICS, head_scores
from tests.support import heads, models
from tests.support.hooks import is_clean
from tests.support.models import HEADS, LAYERS, WIDTH

# What each head is worth, by decree.
WORTH = torch.tensor([[5.0, 1.0, 7.0, 3.0], [2.0, 8.0, 4.0, 6.0]])


class Meter:
    """Evaluate a BERT by which heads reach its output projections, and count the evaluations."""

    def __init__(self) -> None:
        self.calls = 0
        self.worth = WORTH

    def __call__(self, model: Any) -> float:
        self.calls += 1
        total = 0.0
        handles = []
        for index, layer in enumerate(model.encoder.layer):

            def look(module: nn.Module, args: tuple[Tensor], index: int = index) -> None:
                nonlocal total
                context = args[0].unflatten(-1, (HEADS, WIDTH))
                alive = (context != 0).flatten(0, 1).any(0).any(-1)
                total += float(self.worth[index][alive].sum())

            handles.append(layer.attention.output.dense.register_forward_pre_hook(look))
        with torch.no_grad():
            model(**heads.inputs("bert"))
        for handle in handles:
            handle.remove()
        return total


def lowest_first(per_layer: bool) -> list[float]:
    """The twin: the worth that is left when the least worthy heads are gone, by loops."""
    rows = WORTH.tolist()
    pools = [[v] for v in rows] if per_layer else [rows]
    left = []
    for step in range(5):
        total = 0.0
        for pool in pools:
            values = sorted(value for row in pool for value in row)
            total += sum(values[round(step / 4 * len(values)) :])
        left.append(total)
    return left


@pytest.mark.parametrize("per_layer", [False, True])
def test_heads_go_by_their_score(per_layer: bool) -> None:
    model = heads.build("bert")
    curve = pruning_curve(model, Meter(), {"worth": WORTH}, 4, per_layer=per_layer)
    values = [point.value for point in curve.points]
    assert values == lowest_first(per_layer)
    assert curve.fractions == [0.0, 0.25, 0.5, 0.75, 1.0]
    expected = np.trapezoid(values, curve.fractions)
    assert curve.areas("worth") == pytest.approx([expected], rel=1e-12)
    counts = [sum(map(len, [*p.plan.heads.values()])) for p in curve.points]
    assert counts == [0, 2, 4, 6, 8]
    if per_layer:
        assert {len(v) for v in curve.plan("worth", 0.5).heads.values()} == {2}
    assert is_clean(model)


def test_random_orders_differ_by_seed_and_repeat() -> None:
    model = heads.build("bert")
    first = pruning_curve(model, Meter(), ["random"], 4, seeds=(0, 1, 2))
    again = pruning_curve(model, Meter(), ["random"], 4, seeds=(0, 1, 2))
    assert first == again
    assert len({tuple(p.plan.heads.items()) for p in first.points if p.fraction == 0.5}) == 3
    assert len(first.areas("random")) == 3


def test_iterative_scores_see_what_is_masked() -> None:
    model = heads.build("bert")
    meter = Meter()
    seen: list[float] = []

    def score(model: nn.Module) -> Tensor:
        left = meter(model)
        seen.append(left)
        return WORTH if left == WORTH.sum() else -WORTH  # then the other way round

    curve = pruning_curve(model, Meter(), {"turning": score}, 4, True)
    values = [point.value for point in curve.points]
    assert values == [36.0, 33.0, 18.0, 7.0, 0.0]  # 1 2, then 8 7, 6 5, 4 3
    assert seen == [36.0, 33.0, 18.0, 7.0]
    assert pruning_curve(model, Meter(), {"turning": score}, 4).points[-2].value == 15.0


def test_iterative_scoring_by_name() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    curve = pruning_curve(
        model, Meter(), ["output_norm"], [0.0, 0.25, 0.5], iterative=True, batches=[given]
    )
    plan = curve.points[1].plan
    with attn_masked(model, plan):
        scores = head_scores(model, ["output_norm"], [given])["output_norm"]
    for (_, layer), gone in plan.heads.items():
        scores[layer, list(gone)] = -torch.inf
    lowest = {divmod(int(i), HEADS) for i in scores.flatten().argsort()[:4]}
    found = {(k[1], h) for k, hs in curve.points[2].plan.heads.items() for h in hs}
    assert found == lowest


def attn_masked(model: nn.Module, plan: Any) -> Any:
    from attnlens import mask_heads

    return mask_heads(model, plan)


def test_a_set_of_heads_is_evaluated_once() -> None:
    meter = Meter()
    curve = pruning_curve(heads.build("bert"), meter, {"a": WORTH, "b": WORTH, "c": -WORTH}, 4)
    assert len(curve.points) == 15
    assert meter.calls == 8


def test_an_interrupted_curve_is_resumed(tmp_path: Path) -> None:
    model, state = heads.build("bert"), tmp_path / "state.json"
    expected = pruning_curve(model, Meter(), {"up": WORTH, "down": -WORTH}, 4)

    class Interrupted(Meter):
        def __call__(self, model: Any) -> float:
            if self.calls == 6:
                raise KeyboardInterrupt
            return super().__call__(model)

    with pytest.raises(KeyboardInterrupt):
        pruning_curve(model, Interrupted(), {"up": WORTH, "down": -WORTH}, 4, state=state)
    assert is_clean(model)
    rest = Meter()
    resumed = pruning_curve(model, rest, {"up": WORTH, "down": -WORTH}, 4, state=state)
    assert resumed == expected and rest.calls == 2
    assert pruning_curve(model, rest, {"up": WORTH, "down": -WORTH}, 4, state=state) == expected
    assert rest.calls == 2
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    with pytest.raises(InputError, match="fractions"):
        pruning_curve(model, rest, {"up": WORTH, "down": -WORTH}, 5, state=state)
    state.write_text("{}")
    with pytest.raises(InputError, match="no state"):
        pruning_curve(model, rest, {"up": WORTH, "down": -WORTH}, 4, state=state)


def test_recovery_trains_what_is_left_and_is_undone() -> None:
    model, meter = heads.build("bert"), Meter()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    left: list[float] = []

    def recover(model: nn.Module) -> None:
        left.append(meter(model))
        model.train()
        for parameter in model.parameters():
            parameter.data.mul_(1.01)

    def evaluate(model: nn.Module) -> float:
        assert not model.training
        return float(model.get_parameter("embeddings.word_embeddings.weight").abs().sum())

    curve = pruning_curve(model, evaluate, {"a": WORTH, "b": WORTH}, 2, recover=recover)
    assert left == [26.0, 0.0, 26.0, 0.0]
    values = [point.value for point in curve.points]
    assert values[0] < values[1] < values[2] and values[:3] == values[3:]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_merged_runs_give_a_spread_and_a_table() -> None:
    model = heads.build("bert")
    first = pruning_curve(model, Meter(), {"worth": WORTH}, 2)
    other = Meter()
    other.worth = 2 * WORTH
    merged = first.merge(pruning_curve(model, other, {"worth": WORTH}, 2)).merge(first)
    areas = merged.areas("worth")
    assert areas == [*first.areas("worth"), 2 * first.areas("worth")[0], *first.areas("worth")]
    header, row = merged.table().splitlines()
    assert header.split() == ["score", "0%", "50%", "100%", "area"]
    spread = np.std([36.0, 72.0, 36.0], ddof=1)
    assert row.split()[:4] == ["worth", "48.000", "±", f"{spread:.3f}"]
    assert "±" not in first.table()
    with pytest.raises(InputError, match="merged"):
        merged.merge(pruning_curve(model, Meter(), {"worth": WORTH}, 4))
    assert {point.run for point in merged.points} == {0, 1, 2}


def test_plots_show_one_line_per_score() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    curve = pruning_curve(heads.build("bert"), Meter(), {"up_wards": WORTH, "down": -WORTH}, 4)
    axes = curve.plot()
    assert [line.get_label() for line in axes.get_lines()] == ["up wards", "down"]
    drawn = axes.get_lines()[0].get_ydata()
    assert list(drawn) == [point.value for point in curve.curves("up_wards")[0]]
    assert curve.plot(axes) is axes
    matplotlib.pyplot.close("all")


def test_the_plan_of_a_curve_can_be_pruned() -> None:
    model = heads.build("bert")
    curve = pruning_curve(model, Meter(), {"worth": WORTH}, 4)
    report = prune_heads(model, curve.plan("worth", 0.5))
    assert len(report.plan) == 4 and report.difference == 0.0
    with pytest.raises(InputError, match="fraction"):
        curve.plan("worth", 0.3)
    with pytest.raises(InputError, match="No score"):
        curve.plan("wealth", 0.5)


def test_layers_of_different_width_have_no_heads_to_lose_where_there_are_none() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    prune_heads(model, {0: [1, 3]})
    curve = pruning_curve(
        model, lambda model: 1.0, SCORES, 6, batches=[given], loss=squares, seeds=(4,)
    )
    assert curve.heads == 6 and len(curve.scores) == len(SCORES)
    assert all(len(p.plan) == round(6 * p.fraction) for p in curve.points)


def squares(output: Any, batch: Any) -> Tensor:
    total: Tensor = output.last_hidden_state[:, 0].square().sum()
    return total


def test_statistics_are_those_of_the_observer() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    statistics = HeadStatistics()
    with Lens(model, statistics), torch.no_grad():
        model(**given)
    expected = statistics.compute().tensors()
    scores = head_scores(model, STATISTICS, [given])
    assert list(scores) == list(STATISTICS)
    for name, score in scores.items():
        assert torch.equal(score, expected[name])


def test_gradient_importance_matches_differences_example_by_example() -> None:
    from attnlens import mask_heads

    model, given = heads.build("bert").double(), heads.inputs("bert")
    found = head_scores(model, ["gradient"], [given], loss=squares)["gradient"]
    step, expected = 1e-5, torch.zeros(LAYERS, HEADS, dtype=torch.double)
    for example in range(2):
        one = {name: tensor[example : example + 1] for name, tensor in given.items()}
        for layer in range(LAYERS):
            for head in range(HEADS):
                losses = []
                for sign in (1, -1):
                    gates = torch.ones(LAYERS, HEADS, dtype=torch.double)
                    gates[layer, head] += sign * step
                    with mask_heads(model, gates=gates), torch.no_grad():
                        losses.append(float(squares(model(**one), one)))
                expected[layer, head] += abs(losses[0] - losses[1]) / (2 * step) / 2
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_gradient_importance_uses_the_models_own_loss() -> None:
    config = hf.BertConfig(**models.TEXT, num_labels=3)
    model = models.initialise(hf.BertForSequenceClassification, config)
    batch = {**heads.inputs("bert"), "labels": torch.tensor([0, 2])}
    scores = head_scores(model, ["gradient"], [batch])["gradient"]
    assert scores.shape == (LAYERS, HEADS) and bool((scores > 0).all())
    del batch["labels"]
    with pytest.raises(InputError, match="no loss"):
        head_scores(model, ["gradient"], [batch])


def test_magnitudes_are_the_norms_of_the_heads_weights() -> None:
    model = heads.build("bert")
    scores = head_scores(model, ["magnitude"])["magnitude"]
    for index, layer in enumerate(model.encoder.layer):
        attention = layer.attention
        for head in range(HEADS):
            part = slice(head * WIDTH, (head + 1) * WIDTH)
            matrices = [m.weight[part] for m in (attention.self.query, attention.self.key)]
            matrices += [attention.self.value.weight[part], attention.output.dense.weight[:, part]]
            square = sum(float(v) ** 2 for m in matrices for v in m.flatten().tolist())
            assert float(scores[index, head]) == pytest.approx(square**0.5, rel=1e-6)


def test_models_are_left_as_they_were() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    model.train()
    before = torch.random.get_rng_state()
    head_scores(model, SCORES, [given], loss=squares)
    assert model.training and is_clean(model)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_wrong_arguments_are_refused() -> None:
    model, meter = heads.build("bert"), Meter()
    holes = WORTH.clone()
    holes[1, 2] = torch.nan
    wrong: list[tuple[Any, Any, str]] = [
        ({"holes": holes}, 4, "NaN at head 2 of layer 1"),
        ({"short": WORTH[:1]}, 4, r"\[L, H\] = \[2, 4\]"),
        ({"called": lambda model: 3}, 4, "Got 3"),
        (["wealth"], 4, "No score 'wealth'"),
        (["gradient"], 4, "batches"),
        ([], 4, "empty"),
        ({"worth": WORTH}, 0, "steps"),
        ({"worth": WORTH}, True, "steps"),
        ({"worth": WORTH}, [0.5, 0.2], "ascending"),
        ({"worth": WORTH}, [0.5, 1.2], r"\[0, 1\]"),
    ]
    for scores, steps, message in wrong:
        with pytest.raises(InputError, match=message):
            pruning_curve(model, meter, scores, steps)
    assert meter.calls == 0
    with pytest.raises(NonFiniteError, match="evaluate returned nan"):
        pruning_curve(model, lambda model: float("nan"), {"worth": WORTH})
    assert is_clean(model)


def test_results_are_plain_values() -> None:
    curve = pruning_curve(heads.build("bert"), Meter(), {"worth": WORTH}, 2)
    document = curve.to_dict()
    assert document["heads"] == 8 and document["points"][1]["plan"]["heads"][0]["layer"] == 0
    assert isinstance(curve, PruningCurve)
