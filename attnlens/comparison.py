"""`compare`: how far the heads of two models are apart on the same inputs.

drift = compare(pretrained, fine_tuned, batch)
drift.effective_cosine        # [L, H]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnlens.algebra.factors import ValueBasis
from attnlens.algebra.problem import problem
from attnlens.attention.importance import HeadImportance
from attnlens.attention.recording import Recording
from attnlens.attention.statistics import HeadStatistics, HeadStatisticsResult
from attnlens.capture import Capture, Kind
from attnlens.errors import InputError
from attnlens.lens import Lens
from attnlens.results import LayeredResult
from attnlens.saving import storable

Batch = Mapping[str, Any]
Layers = tuple[tuple[str, int], ...]


@storable()
@dataclass(frozen=True, repr=False)
class HeadDrift(LayeredResult):
    """From one model to another, per layer and head; all `[L, H]` float64 on the CPU.

    Attributes:
        layers: `(stack, layer)` of each row, as the first model names them.
        examples: number of examples that counted; one with NaN or Inf in either model does not.
        raw_cosine: cosine of the two attention maps A, the mean over examples, in `[0, 1]`.
        effective_cosine: the same of A⊥, in `[-1, 1]`.
        effective_fraction_change: `‖A⊥‖² / ‖A‖²` of the second model minus that of the first.
        importance_change: the same of `E |⟨O_h, ∂L/∂O_h⟩|`; NaN without labels or gradients.
        before: statistics of the first model.
        after: statistics of the second.
    """

    layers: Layers
    examples: Tensor
    raw_cosine: Tensor
    effective_cosine: Tensor
    effective_fraction_change: Tensor
    importance_change: Tensor
    before: HeadStatisticsResult
    after: HeadStatisticsResult

    shown = ("effective_cosine", "raw_cosine")
    meanings: ClassVar = {
        "examples": LayeredResult.meanings["examples"],
        "raw_cosine": "likeness of raw attention in the two models, the cosine of A",
        "effective_cosine": "likeness of effective attention in the two models, the cosine of A⊥",
        "effective_fraction_change": "‖A⊥‖²/‖A‖² of the second model minus that of the first",
        "importance_change": "importance in the second model minus that in the first",
    }


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    inputs: Batch | Iterable[Batch],
    *,
    layers: Iterable[int | str] | None = None,
    kinds: Iterable[Kind] | Kind | None = None,
) -> HeadDrift:
    """Compare the heads of two models of one architecture on the same inputs.

    Where a batch has `labels`, both models' losses are differentiated, for the importance of
    heads; no parameter's `.grad` is touched.

    Args:
        model_a: where the drift begins, such as a pretrained model, in evaluation mode.
        model_b: where it has led to, such as the fine-tuned model, in evaluation mode.
        inputs: keyword arguments of both models, or several batches of them.
        layers: layers to look at, see :class:`~attnlens.Lens`.
        kinds: kinds of attention to look at, see :class:`~attnlens.Lens`.

    Returns:
        The drift.

    Raises:
        InputError: if a model is in training mode, or the models' attention calls do not match.

    Examples:
        >>> drift = compare(model, model, [batch])
        >>> float(drift.effective_cosine.min())
        1.0
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if model.training:
            raise InputError(
                f"{name} is in training mode, where dropout would count as drift. Call "
                f"{name}.eval() first."
            )
    layers = layers if layers is None or isinstance(layers, (int, str)) else list(layers)
    one, other = (_Side(model, layers, kinds) for model in (model_a, model_b))
    cosines = _Cosines()
    for batch in [inputs] if isinstance(inputs, Mapping) else inputs:
        first, second = one.run(batch), other.run(batch)
        _require_same_calls(first, second)
        for before, after in zip(first, second, strict=True):
            cosines.add(before, after)
    if cosines.empty:
        raise InputError("inputs held no batch, so there is nothing to compare.")
    return _drift(cosines, one, other)


class _Side:
    """One of the two models."""

    def __init__(self, model: nn.Module, layers: Any, kinds: Any) -> None:
        self.model = model
        self.statistics = HeadStatistics()
        self.importance = HeadImportance()
        self._options = {"layers": layers, "kinds": kinds}

    def run(self, batch: Batch) -> list[Capture]:
        """Run a batch and return its attention calls."""
        recording = Recording()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        differentiate = batch.get("labels") is not None and bool(trainable)
        observers = [self.statistics, recording, *([self.importance] if differentiate else [])]
        lens = Lens(self.model, *observers, **self._options)
        with lens, torch.set_grad_enabled(differentiate):
            loss = getattr(self.model(**batch), "loss", None)
            if differentiate and loss is not None:
                torch.autograd.grad(loss, trainable, allow_unused=True)
        return recording.compute()


