"""`effective_for`: how much of the attention moves a model's answer.

found = effective_for(classifier, batch, outputs="logits")
found.answer, found.head, found.layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attnlens.algebra.null_space import null_space
from attnlens.algebra.problem import problem
from attnlens.algebra.values import working_dtype
from attnlens.attention.answer_level import AnswerLevel, answer_level, answer_maps
from attnlens.capture import Capture, Kind
from attnlens.errors import CaptureError, InputError, MemoryBoundError
from attnlens.lens import Lens
from attnlens.observer import GradientObserver
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable

Answer = Literal["logits", "embedding", "loss"] | Callable[[Any], Tensor]
"""What of a model's output counts: a name, or a function of it that returns `[B, C]`."""

_Call = tuple[str, int, int]  # stack, layer, call


@storable()
@dataclass(frozen=True, repr=False)
class EffectiveFor(LayeredResult):
    """How much of the attention each of three readers can see; means over examples, float64.

    `answer ≤ head ≤ 1` for every head, and `layer ≤ heads ≤ 1` for every layer.

    Attributes:
        layers: `(stack, layer)` of each row.
        answer: `‖A_out‖² / ‖A‖²`, `[L, H]`: what moves the answer to first order.
        answer_norm: `‖A_out‖`, `[L, H]`.
        head: `‖A⊥‖² / ‖A‖²`, `[L, H]`: what the head's own output sees.
        layer: the same of all heads together, as the sum of the heads sees them, `[L]`; NaN where
            the output projection is not known.
        heads: the same as the outputs of single heads see them, `Σ_h ‖A⊥_h‖² / Σ_h ‖A_h‖²`, `[L]`.
        importance: norm over outputs of the derivatives of a gate on the head, `[L, H]`; of one
            output it is the importance of Michel et al. 2019 on these examples.
        directions: number of directions of attention that the answer depends on, `[L, H]`.
        maps: `A_out` of every layer, `[B, H, Q, K]`, if they were asked for.
    """

    layers: tuple[LayerKey, ...]
    answer: Tensor
    answer_norm: Tensor
    head: Tensor
    layer: Tensor
    heads: Tensor
    importance: Tensor
    directions: Tensor
    maps: tuple[Tensor, ...] = ()

    apart: ClassVar = frozenset({"maps"})
    shown = ("answer", "head")
    meanings: ClassVar = {
        "answer": "the share of a head's attention that moves the answer, to first order",
        "answer_norm": "size of the attention that moves the answer, ‖A_out‖",
        "head": "the share of a head's attention that its own output can see",
        "layer": "the share of a layer's attention that the sum of its heads can see",
        "heads": "the share of a layer's attention that the outputs of single heads can see",
        "importance": "how much the answer depends on a head, ‖⟨O_h, ∂y/∂O_h⟩‖",
        "directions": "directions of attention that the answer depends on",
    }


def effective_for(
    model: nn.Module,
    batch: Mapping[str, Any],
    outputs: Answer = "embedding",
    *,
    maps: bool = False,
    layers: Iterable[int | str] | None = None,
    kinds: Iterable[Kind] | Kind | None = None,
    max_bytes: int = 2**30,
) -> EffectiveFor:
    """Find how much of the attention moves a model's answer, and how much heads and layers see.

    One forward pass and one backward pass for each of the C outputs; no parameter's `.grad` is
    touched. Exact to first order: `A_out` is the projection of A on the derivatives of all outputs.

    Args:
        model: in evaluation mode.
        batch: its keyword arguments.
        outputs: `"logits"`, `[B, C]`; `"embedding"`, the mean of `last_hidden_state` over real
            tokens; `"loss"`; or a function of the model's output that returns `[B, C]` or a scalar.
        maps: return `A_out` as well.
        layers: layers to look at, see :class:`~attnlens.Lens`.
        kinds: kinds of attention to look at, see :class:`~attnlens.Lens`.
        max_bytes: bound on the memory of gradients kept at once; with less, more backward passes.

    Returns:
        The three shares.

    Raises:
        InputError: if the model is in training mode, or has no such output.
        CaptureError: if no gradient reaches a layer.
        MemoryBoundError: if the gradients of one layer do not fit.

    References:
        Brunner et al., ICLR 2020, section 3 (heads); Michel et al., NeurIPS 2019 (importance).

    Examples:
        >>> found = effective_for(model, batch, lambda output: output[0][:, 0, :4], layers=[5])
        >>> bool((found.answer <= found.head + 1e-6).all())
        True
    """
    if model.training:
        raise InputError(
            "The model is in training mode, where dropout changes its answer. Call model.eval()."
        )
    calls = _Calls()
    with Lens(model, calls, layers=layers, kinds=kinds), torch.enable_grad():
        with _sources(model) as sources:
            answer = _answer(model(**batch), outputs, batch)
        sources = sources or [p for p in model.parameters() if p.requires_grad]
        count = answer.shape[-1]
        levels = {}
        for group in _groups(calls.captures, count, max_bytes):
            calls.gradients = {key: [] for key in group}
            for index in range(count):
                torch.autograd.grad(
                    answer[..., index].sum(), sources, retain_graph=True, allow_unused=True
                )
            for key in group:
                levels[key] = _level(calls.captures[key], calls.gradients.pop(key), count, maps)
    return _result(levels)


