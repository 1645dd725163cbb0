"""The tap: from the model's own forward pass to captures, and nothing left behind.

The tap follows the forward passes, hears every attention call of the chosen sites, and delivers
captures once their output projection is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from attnlens.capture import Capture
from attnlens.errors import InputError
from attnlens.observer import LayerObserver
from attnlens.tap.calls import capture_of_event, live_of_event
from attnlens.tap.compiled import running_eagerly
from attnlens.tap.dispatch import InterfaceCall, listen
from attnlens.tap.foreign import ForeignFunctions
from attnlens.tap.forwards import Forwards, Mode, forward_roots
from attnlens.tap.gradients import DeliverGradient, Gradients, LiveContext
from attnlens.tap.hooks import Hook, Lifted, lifted, replaying, unobserved
from attnlens.tap.layers import LayerTap
from attnlens.tap.masks import Maskings
from attnlens.tap.multihead import fusable_layers, may_fuse
from attnlens.tap.order import LayerOrder
from attnlens.tap.scope import Frame, TraceScope
from attnlens.tap.selection import Selection
from attnlens.tap.sites import Site
from attnlens.tap.tracing import Event
from attnlens.tap.waiting import Waiting

Deliver = Callable[[Capture], None]
Begin = Callable[[Mapping[str, Any]], None]


class Tap:
    """Hooks on one model that turn its attention calls into captures.

    Args:
        selection: which attention of which model to look at.
        deliver: called with each capture, soon after its call.
        every: look at each N-th outermost forward.
        mode: which forward passes exist for this tap: those of a model in training mode, in
            evaluation mode, or both.
        begin: called with the model's arguments by name before each forward that is looked at.
        deliver_gradient: called in the backward pass with each capture and `∂L/∂O`; None asks
            for no gradients.
        layer_observers: whom to tell of whole layers.

    Attributes:
        forwards: the forward passes of the model.
        layers: the tap on whole layers, or None where nobody asked for them.
        gradients: what follows the contexts into the backward pass, or None.
        fired: names of the sites that were heard at least once.
        heard: names of all modules with attention, chosen or not, that ran.
        fused: names of modules that ran torch's fused attention, which hides A.
        elsewhere: how many forward passes of the model began in other threads.
    """

    def __init__(
        self,
        selection: Selection,
        deliver: Deliver,
        *,
        every: int = 1,
        mode: Mode = "both",
        begin: Begin | None = None,
        deliver_gradient: DeliverGradient | None = None,
        layer_observers: Sequence[LayerObserver] = (),
    ) -> None:
        self._model = selection.catalogue.model
        self._selection = selection
        self._announce = begin
        self.forwards = Forwards(every, mode)
        self.layers: LayerTap | None = None
        if layer_observers:
            self.layers = LayerTap(selection, layer_observers, self.forwards)
        self.gradients = None if deliver_gradient is None else Gradients(deliver_gradient)
        self.fired: set[str] = set()
        self.heard: set[str] = set()
        self._interface = {id(site.module): site for site in selection.catalogue.interface}
        self._waiting = Waiting(self._model, deliver)
        self.elsewhere = 0
        self._fusable = fusable_layers(self._model)
        self._lifted: list[Lifted] = []
        self._scope = TraceScope(
            self._model,
            self._heard_event,
            self._waiting.received_by_weight,
            replays=deliver_gradient is not None,
        )
        self.fused = self._scope.fused
        self._order = LayerOrder()
        self._maskings = Maskings()
        self._foreign = ForeignFunctions()

    def attach(self, stack: ExitStack) -> None:
        """Register every hook, each with its removal.

        Args:
            stack: closes what was opened, in reverse order.

        Raises:
            InputError: if the model is spread over devices by `nn.DataParallel`.
        """
        model = self._model
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise InputError(
                "nn.DataParallel runs copies of the model that no hook can follow. Give the lens "
                "model.module on one device, or use DistributedDataParallel."
            )
        stack.callback(self._forget)
        stack.enter_context(running_eagerly(model))
        stack.callback(self._scope.detach)
        for root in forward_roots(model):
            begin, end = Hook(self._begin, elsewhere=self._begun_elsewhere), Hook(self._end)
            register = root.register_forward_pre_hook
            stack.callback(begin.attach(register, with_kwargs=True, prepend=True))
            stack.callback(end.attach(root.register_forward_hook, always_call=True))
        sites = self._selection.catalogue.interface
        for site in sites:
            enter = Hook(partial(self._enter, site))
            stack.callback(enter.attach(site.module.register_forward_pre_hook))
        self._waiting.attach(stack)
        stack.enter_context(listen([site.module for site in sites], Hook(self._heard_call)))
        if self.layers is not None:
            self.layers.attach(stack)

    @property
    def silent(self) -> list[str]:
        """Names of the chosen sites that were never heard."""
        catalogue = self._selection.catalogue
        sites = [*catalogue.interface, *map(catalogue.site, self._scope.never_ran())]
        return [s.name for s in sites if self._selection.takes(s) and s.name not in self.fired]

    def _begin(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if replaying():
            return
        outermost = self.forwards.begin(module, args, kwargs)
        running = self.forwards.running
        if outermost:
            self._order = LayerOrder()
            self._clear()
            self._scope.stop()
            fused = self._lift()
        else:
            self._order.restart()
        if running and outermost:
            if not fused:
                self._scope.begin(running[0].path)
            if self._announce is not None:
                self._announce(running[0].arguments)
        if running and self.layers is not None:
            self.layers.begin()

    def _end(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        if replaying():
            return
        was_running = bool(self.forwards.running)
        if self.forwards.end(module):
            self._put_back()
        if not was_running or self.forwards.running:
            return
        completed = output is not None  # torch calls this hook without one where the forward raised
        self._scope.end(completed)
        self._waiting.settle()
        try:
            if self.layers is not None:
                self.layers.end(completed)
        finally:
            self._clear()

    def _begun_elsewhere(self) -> None:
        self.elsewhere += 1

    def _lift(self) -> bool:
        """Take the hooks off layers that torch runs in one fused kernel, unless they have any."""
        self._put_back()
        layers = {name: layer for name, layer in self._fusable.items() if may_fuse(layer)}
        self._lifted = [lift for layer in layers.values() for lift in lifted(layer)]
        if self.forwards.running:
            self.fused.update(f"{name}.self_attn".lstrip(".") for name in layers)
        return bool(layers)

    def _put_back(self) -> None:
        while self._lifted:
            self._lifted.pop().put_back()

    def _enter(self, site: Site, *_: Any) -> None:
        if self.forwards.running and not replaying():
            self._waiting.settle()
            self._order.invoke(site)

    def _heard_call(self, call: InterfaceCall) -> None:
        site = self._interface[id(call.module)]
        self._heard(
            site,
            lambda: self._foreign.capture(call, site.name, self._maskings),
            lambda: self._foreign.live(call),
        )

    def _heard_event(self, frame: Frame, event: Event) -> None:
        site = self._selection.catalogue.site(frame.name)
        if not frame.entered:
            frame.entered = True
            self._enter(site)
        self._heard(
            site,
            lambda: capture_of_event(event, frame.module, site.name),
            lambda: live_of_event(event, frame.module),
        )

    def _heard(
        self, site: Site, build: Callable[[], Capture], live: Callable[[], LiveContext]
    ) -> None:
        """Take a call of the forward pass, or the replay of one whose gradient is waited for."""
        if replaying():
            if self.gradients is not None:
                self.gradients.replayed(site.name, live)
            return
        if not self.forwards.running:
            return
        with unobserved():
            capture = self._take(site, build)
        if capture is None or self.gradients is None or not self.forwards.running[0].has_graph:
            return
        if not self.gradients.follow(capture, live()):
            self.gradients.expect(capture, self._order.ordinal(site) == 0)

    def _take(self, site: Site, build: Callable[[], Capture]) -> Capture | None:
        """Label a capture, and deliver it or let it wait for its projection."""
        self.heard.add(site.name)
        layer = self._order.layer(site)
        wanted = self._selection.accepts(site, layer)
        masking = self.layers is not None and self.layers.wants_mask(site)
        if not wanted and not masking:
            return None
        capture = build()
        if self.layers is not None and masking:
            self.layers.attended(site, capture)
        if not wanted:
            return None
        self.fired.add(site.name)
        index = self._order.count(site, layer)
        if not capture.context.shape[1]:
            return None  # a layer whose heads were all pruned attends to nothing
        capture = replace(
            capture,
            layer=layer,
            stack=site.stack,
            kind=site.kind,
            call=index,
            padding=self.forwards.running[-1].padding,
            windows=self._windows(capture),
        )
        self._waiting.add(capture, self._order.ordinal(site))
        return capture

    def _windows(self, capture: Capture) -> int:
        """How many windows of one example are folded into B."""
        folded, batch = capture.context.shape[0], self.forwards.running[0].batch
        return folded // batch if batch and folded % batch == 0 and folded else 1

    def _clear(self) -> None:
        self._waiting.clear()
        self._maskings.forget()
        if self.layers is not None:
            self.layers.forget()

    def _forget(self) -> None:
        self._clear()
        self._put_back()
        self.forwards.clear()
        self._waiting.forget()
        if self.gradients is not None:
            self.gradients.close()
