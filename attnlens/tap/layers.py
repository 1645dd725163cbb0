"""The layer tap: from the layers of a running forward pass to layer captures and gradients.

Layers are hooked where the model has them. Whether they form a chain is not assumed: what enters
a layer must be the very tensor that left the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.capture import Capture, HiddenState, LayerCapture, Link
from attnlens.errors import UnsupportedAttentionError
from attnlens.observer import LayerObserver
from attnlens.tap.forwards import Forwards
from attnlens.tap.guard import Guard
from attnlens.tap.hooks import Hook, replaying, unheard, unobserved
from attnlens.tap.order import LayerOrder
from attnlens.tap.passing import output_tensors
from attnlens.tap.rerun import LayerCall, Layout, arranged
from attnlens.tap.selection import Selection
from attnlens.tap.sites import Site

_UNKNOWN = (None, None)  # tail of a chain after a layer without a hidden state


@dataclass(frozen=True, eq=False)
class _Running:
    """A layer between its two hooks: its call, what entered it, and a copy of that."""

    call: LayerCall
    entered: Tensor
    hidden: Tensor
    link: Link
    index: int


class LayerTap:
    """Hooks on the layers of one model that turn their calls into layer captures.

    Args:
        selection: which stacks to look at.
        observers: whom to tell.
        forwards: the forward passes of the model.
        guard: what becomes of an error inside a pass.

    Attributes:
        layers: the layers that are looked at.
        fired: names of those that ran.

    Raises:
        UnsupportedAttentionError: if the model has no such layers.
    """

    def __init__(
        self,
        selection: Selection,
        observers: Sequence[LayerObserver],
        forwards: Forwards,
        guard: Guard,
    ) -> None:
        layers = selection.catalogue.layers()
        self.layers = tuple(layer for layer in layers if layer.kind in selection.kinds)
        if not self.layers:
            kind = type(selection.catalogue.model).__name__
            kinds = ", ".join(sorted({layer.kind for layer in layers})) or "none"
            raise UnsupportedAttentionError(
                f"{kind} has no {' or '.join(sorted(selection.kinds))} layers that can be told by "
                f"its structure (kinds of layers found: {kinds}). Pass kinds= to look at others."
            )
        self.fired: set[str] = set()
        self._selection = selection
        self._observers = observers
        self._forwards = forwards
        self._guard = guard
        self._layouts: dict[str, Layout] = {}
        self._attached = self._open = False
        self._clear()

    def attach(self, stack: ExitStack) -> None:
        """Register every hook until the stack closes."""
        self._attached = True
        stack.callback(self._detach)
        for layer in self.layers:
            enter = Hook(self._guard(partial(self._enter, layer)))
            leave = Hook(self._guard(partial(self._leave, layer)))
            module = layer.module
            stack.callback(enter.attach(module.register_forward_pre_hook, with_kwargs=True))
            stack.callback(leave.attach(module.register_forward_hook, always_call=True))

    @property
    def silent(self) -> list[str]:
        """Names of the layers that never ran."""
        return [layer.name for layer in self.layers if layer.name not in self.fired]

    def begin(self) -> None:
        """Begin the forward pass of the model or, nested in it, of a pretrained one inside."""
        self._open = True
        self._order.restart()
        self._tails.clear()
        self._keys.clear()

    def end(self, completed: bool) -> None:
        """End the outermost forward pass, which returned only if it is completed."""
        for watch in self._late if completed else ():
            watch()
        self._close(completed)

    def wants_mask(self, site: Site) -> bool:
        """Tell whether a call of this site would say which tokens are real.

        Args:
            site: an attention module.

        Returns:
            True inside a layer of a chain whose real tokens are not known yet.
        """
        running = self._around(site)
        return running is not None and running.call.name not in self._keys

    def attended(self, site: Site, capture: Capture) -> None:
        """Read the real tokens off a call of an attention module."""
        running = self._around(site)
        if running is not None and capture.kind != "cross":
            self._keys[running.call.name] = capture.support.keys.any(1)

    def forget(self) -> None:
        """Let go of everything that belongs to one forward pass."""
        self._close(completed=False)
        self._clear()

    def _close(self, completed: bool) -> None:
        was_open, self._open = self._open, False
        if was_open:
            with unheard():
                for observer in self._observers:
                    observer.end_forward(completed)

    def _clear(self) -> None:
        self._order = LayerOrder()
        self._running: dict[str, _Running] = {}
        self._tails: dict[str, tuple[Tensor | None, int | None]] = {}
        self._keys: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}
        self._late: list[Callable[[], None]] = []

    def _detach(self) -> None:
        self._attached = False
        self.forget()

    def _around(self, site: Site) -> _Running | None:
        """The running layer that begins a chain and contains a site."""
        for name, running in self._running.items():
            if running.link == "first" and site.name.startswith(f"{name}."):
                return running
        return None

    def _enter(
        self, layer: Site, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        if not self._forwards.running or replaying():
            return
        self._order.invoke(layer)
        self.fired.add(layer.name)
        with unobserved():
            self._entered(layer, module, args, kwargs)

    def _entered(
        self, layer: Site, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        taken = LayerCall.of(layer.name, module, args, kwargs)
        if taken is None:
            self._tails[layer.stack] = _UNKNOWN
            return
        call, hidden = taken
        tail = self._tails.get(layer.stack)
        link: Link = "first"
        if tail is not None:
            link = "next" if tail[0] is hidden and tail[1] == _version(hidden) else "broken"
        # A copy, because a layer may change its own input in place.
        copy = hidden.detach().clone()
        self._running[layer.name] = _Running(call, hidden, copy, link, self._order.layer(layer))

    def _leave(self, layer: Site, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        running = self._running.pop(layer.name, None)
        tensors = output_tensors(output)
        if running is None or not tensors or replaying():
            return
        with unheard():
            self._tails[layer.stack] = tensors[0], _version(tensors[0])
            self._take(layer, running, tensors[0])

    def _take(self, layer: Site, running: _Running, left: Tensor) -> None:
        """Describe a layer that ran, and tell the observers."""
        stack, index = layer.stack, running.index
        layout = self._layout(layer, running)
        hidden, output = arranged(running.hidden, layout), arranged(left.detach(), layout)
        rerun = partial(running.call.again, layout=layout)
        if running.link == "first" or stack not in self._masks:
            self._masks[stack] = self._real_tokens(layer, hidden)
        mask = self._masks[stack]
        chosen = self._selection.accepts_layer(layer, index)
        _, lowered, autocast = running.call.autocast
        precision = lowered if autocast else hidden.dtype
        link = running.link
        capture = LayerCapture(
            layer.name, stack, index, hidden, output, mask, rerun, link, chosen, precision
        )
        for observer in self._observers:
            observer.update_layer(capture)
        if not chosen:
            return
        if running.link == "first":
            self._watch(HiddenState(stack, -1, hidden, mask), running.entered, layout)
        self._watch(HiddenState(stack, index, output, mask), left, layout)

    def _watch(self, state: HiddenState, live: Tensor, layout: Layout) -> None:
        """Hook the gradient of a live tensor, now or when the forward pass ends."""

        def register() -> None:
            if not live.requires_grad:
                return
            hook: Callable[..., Any] = live.register_hook
            for observer in self._observers:
                receive = observer.watch_hidden(state)
                if receive is not None:
                    hook(self._guard(partial(self._receive, receive, layout)))

        if live.requires_grad:
            register()
        elif self._forwards.running[0].has_graph:
            # Reentrant checkpointing runs the layer without gradients and connects its output to
            # the graph afterwards.
            self._late.append(register)

    def _receive(self, receive: Callable[[Tensor], None], layout: Layout, gradient: Tensor) -> None:
        if self._attached:
            with unheard():
                receive(arranged(gradient, layout))

    def _layout(self, layer: Site, running: _Running) -> Layout:
        """How the layers of a stack have their hidden states; tried out once, where in doubt."""
        hidden, batch = running.hidden, self._forwards.running[-1].batch
        if hidden.dim() == 2:
            return "packed"
        if hidden.dim() != 3 or hidden.shape[1] != batch or hidden.shape[0] == 1:
            return "batch"
        if layer.stack not in self._layouts:
            mixed = running.call.mixes_first_axis(hidden)
            if mixed is None:
                return "batch" if hidden.shape[0] == batch else "tokens"
            self._layouts[layer.stack] = "tokens" if mixed else "batch"
        return self._layouts[layer.stack]

    def _real_tokens(self, layer: Site, hidden: Tensor) -> Tensor:
        """`[B, K]` bool: what attention may look at and the model's own mask does not exclude."""
        mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        for keys in (self._keys.get(layer.name), self._forwards.running[-1].padding):
            if keys is not None and keys.shape == mask.shape:
                mask = mask & keys.to(mask.device)
        return mask


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place, where torch counts it."""
    return None if tensor.is_inference() else tensor._version