class _Calls(GradientObserver):
    """Attention calls of one forward pass, and gradients of those that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.captures: dict[_Call, Capture] = {}
        self.gradients: dict[_Call, list[Tensor]] = {}

    def update(self, capture: Capture) -> None:
        key = _key(capture)
        if key in self.captures:
            raise InputError(
                f"{capture.site} ran twice in one forward pass, as in a siamese model. Call its "
                f"encoder alone."
            )
        self.captures[key] = replace(capture, context=capture.context.clone())

    def update_gradient(self, capture: Capture, gradient: Tensor) -> None:
        if _key(capture) in self.gradients:
            self.gradients[_key(capture)].append(gradient.clone())

    def compute(self) -> dict[_Call, Capture]:
        return self.captures


def _key(capture: Capture) -> _Call:
    return capture.stack, capture.layer, capture.call


@contextmanager
def _sources(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what leaves the input embeddings: derivatives are taken down to there."""
    found: list[Tensor] = []
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()

    def left(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found.append(output if output.requires_grad else output.requires_grad_())

    if embeddings is None:
        yield found
        return
    handle = embeddings.register_forward_hook(left)
    try:
        yield found
    finally:
        handle.remove()


def _answer(output: Any, wanted: Answer, batch: Mapping[str, Any]) -> Tensor:
    """Read the answer off a model's output, `[B, C]` or `[1]`."""
    if callable(wanted):
        answer = wanted(output)
    elif wanted == "embedding":
        hidden = _field(output, "last_hidden_state", wanted)
        mask = batch.get("attention_mask")
        real = hidden.new_ones(hidden.shape[:2]) if mask is None else mask.to(hidden.dtype)
        answer = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    elif wanted in ("logits", "loss"):
        answer = _field(output, wanted, wanted)
    else:
        raise InputError(
            f'outputs must be "logits", "embedding", "loss" or a function. Got {wanted!r}.'
        )
    answer = answer[None] if answer.dim() == 0 else answer
    if answer.dim() > 2 or not answer.requires_grad:
        raise InputError(
            f"outputs must give [B, C] or a scalar with a gradient. Got {list(answer.shape)}"
            f"{'' if answer.requires_grad else ' without one'}. Pass a function of the model's "
            f"output that chooses positions."
        )
    return answer


def _field(output: Any, name: str, wanted: str) -> Tensor:
    value = getattr(output, name, None)
    if not isinstance(value, Tensor):
        raise InputError(
            f"outputs={wanted!r} needs {name} in the model's output, and {type(output).__name__} "
            f"has none. Pass labels for a loss, or a function of the output."
        )
    return value


def _groups(
    captures: Mapping[_Call, Capture], outputs: int, max_bytes: int
) -> Iterator[list[_Call]]:
    """Cut the calls into groups whose gradients fit into memory together."""
    group: list[_Call] = []
    used = 0
    for key, capture in captures.items():
        needed = outputs * capture.context.nbytes
        if needed > max_bytes:
            raise MemoryBoundError(
                f"The gradients of {outputs} outputs at {capture.site} need {needed:,} bytes, "
                f"above max_bytes={max_bytes:,}. Pass fewer examples or outputs, or raise it."
            )
        if used + needed > max_bytes:
            yield group
            group, used = [], 0
        group.append(key)
        used += needed
    if group:
        yield group


@dataclass(frozen=True)
class _Levels:
    """Of one call: shares and importance of every example, `[B, H]`, and of the layer, `[B]`."""

    answer: Tensor
    answer_norm: Tensor
    head: Tensor
    layer: Tensor
    heads: Tensor
    importance: Tensor
    directions: Tensor
    maps: Tensor | None


@torch.no_grad()
def _level(capture: Capture, gradients: Sequence[Tensor], outputs: int, maps: bool) -> _Levels:
    if len(gradients) != outputs:
        raise CaptureError(
            f"The answer does not depend on {capture.site}, or no gradient reaches it: "
            f"{len(gradients)} of {outputs} derivatives came. Leave the layer out with layers=, or "
            f"choose other outputs."
        )
    gradient = torch.stack(list(gradients))
    posed = problem(capture)
    space, sums = null_space(posed, with_rows=True)
    assert sums is not None
    context = capture.context
    if not capture.exact_context:
        context = capture.rows.context(capture.value.to(working_dtype(capture.value)))
    found: AnswerLevel = answer_level(gradient, capture.value, context, capture.support)
    square = sums.square.sum(-1)
    heads = (space.effective_square.sum(-1) / square).clamp(max=1)
    layer = heads
    if capture.output_projection is None:
        layer = torch.full_like(heads, torch.nan)
    elif not capture.output_projection.separates_heads:
        layer = (capture.layer_level().square.sum(-1) / square).clamp(max=1)
    return _Levels(
        answer=found.square / sums.square,
        answer_norm=found.square.clamp(min=0).sqrt(),
        head=(space.effective_square / sums.square).clamp(max=1),
        layer=layer,
        heads=heads,
        importance=torch.linalg.vector_norm(found.importance, dim=-1),
        directions=found.rank.double(),
        maps=answer_maps(gradient, capture.value, found.weights, capture.support) if maps else None,
    )


def _result(levels: Mapping[_Call, _Levels]) -> EffectiveFor:
    by_layer: dict[LayerKey, list[_Levels]] = {}
    for (stack, layer, _), found in levels.items():
        by_layer.setdefault((stack, layer), []).append(found)

    def mean(name: str) -> Tensor:
        rows = [
            torch.cat([getattr(call, name) for call in calls]).nanmean(0).cpu()
            for calls in by_layer.values()
        ]
        if not rows[0].dim():
            return torch.stack(rows)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)

    names = ("answer", "answer_norm", "head", "layer", "heads", "importance", "directions")
    maps = tuple(found.maps for found in levels.values() if found.maps is not None)
    return EffectiveFor(tuple(by_layer), **{name: mean(name) for name in names}, maps=maps)
