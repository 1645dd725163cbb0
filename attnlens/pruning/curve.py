"""How a model fares as its heads go, lowest score first.

curve = pruning_curve(model, evaluate, scores=("effective_norm", "random"), batches=batches)
print(curve.table())
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.capture import Kind
from attnlens.errors import InputError, NonFiniteError
from attnlens.pruning.curve_result import CurvePoint, PruningCurve
from attnlens.pruning.curve_state import CurveState
from attnlens.pruning.heads import LayerHeads, Probe, find_heads, modes_restored
from attnlens.pruning.mask import masking
from attnlens.pruning.plan import HeadPlan, existing_heads, head_mask, resolve
from attnlens.pruning.scores import SCORES, Batch, Loss, Scorer, model_loss

Score = Tensor | Callable[[nn.Module], Tensor] | None


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
    kinds: Iterable[Kind] | Kind | None = None,
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
    """
    fractions = _fractions(steps)
    probe = Probe(model, inputs)
    layers = find_heads(probe, kinds)
    given = dict(scores) if isinstance(scores, Mapping) else dict.fromkeys(scores)
    if not given:
        raise InputError("scores is empty, so there is no order for the heads to go in.")
    curves = [
        (name, seed)
        for name, score in given.items()
        for seed in (seeds if name == "random" and score is None else (0,))
    ]
    scorer = Scorer(probe, layers, batches, loss, kinds)
    order = _Order(model, layers, scorer, given, curves, per_layer, iterative, kinds)
    settings = {
        "curves": curves,
        "fractions": fractions,
        "iterative": iterative,
        "per_layer": per_layer,
        "recovers": recover is not None,
        "layers": [[*layer.key, layer.heads] for layer in layers],
    }
    kept = CurveState(state, settings)
    for name, seed in curves:
        if recover is not None and len(kept.of(name, seed)) < len(fractions):
            kept.forget(name, seed)
        with _weights_restored(model, recover is not None):
            for fraction in fractions[len(kept.of(name, seed)) :]:
                done = kept.of(name, seed)
                plan = order.next_plan(name, seed, done[-1].plan if done else _NOTHING, fraction)
                value = None if recover is not None else kept.value_of(plan)
                if value is None:
                    with masking(model, layers, plan, kinds=kinds):
                        value = _step(model, evaluate, recover if plan else None)
                if not math.isfinite(value):
                    raise NonFiniteError(f"evaluate returned {value} at {fraction:.0%} of {name}.")
                kept.add(CurvePoint(name, seed, fraction, value, plan))
    return PruningCurve(tuple(kept.points), sum(layer.heads for layer in layers))


_NOTHING = HeadPlan({})


class _Order:
    """Which heads go next, by each score."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[LayerHeads],
        scorer: Scorer,
        given: Mapping[str, Score],
        curves: Sequence[tuple[str, int]],
        per_layer: bool,
        iterative: bool,
        kinds: Iterable[Kind] | Kind | None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._scorer = scorer
        self._given = given
        self._per_layer = per_layer
        self._iterative = iterative
        self._kinds = kinds
        named = [name for name, score in given.items() if score is None and name != "random"]
        known = scorer(named, _NOTHING, 0)
        self._first = {
            (name, seed): self._checked(name, known[name])
            if name in known
            else self._score(name, seed, _NOTHING)
            for name, seed in curves
        }

    def next_plan(self, name: str, seed: int, plan: HeadPlan, fraction: float) -> HeadPlan:
        """Add the heads of lowest score to a plan until it holds a fraction of all."""
        scores = self._first[name, seed]
        if self._iterative and plan:
            scores = self._score(name, seed, plan)
        exists = existing_heads(self._layers)
        chosen = head_mask(plan, self._layers)
        ranked = scores.masked_fill(chosen, -torch.inf)
        for rows in self._pools():
            pool = exists & rows
            heads = pool.nonzero()
            lowest = ranked[pool].argsort(stable=True)[: round(fraction * len(heads))]
            chosen[tuple(heads[lowest].T)] = True
        return resolve(chosen, self._layers)

    def _pools(self) -> Iterator[Tensor]:
        """Masks of the rows among which heads are compared."""
        if not self._per_layer:
            yield torch.ones(len(self._layers), 1, dtype=torch.bool)
            return
        yield from torch.eye(len(self._layers), dtype=torch.bool)[:, :, None]

    def _score(self, name: str, seed: int, plan: HeadPlan) -> Tensor:
        score = self._given[name]
        if score is None:
            return self._checked(name, self._scorer([name], plan, seed)[name])
        if isinstance(score, Tensor):
            return self._checked(name, score)
        with masking(self._model, self._layers, plan, kinds=self._kinds):
            return self._checked(name, score(self._model))

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
