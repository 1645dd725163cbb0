"""How much the loss depends on each token, from the user's own backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from attnlens.attribution.token_gradients import (
    TokenGradients,
    saliency_means,
    saliency_sums,
    token_saliency,
)
from attnlens.capture import HiddenState
from attnlens.observer import Labels, LayerObserver, SumObserver, label_members
from attnlens.results import LayeredResult, LayerKey, Result
from attnlens.saving import storable


@storable("entry")
@dataclass(frozen=True, eq=False, repr=False)
class PassSaliency(Result):
    """Saliency of the tokens of one forward pass, example by example.

    Tokens with NaN or Inf in their hidden state or its gradient hold NaN or Inf.

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
        skipped: number of examples left out because a hidden state or its gradient held NaN or
            Inf, `[L]`.
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
    skipped: Tensor
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
    gradients: dict[LayerKey, TokenGradients] = field(default_factory=dict)

    def saliency(self) -> PassSaliency:
        """The values in the order of the layers; gradients arrive from the last one."""
        keys = tuple(reversed(self.gradients))
        norm, product = zip(*(self.gradients[key] for key in keys), strict=True)
        return PassSaliency(keys, tuple(t.cpu() for t in norm), tuple(t.cpu() for t in product))


class TokenSaliency(LayerObserver, SumObserver):
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

    Examples:
        >>> saliency = TokenSaliency()
        >>> with Lens(model, saliency):
        ...     model(**batch).last_hidden_state.square().mean().backward()
        >>> len(saliency.compute().layers)  # what enters the first layer, and what leaves each
        7
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

        Raises:
            InputError: if labels are not as many as there are tokens.
        """
        if self.layers is not None and state.layer not in self.layers:
            return None
        key = (state.stack, state.layer)
        if key in self._current.watched:  # a stack that runs twice, as in siamese models
            self._current = _Pass(self._current.labels)
        self._current.watched.add(key)
        members = label_members(self._current.labels, state.mask, len(self.label_names))
        return partial(self._receive, self._current, state, members)

    @property
    def last(self) -> tuple[PassSaliency, ...]:
        """Saliency of the forward passes that the latest backward pass went through, in order."""
        return tuple(forward.saliency() for forward in reversed(self._last))

    def compute(self) -> TokenSaliencyResult:
        """Average over everything seen; the result is on the CPU."""
        layers, means = self.stacked(saliency_means)
        return TokenSaliencyResult(layers, self.label_names, **means)

    def reset(self) -> None:
        """Forget everything seen."""
        super().reset()
        self._last = []

    def _nothing(self) -> str:
        return (
            "TokenSaliency has seen no gradient. Call backward() inside `with Lens(...)`, and "
            "check `layers`."
        )

    def _receive(
        self, forward: _Pass, state: HiddenState, members: Tensor, gradient: Tensor
    ) -> None:
        """Take the gradient of one hidden state."""
        gradients = token_saliency(state.hidden, gradient, state.mask)
        key = (state.stack, state.layer)
        self.add(key, saliency_sums(gradients, state.mask, members, self.positions))
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._last = backward, []
        if forward not in self._last:
            forward.gradients = {}
            self._last.append(forward)
        forward.gradients[key] = gradients
