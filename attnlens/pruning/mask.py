"""Mask heads for the duration of a block, at the input of their output projection.

with mask_heads(model, {0: [3, 7], 4: [1]}):
    model(**batch)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from attnlens.algebra.values import working_dtype
from attnlens.capture import Capture
from attnlens.errors import CaptureError, InputError, UnsupportedAttentionError
from attnlens.pruning.heads import LayerHeads, find_heads
from attnlens.pruning.plan import Heads, Plan, existing_heads, resolve
from attnlens.tap.compiled import running_eagerly
from attnlens.tap.hooks import Replacement, replaying
from attnlens.tap.interrupts import attached
from attnlens.tap.selection import Kinds, Selection
from attnlens.tap.sites import Catalogue
from attnlens.tap.tap import Tap
from attnlens.tap.trial import Trial

Mode = Literal["zero", "mean", "uniform"]


@contextmanager
def mask_heads(
    model: nn.Module,
    heads: Heads | None = None,
    mode: Mode = "zero",
    gates: Tensor | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    kinds: Kinds = None,
) -> Iterator[Plan]:
    """Mask heads of a model for the duration of a `with` block.

    A head's context, its slice of the input of W_O, is replaced; nothing else is touched. Rows of
    `[L, H]` tensors are those of `HeadStatistics` on the same model.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        heads: `{layer: [head, …]}` or a boolean `[L, H]` tensor, True for heads to mask. A layer
            is an index, or `(stack, index)` in a model with several stacks. May be left out where
            `gates` are given.
        mode: what takes the context's place: `"zero"`; `"mean"`, its mean over the real tokens of
            the example; or `"uniform"`, the mean of the values at the keys that the row may
            attend to, as a constant through which no gradient flows.
        gates: `[L, H]`, multiplies the contexts of all heads and receives gradients.
        inputs: small keyword inputs of the model for one forward pass that finds the heads; made
            up by default.
        kinds: kinds of attention, as for a lens; by default the encoder's self-attention.

    Yields:
        The heads that are masked.

    Raises:
        InputError: if a layer or head does not exist or is named twice, or an argument has the
            wrong shape or value. Nothing was changed then.
        UnsupportedAttentionError: if the output projection of a chosen layer is not known.

    References:
        Michel, Levy, Neubig, "Are Sixteen Heads Really Better than One?", NeurIPS 2019, section 2.

    Examples:
        >>> with mask_heads(model, {0: [3, 7]}), torch.no_grad():
        ...     masked = model(**batch).last_hidden_state
        >>> bool((masked != model(**batch).last_hidden_state).any())
        True
    """
    modes = get_args(Mode)
    if mode not in modes:
        raise InputError(f"mode must be one of {', '.join(modes)}. Got {mode!r}.")
    layers = find_heads(Trial(model, inputs), kinds)
    plan = resolve({} if heads is None else heads, layers)
    if not plan and gates is None:
        raise InputError(f"heads names no head to mask, and there are no gates. Got {heads!r}.")
    with masking(model, layers, plan, mode, gates):
        yield plan


@contextmanager
def masking(
    model: nn.Module,
    layers: Sequence[LayerHeads],
    plan: Plan,
    mode: Mode = "zero",
    gates: Tensor | None = None,
) -> Iterator[None]:
    """Mask heads that were found before.

    Args:
        model: what runs in the block.
        layers: the heads of the model.
        plan: which of them to mask.
        mode: what takes a context's place.
        gates: `[L, H]` factors, or None.
    """
    masker = _Masker(_jobs(layers, plan, mode, gates), mode)

    def attach(stack: ExitStack) -> None:
        stack.enter_context(running_eagerly(model))
        if masker.listens:
            kinds = frozenset(layer.kind for layer in layers)
            Tap(Selection(Catalogue(model), None, kinds), masker.hear).attach(stack)
        for module in masker.modules:
            hook = Replacement(masker.replace)
            stack.callback(hook.attach(module.register_forward_pre_hook))
        stack.callback(masker.forget)

    with attached(attach):
        yield


@dataclass(frozen=True, eq=False)
class _Job:
    """What is done to the heads of one layer: `gate` is `[H]` or None, `masked` indices."""

    layer: LayerHeads
    module: nn.Module
    masked: Tensor
    gate: Tensor | None


class _Masker:
    """Replace the inputs of output projections.

    Attributes:
        modules: every output projection whose input is replaced.
        listens: whether the attention calls themselves must be heard.
    """

    def __init__(self, jobs: Sequence[_Job], mode: Mode) -> None:
        self._mode = mode
        self._jobs: dict[nn.Module, list[_Job]] = {}
        for job in jobs:
            self._jobs.setdefault(job.module, []).append(job)
        self._heard: dict[str, list[Capture]] = {}
        self.modules = list(self._jobs)
        shared = len(jobs) > len(self.modules)
        self.listens = shared or (mode != "zero" and any(job.masked.numel() for job in jobs))

    def hear(self, capture: Capture) -> None:
        """Keep an attention call until its context arrives at the output projection."""
        if capture.receiver:
            self._heard.setdefault(capture.receiver, []).append(capture)

    def forget(self) -> None:
        """Let go of every attention call."""
        self._heard.clear()

    def replace(self, module: nn.Module, args: Sequence[Any]) -> tuple[Any, ...]:
        """Change the input of an output projection; its pre-forward hook."""
        received, *rest = args
        job, *others = self._jobs[module]
        heard = self._heard.pop(job.layer.name, [])
        if self.listens and not heard:
            self._refuse(job)
        if others:
            job = next(j for j in (job, *others) if j.layer.layer == heard[-1].layer)
        return (_replaced(received, job, self._mode, heard), *rest)

    def _refuse(self, job: _Job) -> None:
        reason = (
            "Gradient checkpointing runs layers again in the backward pass, where this cannot be "
            "told. Switch it off, or use mode='zero' where layers share no weights."
            if replaying()
            else "Call the whole model, not a part of it, in the thread that masks."
        )
        raise CaptureError(f"{job.layer.name} ran without its attention being heard. {reason}")


def _jobs(layers: Sequence[LayerHeads], plan: Plan, mode: Mode, gates: Tensor | None) -> list[_Job]:
    """Say what is done to each layer, after checking that it can be done."""
    if gates is not None:
        _check_gates(gates, layers)
    jobs = []
    affected = {layer.name for layer in layers if plan.of(layer)}
    for row, layer in enumerate(layers):
        heads = plan.of(layer)
        if heads and mode != "zero" and not layer.in_order:
            raise UnsupportedAttentionError(
                f"mode={mode!r} needs tokens in batch order, and {layer.name} receives those of "
                f"{layer.label} in another. Use mode='zero'."
            )
        if layer.projection is None or (gates is None and layer.name not in affected):
            continue
        gate = None if gates is None else gates[row, : layer.heads]
        jobs.append(_Job(layer, layer.projection, torch.tensor(heads, dtype=torch.long), gate))
    return jobs


def _check_gates(gates: Tensor, layers: Sequence[LayerHeads]) -> None:
    shape = tuple(existing_heads(layers).shape)
    if not gates.is_floating_point() or gates.shape != shape:
        raise InputError(
            f"gates must be floating-point {list(shape)}. Got {gates.dtype} {list(gates.shape)}."
        )
    for layer in layers:
        if layer.projection is None:
            raise UnsupportedAttentionError(
                f"The heads of {layer.label} cannot be gated: {layer.reason}."
            )


def _replaced(received: Tensor, job: _Job, mode: Mode, heard: Sequence[Capture]) -> Tensor:
    """The input of an output projection with gates and masks applied."""
    layer = job.layer
    context = layer.contexts(received)
    if job.gate is not None:
        context = context * job.gate.to(context)[:, None]
    if job.masked.numel():
        masked = job.masked.to(context.device)
        context = context.index_copy(-2, masked, _substitute(context, masked, mode, heard))
    return context.flatten(-2).movedim(-1, layer.axis)


def _substitute(context: Tensor, masked: Tensor, mode: Mode, heard: Sequence[Capture]) -> Tensor:
    """What takes the place of the masked contexts, `[..., h, D]`."""
    before = context.index_select(-2, masked)
    if mode == "zero":
        return torch.zeros_like(before)
    (capture,) = heard
    if mode == "mean":
        replacement = _mean(before, capture.real_rows, masked)
    else:
        replacement = _uniform(capture, masked)
    return replacement.to(before.dtype).expand_as(before)


def _mean(contexts: Tensor, real: Tensor, masked: Tensor) -> Tensor:
    """The mean over the real tokens of each example: `[B, 1, h, D]`."""
    if real.shape[1] > 1:
        real = real.index_select(1, masked)
    real = real.transpose(1, 2)[..., None]  # [B, Q, 1 or h, 1]
    total = torch.where(real, contexts, 0).sum(1, keepdim=True)
    return total / real.sum(1, keepdim=True).clamp(min=1)


def _uniform(capture: Capture, masked: Tensor) -> Tensor:
    """Every key that a row may attend to, weighted alike: `[B, Q or 1, h, D]`."""
    value = capture.value.index_select(1, masked)
    value = value.to(working_dtype(value))
    mask = capture.mask
    if mask is None:
        uniform: Tensor = value.mean(2, keepdim=True)
        return uniform.transpose(1, 2)
    if mask.shape[1] > 1:
        mask = mask.index_select(1, masked)
    weights = mask.expand(*mask.shape[:-1], value.shape[2]).to(value)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
    return (weights @ value).transpose(1, 2)
