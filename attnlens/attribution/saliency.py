"""How much the loss depends on each token, from the user's own backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlens.capture import HiddenState
from attnlens.errors import InputError
from attnlens.observer import Labels, LayerObserver, SumObserver, Sums
from attnlens.results import LayeredResult, LayerKey, Result
from attnlens.saving import storable


@storable("entry")
@dataclass(frozen=True, eq=False, repr=False)
class PassSaliency(Result):
    """Saliency of the tokens of one forward pass, example by example.

    Attributes:
        layers: `(stack, layer)` of each state; layer -1 is what entered the first one.
        norm: `‖∂loss/∂e_i‖`, `[B, K]` for each state, at least 0; zero at padding.
        product: gradient × input, `⟨∂loss/∂e_i, e_i⟩`, `[B, K]` for each state.
    """

    layers: tuple[LayerKey, ...]
    norm: tuple[Tensor, ...]
    product: tuple[Tensor, ...]

    def to_pandas(self) -> Any:
        """Return a table with a row for each token at each layer, padding included; needs pandas.

        Returns:
            The `pandas.DataFrame`, indexed by stack, layer, example and token.
        """
        import pandas

        names = ["stack", "layer", "example", "token"]
        parts = []
        for layer, norm, product in zip(self.layers, self.norm, self.product, strict=True):
            index = pandas.MultiIndex.from_tuples(
                [(*layer, *place) for place in np.ndindex(*norm.shape)], names=names
            )
            columns = {"norm": norm.flatten().numpy(), "product": product.flatten().numpy()}
            parts.append(pandas.DataFrame(columns, index))
        return pandas.concat(parts)


@storable()
@dataclass(frozen=True, repr=False)
class TokenSaliencyResult(LayeredResult):
    """Averages over the real tokens of all backward passes, per layer.

    Tensors are float64 on the CPU, with one row per layer; NaN where there was no such token.

    Attributes:
        layers: `(stack, layer)` of each of the L rows; layer -1 is what entered the first one.
        labels: names of the G labels.
        tokens: number of tokens by label, `[L, G]`.
        norm: mean `‖∂loss/∂e_i‖` by label, `[L, G]`, at least 0.
        product: mean gradient × input by label, `[L, G]`.
        magnitude: mean absolute gradient × input by label, `[L, G]`, at least 0.
        position_norm: mean `‖∂loss/∂e_i‖` by position, `[L, P]`.
        position_product: mean gradient × input by position, `[L, P]`.
        position_magnitude: mean absolute gradient × input by position, `[L, P]`.
    """

    layers: tuple[LayerKey, ...]
    labels: tuple[str, ...]
    tokens: Tensor
    norm: Tensor
    product: Tensor
    magnitude: Tensor
    position_norm: Tensor
    position_product: Tensor
    position_magnitude: Tensor

    axes: ClassVar = {"layer": "layers", "label": "labels"}
    apart = frozenset({"position_norm", "position_product", "position_magnitude"})
    shown = ("norm",)
    meanings: ClassVar = {
        "tokens": "how many tokens counted",
        "norm": "how strongly the loss depends on a token, ‖∂loss/∂e_i‖",
        "product": "gradient × input of a token, ⟨∂loss/∂e_i, e_i⟩",
        "magnitude": "size of gradient × input of a token",
    }


@dataclass(eq=False)
class _Pass:
    """One forward pass: its labels, and what came of the latest backward pass through it."""

    labels: Tensor | None = None
    watched: set[LayerKey] = field(default_factory=set)
    norm: dict[LayerKey, Tensor] = field(default_factory=dict)
    product: dict[LayerKey, Tensor] = field(default_factory=dict)

    def saliency(self) -> PassSaliency:
        """The values in the order of the layers; gradients arrive from the last one."""
        keys = tuple(reversed(self.norm))
        values = ([kept[key].cpu() for key in keys] for kept in (self.norm, self.product))
        return PassSaliency(keys, *(tuple(tensors) for tensors in values))


class TokenSaliency(SumObserver, LayerObserver):
    """Gradient norm and gradient × input of every token at every layer.

    The gradients are those of the `backward()` that the user calls inside the lens, scaled as the
    loss is: a mean over B examples makes each of them B times smaller. Backward passes add up, so
    gradient accumulation and checkpointing change nothing. (Of several layers under one reentrant
    checkpoint only the last is seen: torch gives the others no place in the outer graph.)

    Args:
        layers: layer indices to look at; None looks at all, and at what enters the first one.
        labels: integer label of every token, `[B, K]`, of the forward passes to come; or what
            computes it from the model's arguments by name. Tokens whose label is not in
            0 … G − 1 are left out of averages by label. May be set between forward passes.
            None: all share label 0.
        label_names: names of the G labels.
        positions: P, the number of positions from the first that are kept apart.
    """

    needs_backward = True
    alike = ("label_names", "positions")

    def __init__(
        self,
        layers: Iterable[int] | None = None,
        *,
        labels: Labels = None,
        label_names: Sequence[str] = ("all",),
        positions: int = 128,
    ) -> None:
        super().__init__(layers)
        self.labels = labels
        self.label_names = tuple(label_names)
        self.positions = positions
        self._current = _Pass()
        self._last: list[_Pass] = []
        self._backward: int | None = None

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Find the labels of the tokens to come.

        Args:
            inputs: the model's arguments by name.
        """
        self._current = _Pass(self.labels(inputs) if callable(self.labels) else self.labels)

    def watch_hidden(self, state: HiddenState) -> Callable[[Tensor], None] | None:
        """Ask for the gradient of a hidden state.

        Args:
            state: the hidden state.

        Returns:
            What takes the gradient, or None if the layer is not looked at.
        """
        if self.layers is not None and state.layer not in self.layers:
            return None
        key = (state.stack, state.layer)
        if key in self._current.watched:  # a stack that runs twice, as in siamese models
            self._current = _Pass(self._current.labels)
        self._current.watched.add(key)
        of = self._current
        return lambda gradient: self._receive(of, state, gradient)

    @property
    def last(self) -> tuple[PassSaliency, ...]:
        """Saliency of the forward passes that the latest backward pass went through, in order."""
        return tuple(reversed([seen.saliency() for seen in self._last]))

    def compute(self) -> TokenSaliencyResult:
        """Average over everything seen.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if no gradient was seen.
        """
        keys, sums = self.stacked(lambda sums: sums)
        by_label = sums["by_label"] / sums["tokens"][:, None]  # [L, 3, G]
        by_position = sums["by_position"] / sums["positions"][:, None]  # [L, 3, P]
        return TokenSaliencyResult(
            keys,
            self.label_names,
            sums["tokens"],
            *by_label.unbind(1),
            *by_position.unbind(1),
        )

    def reset(self) -> None:
        """Forget everything seen."""
        super().reset()
        self._last = []

    def _nothing(self) -> str:
        return (
            "TokenSaliency has seen no gradient. Call backward() inside `with Lens(...)`, and "
            "check `layers`."
        )

    def _receive(self, of: _Pass, state: HiddenState, gradient: Tensor) -> None:
        """Take the gradient of one hidden state."""
        hidden, gradient = state.hidden.double(), gradient.double()
        norm = gradient.norm(dim=-1).masked_fill(~state.mask, 0.0)
        product = (gradient * hidden).sum(-1).masked_fill(~state.mask, 0.0)
        key = (state.stack, state.layer)
        self.add(key, self._sums(torch.stack([norm, product, product.abs()]), state.mask, of))
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._last = backward, []
        if of not in self._last:
            of.norm, of.product = {}, {}
            self._last.append(of)
        of.norm[key], of.product[key] = norm, product

    def _sums(self, quantities: Tensor, mask: Tensor, of: _Pass) -> Sums:
        """Sums by label and by position of quantities `[3, B, K]`."""
        labels = torch.zeros_like(mask, dtype=torch.long) if of.labels is None else of.labels
        if labels.shape != mask.shape:
            raise InputError(
                f"labels must have the shape of the tokens, {list(mask.shape)}. "
                f"Got {list(labels.shape)}."
            )
        groups = torch.arange(len(self.label_names), device=mask.device)
        members = ((labels.to(mask.device)[..., None] == groups) & mask[..., None]).double()
        kept = min(mask.shape[1], self.positions)
        room = (0, self.positions - kept)
        return {
            "by_label": torch.einsum("qbk,bkg->qg", quantities, members),
            "by_position": pad(quantities[..., :kept].sum(1), room),
            "tokens": members.sum((0, 1)),
            "positions": pad(mask[:, :kept].sum(0).double(), room),
        }
