"""Remove heads from a model for good: fewer weights, less work, the output of masking.

report = prune_heads(model, {0: [3, 7], 4: [1]})
print(report)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attnlens.errors import InputError, UnsupportedAttentionError
from attnlens.pruning.division import LayerDivision, find_divisions
from attnlens.pruning.heads import LayerHeads, find_heads
from attnlens.pruning.mask import masking
from attnlens.pruning.plan import Heads, Plan, require_same_in_shared_layers, resolve
from attnlens.pruning.surgery import Cut, note_in_config
from attnlens.results import Result
from attnlens.saving import storable
from attnlens.tap.selection import Kinds
from attnlens.tap.trial import Trial

# Largest difference of an output from masking, relative to the largest output, that is rounding.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


@storable("part")
@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Attributes:
        parameters: number of parameters of the whole model.
        flops: multiplications and additions per token in the linear layers of attention.
        seconds: median time of a forward pass.
    """

    parameters: int
    flops: int
    seconds: float


@storable()
@dataclass(frozen=True, repr=False)
class PruningReport(Result):
    """What pruning changed.

    Attributes:
        plan: the heads that were removed, as numbered before.
        heads: number of heads in all layers before.
        before: cost before.
        after: cost afterwards.
        difference: largest difference of an output from that of the masked model.
    """

    plan: Plan
    heads: int
    before: Cost
    after: Cost
    difference: float

    @property
    def speedup(self) -> float:
        """Time before over time after."""
        return self.before.seconds / self.after.seconds

    def __str__(self) -> str:
        before, after = self.before, self.after
        times = f"{before.seconds * 1e3:.2f} ms → {after.seconds * 1e3:.2f} ms"
        lines = (
            f"heads        {self.heads} → {self.heads - len(self.plan)}",
            f"parameters   {before.parameters:,} → {after.parameters:,}",
            f"operations   {before.flops:,} → {after.flops:,} per token in attention's weights",
            f"forward      {times} ({self.speedup:.2f} ×)",
            f"difference   {self.difference:.1e} from the masked model",
        )
        return "\n".join(lines)

    def to_pandas(self) -> Any:
        """Return a table of the costs before and after; needs pandas.

        Returns:
            The `pandas.DataFrame`, with rows `before` and `after`.
        """
        import pandas

        return pandas.DataFrame([vars(self.before), vars(self.after)], ["before", "after"])


def prune_heads(
    model: nn.Module,
    heads: Heads,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    inputs: Mapping[str, Any] | None = None,
    kinds: Kinds = None,
    timing: Mapping[str, Any] | None = None,
    repeats: int = 5,
) -> PruningReport:
    """Remove heads from a model in place: rows of q, k and v, columns of W_O, tables per head.

    Which weights belong to a head is read off derivatives, not names. Afterwards the outputs are
    compared with those of the masked model; if they differ, or anything fails, the model is left
    as it was. Heads are numbered as in the model at hand: after pruning, those that remain are
    numbered anew. The configuration records the removed heads by their first numbers.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        heads: `{layer: [head, …]}` or a boolean `[L, H]` tensor, as for `mask_heads`. All heads of
            a layer may go.
        optimizer: optimisers in use, to be sure that none holds a weight that is replaced.
            Pruned weights are new parameters: an optimiser made before would go on updating the
            old ones.
        inputs: small keyword inputs of the model, to find the heads and compare outputs; made up
            by default.
        kinds: kinds of attention, as for a lens; by default the encoder's self-attention.
        timing: keyword inputs of the forward pass whose time is reported; `inputs` by default.
        repeats: forward passes to take the median time of.

    Returns:
        Parameters, operations and time before and after.

    Raises:
        InputError: if a layer or head does not exist or is named twice, a group of heads that
            share a key is cut in part, layers that share weights are treated differently, or an
            optimiser holds a weight to be replaced. Nothing was changed then.
        UnsupportedAttentionError: if the heads cannot be removed. Nothing was changed then either.

    References:
        Michel, Levy, Neubig, "Are Sixteen Heads Really Better than One?", NeurIPS 2019, section 4.

    Examples:
        >>> smaller = copy.deepcopy(model)
        >>> report = prune_heads(smaller, {0: [3, 7]})
        >>> smaller.num_parameters() < model.num_parameters()
        True
    """
    trial = Trial(model, inputs)
    layers = find_heads(trial, kinds)
    plan = resolve(heads, layers)
    if not plan:
        raise InputError(f"heads names no head to prune. Got {heads!r}.")
    require_same_in_shared_layers(plan, layers)
    _require_whole_groups(plan, layers)
    divisions = find_divisions(trial, layers)
    affected = [division for division in divisions if plan.of(division.layer)]
    _require_free(affected, optimizer)
    with masking(model, layers, plan):
        masked = _outputs(trial)
    timed = trial if timing is None else Trial(model, timing)
    before = _cost(divisions, timed, repeats)
    with ExitStack() as undo:
        cut = Cut(model, undo)
        for division in affected:
            cut.remove(division, plan.of(division.layer))
        difference = _difference(masked, trial, plan)
        note_in_config(model, undo)
        after = _cost(divisions, timed, repeats)
        undo.pop_all()
    total = sum(layer.heads for layer in layers)
    return PruningReport(plan, total, before, after, difference)