class _Cosines:
    """Sums of cosines over examples, per layer and head."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], Tensor] = {}

    def add(self, before: Capture, after: Capture) -> None:
        """Add the examples of one attention call in both models."""
        active = before.real_rows.expand(*before.context.shape[:3])
        raw = _raw_cosine(before, after, active)
        effective = _effective_cosine(before, after, active)
        counted = active.any(-1) & torch.isfinite(raw) & torch.isfinite(effective)
        sums = torch.stack([torch.where(counted, part, 0.0).sum(0) for part in (raw, effective)])
        sums = torch.cat([counted.sum(0)[None].double(), sums]).cpu()
        key = before.stack, before.layer
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums

    @property
    def empty(self) -> bool:
        """Whether no example was added."""
        return not self._sums

    def means(self, layers: Layers) -> dict[str, Tensor]:
        """Return the number of examples and the mean cosines, `[L, H]` each."""
        rows = [self._sums[layer].mT for layer in layers]  # [H, 3]
        stacked = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        examples, raw, effective = stacked.unbind(-1)
        # No example: 0 / 0 is NaN.
        return {
            "examples": examples,
            "raw_cosine": raw / examples,
            "effective_cosine": effective / examples,
        }


def _drift(cosines: _Cosines, one: _Side, other: _Side) -> HeadDrift:
    before, after = one.statistics.compute(), other.statistics.compute()
    change = torch.full_like(before.effective_fraction, torch.nan)
    if one.importance.sums and other.importance.sums:
        change = other.importance.compute().importance - one.importance.compute().importance
    return HeadDrift(
        before.layers,
        **cosines.means(before.layers),
        effective_fraction_change=after.effective_fraction - before.effective_fraction,
        importance_change=change,
        before=before,
        after=after,
    )


def _require_same_calls(first: list[Capture], second: list[Capture]) -> None:
    """Refuse models whose attention calls do not correspond one to one."""
    for before, after in zip(first, second, strict=False):
        if before.shape[:4] != after.shape[:4]:
            raise InputError(
                f"{before.site} of model_a has attention of shape {list(before.shape[:4])}, "
                f"{after.site} of model_b {list(after.shape[:4])}. Compare models with the same "
                f"heads."
            )
    if len(first) != len(second):
        raise InputError(
            f"model_a made {len(first)} attention calls and model_b {len(second)} on the same "
            f"inputs. Compare models of one architecture."
        )


def _raw_cosine(before: Capture, after: Capture, active: Tensor) -> Tensor:
    """Cosine of A and A of two calls, `[B, H]`, in blocks of query rows."""
    sums = torch.zeros(3, *active.shape[:2], dtype=torch.float64, device=active.device)
    for rows, one in before.rows.chunks():
        sums += _products(one, after.attention(rows), active[:, :, rows])
    return _cosine(sums)


def _effective_cosine(before: Capture, after: Capture, active: Tensor) -> Tensor:
    """Cosine of A⊥ and A⊥ of two calls, `[B, H]`; without maps where bases are shared by rows."""
    one, other = problem(before).basis, problem(after).basis
    if not isinstance(one, ValueBasis) or not isinstance(other, ValueBasis):
        maps = before.effective_attention(), after.effective_attention()
        return _cosine(_products(*maps, active))
    # ⟨C Uᵀ, C' U'ᵀ⟩ = ⟨C UᵀU', C'⟩
    overlap = one.basis.double().mT @ other.basis.double()
    sums = torch.zeros(3, *active.shape[:2], dtype=torch.float64, device=active.device)
    for rows, attention in before.rows.chunks():
        shown = active[:, :, rows, None]
        left = torch.where(shown, one.coordinates(attention).double(), 0.0)
        right = torch.where(shown, other.coordinates(after.attention(rows)).double(), 0.0)
        inner = (left @ overlap * right).sum((-1, -2))
        sums += torch.stack([inner, left.square().sum((-1, -2)), right.square().sum((-1, -2))])
    return _cosine(sums)


def _products(one: Tensor, other: Tensor, active: Tensor) -> Tensor:
    """`⟨x, y⟩`, `‖x‖²` and `‖y‖²` over the active rows, `[3, B, H]`."""
    one, other = (torch.where(active[..., None], t.double(), 0.0) for t in (one, other))
    pairs = ((one, other), (one, one), (other, other))
    return torch.stack([(x * y).sum((-1, -2)) for x, y in pairs])


def _cosine(sums: Tensor) -> Tensor:
    return (sums[0] / (sums[1] * sums[2]).sqrt()).clamp(-1, 1)
