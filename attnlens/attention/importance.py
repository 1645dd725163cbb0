"""How much the loss of a training step depends on each head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnlens.attention.gates import gate_sums, unit_layers
from attnlens.capture import Capture
from attnlens.errors import InputError
from attnlens.observer import GradientObserver, SumObserver, Sums
from attnlens.results import LayeredResult
from attnlens.saving import storable

LossScale = float | Tensor | Callable[[], float | Tensor]

_QUANTITIES = ("importance", "magnitude", "positions", "examples", "skipped", "seen")


@storable()
@dataclass(frozen=True, repr=False)
class HeadImportanceResult(LayeredResult):
    """Averages over examples, per layer and head; all `[L, H]` float64 on the CPU.

    Heads that a layer does not have are NaN, and so is the importance of heads that no gradient
    reached.

    Attributes:
        layers: `(stack, layer)` of each row.
        without_gradient: the layers among them that ran but that no gradient reached: frozen
            with everything below them, or unused by the loss.
        examples: number of examples that counted.
        skipped: number of examples left out because a context or its gradient held NaN or Inf.
        seen: number of examples that ran forward, with or without a backward pass.
        importance: `E |⟨O_h, ∂L/∂O_h⟩|`, the absolute value taken per example.
        token_importance: `E |⟨o_i, ∂L/∂o_i⟩|`, the absolute value taken per position, and the
            mean over the real positions that the loss depends on.
    """

    layers: tuple[tuple[str, int], ...]
    without_gradient: tuple[tuple[str, int], ...]
    examples: Tensor
    skipped: Tensor
    seen: Tensor
    importance: Tensor
    token_importance: Tensor

    shown = ("importance",)
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "seen": "how many examples ran forward",
        "importance": "how much the loss depends on a head, E |⟨O_h, ∂L/∂O_h⟩| per example",
        "token_importance": "how much the loss depends on a head, E |⟨o_i, ∂L/∂o_i⟩| per token",
    }


class HeadImportance(GradientObserver, SumObserver):
    """`I_h = E |⟨O_h, ∂L/∂O_h⟩|`, from the backward pass that runs anyway.

    It is the absolute derivative of the loss with respect to a gate on the head, per example,
    averaged. The backward pass must run inside the lens. L is the loss that `backward()` was
    called on: a mean over B examples makes every value B times smaller than a sum, and a factor
    on it (automatic mixed precision, gradient accumulation) is divided out only if `loss_scale`
    says which. Padding counts nowhere. An example with NaN or Inf in a head's context or gradient
    is left out and counted. Until its backward pass ran, O of every layer looked at stays in
    memory, which matters only under gradient checkpointing.

    Args:
        layers: layer indices to look at; None looks at all.
        normalise: scale each layer's importance to unit l2 norm in the result.
        loss_scale: factor on the loss, or a function that returns it at every backward pass, such
            as `scaler.get_scale`; None means 1, or what a Trainer's callback knows.

    References:
        Michel et al., "Are Sixteen Heads Really Better than One?", NeurIPS 2019, section 4.1.

    Examples:
        >>> importance = HeadImportance()
        >>> with Lens(model, importance):
        ...     model(**batch).last_hidden_state.square().mean().backward()
        >>> bool((importance.compute().importance >= 0).all())
        True
    """

    def __init__(
        self,
        layers: Iterable[int] | None = None,
        *,
        normalise: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(layers)
        if loss_scale is not None and not callable(loss_scale) and not loss_scale > 0:
            raise InputError(f"loss_scale must be positive. Got {loss_scale!r}.")
        self.normalise = normalise
        self.loss_scale = loss_scale

    def update(self, capture: Capture) -> None:
        """Count the examples of one attention call.

        Args:
            capture: the call.
        """
        real = _by_example(capture.real_rows.any(-1), capture.windows)
        self._add(capture, seen=real.expand(-1, capture.shape[1]).sum(0).double())

    def update_gradient(self, capture: Capture, gradient: Tensor) -> None:
        """Add the examples of one backward pass.

        Args:
            capture: the call.
            gradient: `[B, H, Q, D]`, `∂L/∂O`.
        """
        active = capture.real_rows
        sums = gate_sums(capture.context, gradient, active, capture.windows)
        real = _by_example(active.any(-1), capture.windows).expand_as(sums.finite)
        counted = real & (sums.finite > 0)
        scale = self._scale()
        self._add(
            capture,
            importance=torch.where(counted, sums.derivative.abs(), 0.0).sum(0) / scale,
            magnitude=torch.where(counted, sums.magnitude, 0.0).sum(0) / scale,
            positions=torch.where(counted, sums.positions, 0.0).sum(0),
            examples=counted.sum(0).double(),
            skipped=(real & ~counted).sum(0).double(),
        )

    def compute(self) -> HeadImportanceResult:
        """Average over everything seen.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if nothing was seen.
        """
        layers, stacked = self.stacked(_averages)
        if self.normalise:
            for name in ("importance", "token_importance"):
                stacked[name] = unit_layers(stacked[name])
        answered = (stacked["examples"].nan_to_num() + stacked["skipped"].nan_to_num()).sum(-1)
        missing = tuple(key for key, count in zip(layers, answered, strict=True) if not count)
        return HeadImportanceResult(layers, missing, **stacked)

    def _nothing(self) -> str:
        return (
            "HeadImportance has seen no attention call. Run the model and its backward pass inside "
            "`with Lens(...)`."
        )

    def _add(self, capture: Capture, **sums: Tensor) -> None:
        """Add some quantities, the others being zero."""
        some = next(iter(sums.values()))
        zero = torch.zeros_like(some)
        self.add((capture.stack, capture.layer), dict.fromkeys(_QUANTITIES, zero) | sums)

    def _scale(self) -> float | Tensor:
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        return 1.0 if scale is None else scale


def _by_example(real: Tensor, windows: int) -> Tensor:
    """Whether any window of an example is real: `[B, G]` to `[B / windows, G]`."""
    windowed: Tensor = real.unflatten(0, (-1, windows))
    return windowed.any(1)


def _averages(sums: Sums) -> Sums:
    """Turn a layer's sums into the fields of the result, each `[H]`."""
    examples, positions = sums["examples"], sums["positions"]
    return {
        "examples": examples,
        "skipped": sums["skipped"],
        "seen": sums["seen"],
        "importance": torch.where(examples > 0, sums["importance"] / examples, torch.nan),
        "token_importance": torch.where(positions > 0, sums["magnitude"] / positions, torch.nan),
    }