def _require_whole_groups(plan: Plan, layers: Sequence[LayerHeads]) -> None:
    for layer in layers:
        pruned = set(plan.of(layer))
        for start in range(0, layer.heads, layer.group):
            group = set(range(start, start + layer.group))
            if pruned & group and not group <= pruned:
                raise InputError(
                    f"In {layer.label}, heads {sorted(group)} share one key and value head, so "
                    f"they can only go together. Got {sorted(pruned)}."
                )


def _require_free(
    divisions: Sequence[LayerDivision], optimizer: Optimizer | Iterable[Optimizer] | None
) -> None:
    """Refuse where an optimiser holds a weight that is about to be replaced."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    held = {
        id(parameter)
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
    }
    for division in divisions:
        if any(id(weight.tensor) in held for weight in division.weights):
            raise InputError(
                f"optimizer holds the weights of {division.layer.label}, which pruning replaces: "
                f"it would go on updating the old ones. Prune first, then make the optimizer."
            )


def _outputs(trial: Trial) -> list[Tensor]:
    with torch.no_grad():
        return trial()


def _difference(masked: Sequence[Tensor], trial: Trial, plan: Plan) -> float:
    """The largest difference of a pruned model from the masked one, if it is rounding."""
    name = type(trial.model).__name__
    try:
        pruned = _outputs(trial)
    except Exception as error:
        raise UnsupportedAttentionError(
            f"{name} does not run without heads {plan}: {error}. It is as it was before. Keep at "
            f"least one head in each layer; if that was the case, use mask_heads."
        ) from error
    worst = 0.0
    for left, right in zip(masked, pruned, strict=True):
        if left.shape != right.shape or not left.is_floating_point():
            continue
        difference = float((left.double() - right.double()).abs().nan_to_num().amax())
        worst = max(worst, difference)
        if difference > TOLERANCE[left.dtype] * float(left.double().abs().nan_to_num().amax()):
            raise UnsupportedAttentionError(
                f"Without heads {plan}, an output of {name} is {difference:.1e} off that of "
                f"masking: its heads cannot be cut apart. It is as it was before. Use mask_heads."
            )
    return worst


def _cost(divisions: Sequence[LayerDivision], trial: Trial, repeats: int) -> Cost:
    matrices = (w.tensor for division in divisions for w in division.weights if w.is_matrix)
    return Cost(
        parameters=sum(parameter.numel() for parameter in trial.model.parameters()),
        flops=sum(2 * matrix.numel() for matrix in matrices),
        seconds=_seconds(trial, repeats),
    )


def _seconds(trial: Trial, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        _outputs(trial)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
