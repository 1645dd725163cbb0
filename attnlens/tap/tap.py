"""The tap: from the model's own forward pass to captures, and nothing left behind.

The tap counts forwards and layers, hears every attention call of the chosen sites, finds each
site's output projection by following its context the first time, and delivers captures.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from attnlens.capture import Capture, Masking
from attnlens.errors import InputError
from attnlens.tap.arguments import by_name
from attnlens.tap.calls import (
    MaskingOf,
    capture_of_call,
    capture_of_event,
    live_of_call,
    live_of_event,
)
from attnlens.tap.compiled import running_eagerly
from attnlens.tap.dispatch import InterfaceCall, listen, masking_of
from attnlens.tap.gradients import DeliverGradient, Gradients, LiveContext, relabelled
from attnlens.tap.hooks import Hook
from attnlens.tap.masks import with_position_bias
from attnlens.tap.projection import ContextTrail, Projections, linear_hooks, weight_owners
from attnlens.tap.scope import Frame, TraceScope, replaying
from attnlens.tap.sites import Selection, Site, forward_roots
from attnlens.tap.tracing import Event

Deliver = Callable[[Capture], None]
Begin = Callable[[Mapping[str, Any]], None]
Mode = Literal["train", "eval", "both"]


class Companion(Protocol):
    """Something else that looks at the forward passes a tap looks at."""

    def attach(self, stack: ExitStack) -> None:
        """Register hooks, each with its removal."""

    def enter(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        padding: Tensor | None,
    ) -> None:
        """Begin the forward pass of the model or, nested in it, of a pretrained one inside."""

    def wants_mask(self, site: Site) -> bool:
        """Tell whether a call of this site would say which tokens are real."""

    def attended(self, site: Site, capture: Capture) -> None:
        """Hear an attention call."""

    def leave(self, outer: int, completed: bool) -> None:
        """End a forward pass; `outer` of those around it go on."""

    def forget(self) -> None:
        """Let go of everything that belongs to one forward pass."""


class Tap:
    """Hooks on one model that turn its attention calls into captures.

    Args:
        model: the model.
        selection: which attention to look at.
        deliver: called with each capture, soon after its call.
        every: look at each N-th outermost forward.
        companion: something else to tell of the forwards that are looked at.
        mode: which forward passes exist for this tap: those of a model in training mode, in
            evaluation mode, or both.
        deliver_gradient: called in the backward pass with each capture and `∂L/∂O`; None asks
            for no gradients.
        begin: called with the model's arguments by name before each forward that is looked at.

    Attributes:
        forwards: number of outermost forward passes seen so far.
        looked: how many of them were looked at.
        fired: names of the sites that were heard at least once.
        seen: names of all modules with attention, chosen or not, that were heard.
        gradients: what follows the contexts into the backward pass, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        deliver: Deliver,
        every: int,
        companion: Companion | None = None,
        mode: Mode = "both",
        deliver_gradient: DeliverGradient | None = None,
        begin: Begin | None = None,
    ) -> None:
        self.model = model
        self.selection = selection
        self.forwards = 0
        self.looked = 0
        self.fired: set[str] = set()
        self.seen: set[str] = set()
        self._deliver = deliver
        self._announce = begin
        self._every = every
        self._companion = companion
        self._mode = mode
        self._chosen = False
        self._with_graph = False
        self.gradients = None if deliver_gradient is None else Gradients(deliver_gradient)
        catalogue = selection.catalogue
        self._interface = {id(site.module): site for site in catalogue.interface}
        self._scope = TraceScope(
            model, self._heard_event, self._heard_linear, replays=deliver_gradient is not None
        )
        self._running: list[nn.Module] = []
        self._padding: list[Tensor | None] = []  # one for each running forward
        self._batch: int | None = None
        self._order = LayerOrder()
        self._projections: dict[str, Projections] = {}
        self._pending: list[Capture] = []
        self._trail = ContextTrail()
        self._maskings: list[tuple[Any, Masking]] = []
        self._owners: dict[int, tuple[str, nn.Module]] | None = None

    def attach(self, stack: ExitStack) -> None:
        """Register every hook, each with its removal.

        Args:
            stack: closes what was opened, in reverse order.

        Raises:
            InputError: if the model is spread over devices by `nn.DataParallel`.
        """
        if isinstance(self.model, nn.DataParallel) and len(self.model.device_ids) > 1:
            raise InputError(
                "nn.DataParallel runs copies of the model that no hook can follow. Give the lens "
                "model.module on one device, or use DistributedDataParallel."
            )
        stack.callback(self._forget)
        stack.enter_context(running_eagerly(self.model))
        stack.callback(self._scope.detach)
        for root in forward_roots(self.model):
            begin = root.register_forward_pre_hook(
                Hook(self._begin), with_kwargs=True, prepend=True
            )
            stack.callback(begin.remove)
            stack.callback(root.register_forward_hook(Hook(self._end), always_call=True).remove)
        sites = self.selection.catalogue.interface
        for site in sites:
            stack.callback(site.module.register_forward_pre_hook(Hook(self._invoke)).remove)
        for handle in linear_hooks(self.model, self._received):
            stack.callback(handle.remove)
        stack.enter_context(listen([site.module for site in sites], self._heard_call))
        if self._companion is not None:
            self._companion.attach(stack)

    @property
    def fused(self) -> set[str]:
        """Names of modules that ran torch's fused attention, which hides A."""
        return self._scope.fused

    @property
    def silent(self) -> list[str]:
        """Names of the chosen sites that were never heard."""
        chosen = [s for s in self.selection.catalogue.interface if self.selection.takes(s)]
        return [site.name for site in chosen if site.name not in self.fired]

    @property
    def _looking(self) -> bool:
        return bool(self._running) and self._chosen

    def _begin(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if replaying():
            return
        if any(module is running for running in self._running):
            # an interrupt tore down a forward without running its hooks
            self._running.clear()
            self._padding.clear()
        self._running.append(module)
        self._padding.append(_padding_mask(module, args, kwargs))
        if len(self._running) > 1:
            self._order.restart()
            self._enter_companion(module, args, kwargs)
            return
        self._chosen = self._choose(module)
        self._with_graph = torch.is_grad_enabled()
        self._order = LayerOrder()
        self._clear()
        if self._looking:
            self.looked += 1
            self._batch = _batch_size(args, kwargs)
            self._scope.begin((module.__class__, *_kind_of_input(module, args, kwargs)))
            if self._announce is not None:
                self._announce(by_name(module, args, kwargs))
            self._enter_companion(module, args, kwargs)

    def _enter_companion(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        if self._companion is not None and self._looking:
            self._companion.enter(module, args, kwargs, self._padding[-1])

    def _choose(self, module: nn.Module) -> bool:
        """Count an outermost forward pass and tell whether it is one to look at."""
        if self._mode != "both" and module.training != (self._mode == "train"):
            return False
        self.forwards += 1
        return (self.forwards - 1) % self._every == 0

    def _end(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        if replaying() or not self._running:
            return
        looking = self._looking
        while self._running and self._running.pop() is not module:
            continue
        del self._padding[len(self._running) :]
        outermost = not self._running and looking
        completed = output is not None  # torch calls this hook without one where the forward raised
        if outermost:
            self._scope.end(completed)
            self._settle()
        try:
            if looking and self._companion is not None:
                self._companion.leave(len(self._running), completed)
        finally:
            if outermost:
                self._clear()

    def _invoke(self, module: nn.Module, args: Sequence[Any]) -> None:
        if self._looking and not replaying():
            self._enter(self._interface[id(module)])

    def _enter(self, site: Site) -> None:
        self._settle()
        self._order.invoke(site)

    def _heard_call(self, call: InterfaceCall) -> None:
        site = self._interface[id(call.module)]
        self._heard(
            site,
            lambda masking: capture_of_call(call, site.name, masking),
            lambda: live_of_call(call),
        )

    def _heard_event(self, frame: Frame, event: Event) -> None:
        site = self.selection.catalogue.site(frame.name, frame.module)
        if self._looking and not frame.entered and not replaying():
            frame.entered = True
            self._enter(site)
        self._heard(
            site,
            lambda masking: capture_of_event(event, frame.module, site.name),
            lambda: live_of_event(event, frame.module),
        )

    def _heard(
        self, site: Site, build: Callable[[MaskingOf], Capture], live: Callable[[], LiveContext]
    ) -> None:
        """Take a call of the forward pass, or the replay of one whose gradient is waited for."""
        if replaying():
            known = None if self.gradients is None else self.gradients.replayed(site.name)
            if self.gradients is not None and known is not None:
                masking = known.masking
                with _unobserved():
                    capture = relabelled(build(lambda *_: masking), known)
                self.gradients.follow(capture, live())
            return
        if not self._looking:
            return
        with _unobserved():
            taken = self._take(site, lambda: build(self._masking))
        if self.gradients is not None and taken is not None and self._with_graph:
            if not self.gradients.follow(taken, live()):
                self.gradients.expect(taken, self._order.ordinal(site) == 0)

    def _take(self, site: Site, build: Callable[[], Capture]) -> Capture | None:
        """Label a capture, and deliver it or let it wait for its projection."""
        self.seen.add(site.name)
        layer = self._order.layer(site)
        companion = self._companion
        masking = companion is not None and companion.wants_mask(site)
        chosen = site.kind in self.selection.kinds and self.selection.accepts(site, layer)
        if not chosen and not masking:
            return None
        capture = build()
        if companion is not None and masking:
            companion.attended(site, capture)
        if not chosen:
            return None
        self.fired.add(site.name)
        batch = capture.context.shape[0]
        folded = self._batch is not None and batch > self._batch and batch % self._batch == 0
        capture = replace(
            capture,
            layer=layer,
            stack=site.stack,
            kind=site.kind,
            call=self._order.count(site, layer),
            padding=self._padding[-1],
            windows=batch // self._batch if folded and self._batch else 1,
        )
        known = self._projections.get(site.name)
        if not capture.context.shape[1]:
            return None  # a layer whose heads were all pruned attends to nothing
        if known is not None:
            self._send(capture, known, self._order.ordinal(site))
        else:
            waiting = replace(capture, context=capture.context.clone())
            self._pending.append(waiting)
            self._trail.add(waiting.context)
        return capture

    def _received(self, name: str, module: nn.Module, received: Tensor) -> None:
        if not self._pending or replaying():
            return
        with _unobserved():
            complete = self._trail.arrive(name, module, received.detach())
        if complete:
            self._settle()

    def _heard_linear(self, received: Tensor, weight: Tensor) -> None:
        """A linear function that no module call shows, such as that of `nn.MultiheadAttention`."""
        if not self._pending:
            return
        if self._owners is None:
            self._owners = weight_owners(self.model)
        owner = self._owners.get(id(weight))
        if owner is not None:
            self._received(*owner, received)

    def _settle(self) -> None:
        """Deliver what waits for its projection, found or not."""
        if not self._pending:
            return
        pending, trail = self._pending, self._trail
        self._pending, self._trail = [], ContextTrail()
        projections = trail.projections()
        self._projections.setdefault(pending[0].site, projections)
        for ordinal, capture in enumerate(pending):
            self._send(capture, projections, ordinal)

    def _send(self, capture: Capture, projections: Projections, ordinal: int) -> None:
        device = capture.context.device.type
        with _unobserved(), torch.autocast(device, enabled=False):
            output, reason = projections.read(ordinal)
            self._deliver(replace(capture, output_projection=output, projection_reason=reason))

    def _masking(self, call: InterfaceCall, query: Tensor, key: Tensor) -> Masking:
        """Normalise each distinct mask once per forward; its layers share what is known of it."""
        raw = call.arguments.get("attention_mask")
        masking = next((known for seen, known in self._maskings if seen is raw), None)
        if masking is None:
            masking = masking_of(call, query, key)
            if raw is not None:
                self._maskings.append((raw, masking))
        return with_position_bias(masking, call.arguments.get("position_bias"))

    def _clear(self) -> None:
        self._pending, self._trail, self._maskings = [], ContextTrail(), []
        if self._companion is not None:
            self._companion.forget()

    def _forget(self) -> None:
        self._clear()
        self._running.clear()
        self._padding.clear()
        self._projections.clear()
        self._owners = None
        if self.gradients is not None:
            self.gradients.close()


class LayerOrder:
    """Which layer an invocation is: by call where modules are shared, else by module."""

    def __init__(self) -> None:
        self._invoked: set[str] = set()
        self._repeating: set[str] = set()
        self._layer: dict[str, int] = {}  # stack → layer of its latest invocation
        self._ordinal: Counter[str] = Counter()
        self._calls: Counter[tuple[str, int]] = Counter()

    def restart(self) -> None:
        """Begin a nested forward: the layers of an encoder called twice count anew."""
        self._invoked.clear()
        self._repeating.clear()
        self._layer.clear()

    def invoke(self, site: Site) -> None:
        """Enter an attention module."""
        if site.name in self._invoked:
            self._repeating.add(site.stack)
        self._invoked.add(site.name)
        layer = site.layer
        if site.stack in self._repeating:
            layer = max(layer, self._layer.get(site.stack, -1) + 1)
        self._layer[site.stack] = layer
        self._ordinal[site.name] = 0

    def layer(self, site: Site) -> int:
        """Layer of the invocation that is running."""
        return self._layer.get(site.stack, site.layer)

    def ordinal(self, site: Site) -> int:
        """Position of the current call among those of its invocation, counted from zero."""
        return self._ordinal[site.name] - 1

    def count(self, site: Site, layer: int) -> int:
        """Number of earlier calls of the same layer in this forward; counts this one."""
        index = self._calls[site.stack, layer]
        self._calls[site.stack, layer] += 1
        self._ordinal[site.name] += 1
        return index


@contextmanager
def _unobserved() -> Iterator[None]:
    """Work of ours: no gradients, and no torch function seen by any mode."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def _batch_size(args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """First dimension of the first tensor a forward is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    return None


def _padding_mask(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The `[B, N]` attention mask a forward is given, as real tokens."""
    given = kwargs.get("attention_mask")
    if given is None and len(args) > 1:
        try:
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        except TypeError:  # the forward will complain in its own words
            return None
        given = bound.arguments.get("attention_mask")
    if not isinstance(given, Tensor) or given.dim() != 2 or given.is_floating_point():
        return None
    return given != 0


def _kind_of_input(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[object, ...]:
    """What decides which paths a forward takes: which inputs are given, and the mode."""
    given = frozenset(name for name, value in kwargs.items() if value is not None)
    return len(args), given, module.training
