"""Scores of heads: how much each matters, by several measures.

Every score is `[L, H]`, larger where a head matters more, NaN where a layer has no such head. Rows
are those of `HeadStatistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.attention.statistics import HeadStatistics
from attnlens.errors import InputError
from attnlens.lens import Lens
from attnlens.pruning.division import LayerDivision, find_divisions
from attnlens.pruning.heads import LayerHeads, find_heads
from attnlens.pruning.mask import masking
from attnlens.pruning.plan import Plan, existing_heads
from attnlens.tap.selection import Kinds
from attnlens.tap.trial import Trial, evaluating

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], Tensor]

# Scores that are fields of HeadStatistics.
STATISTICS = ("effective_norm", "effective_fraction", "output_norm", "attention_norm")
SCORES = (*STATISTICS, "gradient", "magnitude", "random")


def model_loss(output: Any, batch: Batch) -> Tensor:
    """Take the loss a model computed from the labels in its batch.

    Args:
        output: what the model returned.
        batch: its keyword inputs.

    Returns:
        The loss, a scalar.

    Raises:
        InputError: if there is none.
    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            f"The model returned no loss for a batch of {sorted(batch)}. Put labels into the "
            f"batches, or pass loss=."
        )
    return loss


def head_scores(
    model: nn.Module,
    scores: Iterable[str],
    batches: Sequence[Batch] | None = None,
    *,
    loss: Loss = model_loss,
    seed: int = 0,
    inputs: Mapping[str, Any] | None = None,
    kinds: Kinds = None,
) -> dict[str, Tensor]:
    """Score the heads of a model.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        scores: names: `effective_norm` `‖A⊥‖_F`, `effective_fraction` `‖A⊥‖²/‖A‖²`, `output_norm`
            `‖A T‖_F`, `attention_norm` `‖A‖_F`, each a mean over examples; `gradient`, the mean
            over examples of `|∂L/∂ξ|` for a gate ξ on the head; `magnitude`, the Frobenius norm of
            the head's weights in q, k, v and W_O; `random`.
        batches: keyword inputs of the model; needed by all but `magnitude` and `random`.
        loss: from the model's output and the batch to a scalar, for `gradient`.
        seed: for `random`.
        inputs: small keyword inputs of the model, to find the heads; made up by default.
        kinds: kinds of attention, as for a lens.

    Returns:
        By name, `[L, H]` float64, NaN where a layer has no such head.

    Raises:
        InputError: if a name is unknown, or batches are needed and missing.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3; Michel, Levy,
        Neubig, "Are Sixteen Heads Really Better than One?", NeurIPS 2019, equation 2.

    Examples:
        >>> scores = head_scores(model, ("output_norm", "random"), [batch])
        >>> {name: tuple(score.shape) for name, score in scores.items()}
        {'output_norm': (6, 12), 'random': (6, 12)}
    """
    trial = Trial(model, inputs)
    return Scorer(trial, find_heads(trial, kinds), batches, loss)(scores, Plan({}), seed)


class Scorer:
    """Score heads that were found before, possibly with some of them masked.

    Args:
        trial: runs the model.
        layers: the heads of the model.
        batches: keyword inputs of the model, or None.
        loss: from the model's output and the batch to a scalar.
    """

    def __init__(
        self,
        trial: Trial,
        layers: Sequence[LayerHeads],
        batches: Sequence[Batch] | None,
        loss: Loss = model_loss,
    ) -> None:
        self._trial = trial
        self._layers = layers
        self._exists = existing_heads(layers)
        self._batches = batches
        self._loss = loss

    def __call__(self, scores: Iterable[str], plan: Plan, seed: int) -> dict[str, Tensor]:
        """Score the heads.

        Args:
            scores: names.
            plan: heads that are masked meanwhile.
            seed: for `random`.

        Returns:
            By name, `[L, H]` float64.

        Raises:
            InputError: if a name is unknown, or batches are needed and missing.
        """
        names = list(scores)
        unknown = [name for name in names if name not in SCORES]
        if unknown:
            raise InputError(f"No score {unknown[0]!r}. There are: {', '.join(SCORES)}.")
        if self._batches is None and set(names) & {*STATISTICS, "gradient"}:
            raise InputError(f"The scores {names} look at examples. Pass batches=.")
        scored: dict[str, Tensor] = {}
        with evaluating(self._trial.model):
            if set(names) & set(STATISTICS):
                scored |= self._statistics(plan)
            if "gradient" in names:
                scored["gradient"] = self._gradient(plan)
        if "magnitude" in names:
            scored["magnitude"] = self._magnitude()
        if "random" in names:
            generator = torch.Generator().manual_seed(seed)
            shape = self._exists.shape
            scored["random"] = torch.rand(shape, generator=generator, dtype=torch.float64)
        return {n: scored[n].double().masked_fill(~self._exists, torch.nan) for n in names}

    def _statistics(self, plan: Plan) -> dict[str, Tensor]:
        statistics = HeadStatistics()
        model = self._trial.model
        kinds = {layer.kind for layer in self._layers}
        with (
            masking(model, self._layers, plan),
            Lens(model, statistics, kinds=kinds),
            torch.no_grad(),
        ):
            for batch in self._batches or ():
                model(**batch)
        result = statistics.compute()
        rows = [result.layers.index(layer.key) for layer in self._layers]
        return {name: result.tensors()[name][rows] for name in STATISTICS}

    def _gradient(self, plan: Plan) -> Tensor:
        """The mean over examples of `|∂L/∂ξ|`."""
        model = self._trial.model
        device = next(model.parameters()).device
        gates = torch.ones(self._exists.shape, device=device, requires_grad=True)
        total, examples = torch.zeros_like(gates, dtype=torch.float64, requires_grad=False), 0
        with masking(model, self._layers, plan, gates=gates), torch.enable_grad():
            for example in _examples(self._batches or ()):
                loss = self._loss(model(**example), example)
                total += torch.autograd.grad(loss, gates)[0].abs()
                examples += 1
        return (total / examples).cpu()

    def _magnitude(self) -> Tensor:
        by_projection = {
            division.layer.projection: _weight_norms(division)
            for division in find_divisions(self._trial, self._layers)
        }
        scores = torch.zeros(self._exists.shape, dtype=torch.float64)
        for row, layer in zip(scores, self._layers, strict=True):
            if layer.projection is not None:
                row[: layer.heads] = by_projection[layer.projection]
        return scores


def _weight_norms(division: LayerDivision) -> Tensor:
    """The Frobenius norm of each head's weights: `[H]`."""
    squares = torch.zeros(division.layer.heads, dtype=torch.float64)
    for weight in division.weights:
        if weight.is_matrix:
            others = [dim for dim in range(weight.tensor.dim()) if dim != weight.dim]
            each = weight.tensor.detach().double().square().sum(others).cpu()
            squares += weight.owners.double() @ each
    return squares.sqrt()


def _examples(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Every example as a batch of one."""
    for batch in batches:
        size = max(len(value) for value in batch.values() if isinstance(value, Tensor))
        for index in range(size):
            yield {
                name: value[index : index + 1]
                if isinstance(value, Tensor) and len(value) == size
                else value
                for name, value in batch.items()
            }
