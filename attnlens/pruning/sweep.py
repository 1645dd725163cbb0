"""Mask more and more heads, lowest score first, and see how the model fares.

curve = pruning_curve(model, evaluate, scores=("effective_norm", "random"), batches=batches)
print(curve.table())
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.errors import InputError, NonFiniteError
from attnlens.files import read_json, write_json
from attnlens.pruning.curve import CurvePoint, PruningCurve
from attnlens.pruning.heads import LayerHeads, find_heads
from attnlens.pruning.mask import masking
from attnlens.pruning.plan import Plan, existing_heads, head_mask, resolve
from attnlens.pruning.scores import SCORES, Batch, Loss, Scorer, model_loss
from attnlens.tap.selection import Kinds
from attnlens.tap.trial import Trial, modes_restored

Score = Tensor | Callable[[nn.Module], Tensor] | None
Curve = tuple[str, int]
"""Name and seed of a score."""

_NOTHING = Plan({})


def pruning_curve(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    scores: Iterable[str] | Mapping[str, Score] = SCORES,
    steps: int | Sequence[float] = 10,
    iterative: bool = False,
    *,
    batches: Sequence[Batch] | None = None,
    loss: Loss = model_loss,
    per_layer: bool = False,
    seeds: Sequence[int] = (0, 1, 2),
    recover: Callable[[nn.Module], Any] | None = None,
    state: str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    kinds: Kinds = None,
) -> PruningCurve:
    """Mask more and more heads, lowest score first, and evaluate at each step.

    The model is as before when this returns. A set of heads that several curves share, such as
    none or all, is evaluated once, unless there is recovery. Masked heads give the outputs of
    pruned ones; `prune_heads(model, curve.plan(score, fraction))` then removes them.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        evaluate: returns a number for the model with the present heads masked, such as accuracy.
        scores: names as for `head_scores`; or names with an `[L, H]` tensor, with a function of
            the model that returns one, or with None for the known score of that name.
        steps: number of equal steps from none to all of the heads, or the fractions themselves in
            ascending order.
        iterative: score anew before each step, with the heads so far masked.
        batches: keyword inputs of the model to score heads on.
        loss: from the model's output and the batch to a scalar, for the score `gradient`.
        per_layer: take the same fraction of every layer, instead of the lowest of all.
        seeds: one curve each for the score `random`.
        recover: called with the model once a step's heads are masked, to train what is left;
            weights are put back after each curve.
        state: JSON file to write after every evaluation and to resume from. A curve that was
            interrupted while recovering begins again.
        inputs: small keyword inputs of the model, to find the heads; made up by default.
        kinds: kinds of attention, as for a lens.

    Returns:
        Every evaluation, with a table, areas under the curves, a plot and the plans.

    Raises:
        InputError: if an argument has the wrong shape or value, a score is NaN, or the state file
            is of another run.
        NonFiniteError: if `evaluate` returns NaN or infinity.

    References:
        Michel, Levy, Neubig, "Are Sixteen Heads Really Better than One?", NeurIPS 2019, section 4.

    Examples:
        >>> scores = {"size": torch.arange(72.0).view(6, 12)}
        >>> curve = pruning_curve(model, lambda pruned: 1.0, scores, 2)
        >>> [point.fraction for point in curve.points]
        [0.0, 0.5, 1.0]
    """
    fractions = _fractions(steps)
    trial = Trial(model, inputs)
    layers = find_heads(trial, kinds)
    given = dict(scores) if isinstance(scores, Mapping) else dict.fromkeys(scores)
    if not given:
        raise InputError("scores is empty, so there is no order for the heads to go in.")
    curves = [
        (name, seed)
        for name, score in given.items()
        for seed in (seeds if name == "random" and score is None else (0,))
    ]
    ranking = _Ranking(Scorer(trial, layers, batches, loss), model, layers, given, curves)
    progress = _Progress(
        state,
        {
            "curves": curves,
            "fractions": fractions,
            "iterative": iterative,
            "per_layer": per_layer,
            "recovers": recover is not None,
            "layers": [[*layer.key, layer.heads] for layer in layers],
        },
    )
    for curve in curves:
        name, seed = curve
        if recover is not None and len(progress.of(curve)) < len(fractions):
            progress.forget(curve)
        with _weights_restored(model, recover is not None):
            for fraction in fractions[len(progress.of(curve)) :]:
                plan = progress.last_plan(curve)
                scored = ranking.scores(curve, plan if iterative else _NOTHING)
                plan = _extended(plan, layers, scored, fraction, per_layer)
                value = None if recover is not None else progress.value_of(plan)
                if value is None:
                    with masking(model, layers, plan):
                        value = _step(model, evaluate, recover if plan else None)
                if not math.isfinite(value):
                    raise NonFiniteError(f"evaluate returned {value} at {fraction:.0%} of {name}.")
                progress.add(CurvePoint(name, seed, fraction, value, plan))
    return PruningCurve(tuple(progress.points), sum(layer.heads for layer in layers))


class _Progress:
    """What was evaluated so far, written to a file after each evaluation.

    Args:
        path: JSON file, or None to keep nothing.
        settings: what makes two runs the same, as plain values.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._settings = json.loads(json.dumps(settings))  # as a file has them
        self.points: list[CurvePoint] = []
        if self._path is not None and self._path.exists():
            self.points = self._read(self._path)

    def of(self, curve: Curve) -> list[CurvePoint]:
        """Return the evaluations of one curve, in the order of their fractions."""
        return [point for point in self.points if (point.score, point.seed) == curve]

    def last_plan(self, curve: Curve) -> Plan:
        """Return the heads that are masked at the end of one curve so far."""
        points = self.of(curve)
        return points[-1].plan if points else _NOTHING

    def value_of(self, plan: Plan) -> float | None:
        """Return what was evaluated with the same heads masked, on whatever curve."""
        return next((point.value for point in self.points if point.plan == plan), None)

    def forget(self, curve: Curve) -> None:
        """Drop the evaluations of one curve."""
        self.points = [point for point in self.points if (point.score, point.seed) != curve]

    def add(self, point: CurvePoint) -> None:
        """Keep an evaluation, in the file too."""
        self.points.append(point)
        if self._path is not None:
            points = [point.to_dict() for point in self.points]
            write_json(self._path, {"settings": self._settings, "points": points})

    def _read(self, path: Path) -> list[CurvePoint]:
        document = read_json(path, "the state of a pruning curve")
        try:
            points = [CurvePoint.from_dict(point) for point in document["points"]]
            settings = dict(document["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no state of a pruning curve: {error!r}.") from error
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise InputError(
                    f"{path} belongs to a run with {name}={settings.get(name)!r}; this one has "
                    f"{value!r}. Choose another state file."
                )
        return points


class _Ranking:
    """The scores by which the heads go, checked."""

    def __init__(
        self,
        scorer: Scorer,
        model: nn.Module,
        layers: Sequence[LayerHeads],
        given: Mapping[str, Score],
        curves: Sequence[Curve],
    ) -> None:
        self._scorer = scorer
        self._model = model
        self._layers = layers
        self._given = given
        named = [name for name, score in given.items() if score is None and name != "random"]
        first = scorer(named, _NOTHING, 0)  # one reading of the batches for all of them
        self._first = {
            (name, seed): self._checked(name, first[name])
            if name in first
            else self._score((name, seed), _NOTHING)
            for name, seed in curves
        }

    def scores(self, curve: Curve, plan: Plan) -> Tensor:
        """Score the heads, `[L, H]`, with those of a plan masked."""
        return self._score(curve, plan) if plan else self._first[curve]

    def _score(self, curve: Curve, plan: Plan) -> Tensor:
        name, seed = curve
        score = self._given[name]
        if score is None:
            score = self._scorer([name], plan, seed)[name]
        elif not isinstance(score, Tensor):
            with masking(self._model, self._layers, plan):
                score = score(self._model)
        return self._checked(name, score)

    def _checked(self, name: str, score: Tensor) -> Tensor:
        exists = existing_heads(self._layers)
        if not isinstance(score, Tensor) or score.shape != exists.shape:
            got = list(score.shape) if isinstance(score, Tensor) else repr(score)
            raise InputError(f"Score {name!r} must be [L, H] = {list(exists.shape)}. Got {got}.")
        score = score.detach().double().cpu()
        missing = (score.isnan() & exists).nonzero().tolist()
        if missing:
            row, head = missing[0]
            raise InputError(
                f"Score {name!r} is NaN at head {head} of {self._layers[row].label}, so it gives "
                f"no order."
            )
        return score


def _extended(
    plan: Plan, layers: Sequence[LayerHeads], scores: Tensor, fraction: float, per_layer: bool
) -> Plan:
    """Add the heads of lowest score to a plan until it holds a fraction of all."""
    exists, masked = existing_heads(layers), head_mask(plan, layers)
    ranked = scores.masked_fill(masked, -torch.inf)
    # Heads are compared within a layer, or all of them.
    pools = torch.eye(len(layers)).bool() if per_layer else torch.ones(1, len(layers)).bool()
    for rows in pools:
        pool = exists & rows[:, None]
        heads = pool.nonzero()
        lowest = ranked[pool].argsort(stable=True)[: round(fraction * len(heads))]
        masked[tuple(heads[lowest].T)] = True
    return resolve(masked, layers)


def _step(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    recover: Callable[[nn.Module], Any] | None,
) -> float:
    if recover is not None:
        with modes_restored(model):
            recover(model)
    return float(evaluate(model))


@contextmanager
def _weights_restored(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Put weights and buffers back after a block that trains."""
    if not wanted:
        yield
        return
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        yield
    finally:
        model.load_state_dict(before)


def _fractions(steps: int | Sequence[float]) -> list[float]:
    """The fractions of heads to mask, checked."""
    if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
        return [step / steps for step in range(steps + 1)]
    fractions = [] if isinstance(steps, int) else [float(fraction) for fraction in steps]
    inside = all(0 <= fraction <= 1 for fraction in fractions)
    if not fractions or not inside or fractions != sorted(set(fractions)):
        raise InputError(
            f"steps must be a positive number of steps, or ascending fractions in [0, 1]. "
            f"Got {steps!r}."
        )
    return fractions
