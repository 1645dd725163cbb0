"""The tap: from the model's own forward pass to captures, and nothing left behind.

The tap counts forwards and layers, hears every attention call of the chosen sites, finds each
site's output projection by following its context the first time, and delivers captures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.capture import Capture, Masking
from attnlens.errors import CaptureError
from attnlens.model.interface import InterfaceCall, listen, masking_of
from attnlens.model.masks import with_position_bias
from attnlens.model.projection import NOT_FOUND, ContextTrail, ProjectionSource, linear_hooks
from attnlens.model.sites import Selection, Site, forward_roots

Deliver = Callable[[Capture], None]


class Tap:
    """Hooks on one model that turn its attention calls into captures.

    Attributes:
        forwards: number of outermost forward passes seen so far.
        looked: how many of them were looked at.
        fired: names of the sites that were heard at least once.
    """

    def __init__(
        self, model: nn.Module, selection: Selection, deliver: Deliver, every: int
    ) -> None:
        self.model = model
        self.selection = selection
        self.forwards = 0
        self.looked = 0
        self.fired: set[str] = set()
        self._deliver = deliver
        self._every = every
        self._sites = {id(site.module): site for site in selection.sites}
        self._running: list[nn.Module] = []
        self._order = _LayerOrder()
        self._projections: dict[str, ProjectionSource | None] = {}
        self._trail = ContextTrail()
        self._pending: list[tuple[Site, Capture]] = []
        self._maskings: list[tuple[Any, Masking]] = []

    def attach(self, stack: ExitStack) -> None:
        """Register every hook, each with its removal.

        Args:
            stack: closes what was opened, in reverse order.
        """
        stack.callback(self._forget)
        for root in forward_roots(self.model):
            _on_exit(stack, root.register_forward_pre_hook(self._begin))
            _on_exit(stack, root.register_forward_hook(self._end, always_call=True))
        for site in self.selection.sites:
            _on_exit(stack, site.module.register_forward_pre_hook(self._invoke))
        for handle in linear_hooks(self.model, self._received):
            _on_exit(stack, handle)
        stack.enter_context(listen([site.module for site in self.selection.sites], self._heard))

    @property
    def silent(self) -> list[str]:
        """Names of the chosen sites that were never heard."""
        return [site.name for site in self.selection.sites if site.name not in self.fired]

    @property
    def _looking(self) -> bool:
        return bool(self._running) and (self.forwards - 1) % self._every == 0

    def _begin(self, module: nn.Module, args: Sequence[Any]) -> None:
        if _replaying():
            return
        if any(module is running for running in self._running):
            self._running.clear()  # an interrupt tore down a forward without running its hooks
        if not self._running:
            self.forwards += 1
            self._order = _LayerOrder()
            self._clear()
            self.looked += (self.forwards - 1) % self._every == 0
        else:
            self._order.restart(module)
        self._running.append(module)

    def _end(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        if _replaying() or not self._running:
            return
        while self._running and self._running.pop() is not module:
            continue
        if not self._running:
            self._settle()
            self._clear()

    def _invoke(self, module: nn.Module, args: Sequence[Any]) -> None:
        if self._looking and not _replaying():
            self._settle()
            self._order.invoke(self._sites[id(module)])

    def _heard(self, call: InterfaceCall) -> None:
        if _replaying() or not self._looking:
            return
        site = self._sites[id(call.module)]
        self.fired.add(site.name)
        layer = self._order.layer(site)
        if not self.selection.accepts(site.stack, layer):
            return
        with torch.no_grad():
            capture = self._capture(call, site, layer)
            if site.name in self._projections:
                self._send(site, capture)
            else:
                self._trail.contexts.append(call.context.detach())
                self._pending.append((site, capture))

    def _received(self, name: str, module: nn.Module, received: Tensor) -> None:
        if not self._pending or _replaying():
            return
        _, capture = self._pending[0]
        with torch.no_grad():
            if self._trail.leads_to(received.detach()):
                _, heads, _, _, width = capture.shape
                self._settle(ProjectionSource(name, module, heads, width))

    def _settle(self, source: ProjectionSource | None = None) -> None:
        """Deliver what waits for its projection, found or not."""
        pending, self._pending, self._trail = self._pending, [], ContextTrail()
        if pending:
            self._projections.setdefault(pending[0][0].name, source)
        with torch.no_grad():
            for site, capture in pending:
                self._send(site, capture)

    def _send(self, site: Site, capture: Capture) -> None:
        source = self._projections[site.name]
        output, reason = source.read() if source is not None else (None, NOT_FOUND)
        capture = replace(capture, output=output, projection_reason=reason)
        with torch.autocast(capture.context.device.type, enabled=False):
            self._deliver(capture)

    def _capture(self, call: InterfaceCall, site: Site, layer: int) -> Capture:
        arguments = call.arguments
        query, key, value = (arguments[name].detach() for name in ("query", "key", "value"))
        context = call.context.detach()
        if context.dim() != 4 or context.shape[2] * context.shape[3] != (
            query.shape[1] * value.shape[3]
        ):
            raise CaptureError(
                f"{site.name}: the attention function returned {list(context.shape)} where "
                f"[B, Q, H, D] was expected for query {list(query.shape)}."
            )
        context = context.transpose(1, 2)
        query = query.expand(context.shape[0], -1, -1, -1)
        key, value = (t.expand(context.shape[0], -1, -1, -1) for t in (key, value))
        masking = self._masking(call, query, key)
        if masking.causal:
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        scaling = arguments.get("scaling")
        return Capture(
            site=site.name,
            layer=layer,
            stack=site.stack,
            kind=site.kind,
            call=self._order.count(site, layer),
            query=query,
            grouped_key=key,
            grouped_value=value,
            context=context,
            masking=masking,
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            dropout=float(arguments.get("dropout") or 0.0),
            softcap=arguments.get("softcap"),
            sinks=_sinks(arguments),
            implementation=call.implementation,
        )

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

    def _forget(self) -> None:
        self._clear()
        self._running.clear()
        self._projections.clear()


class _LayerOrder:
    """Which layer an invocation is: by call where modules are shared, else by module."""

    def __init__(self) -> None:
        self._invoked: set[str] = set()
        self._repeating: set[str] = set()
        self._layer: dict[str, int] = {}  # stack → layer of its latest invocation
        self._calls: Counter[tuple[str, int]] = Counter()

    def restart(self, root: nn.Module) -> None:
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

    def layer(self, site: Site) -> int:
        """Layer of the invocation that is running."""
        return self._layer.get(site.stack, site.layer)

    def count(self, site: Site, layer: int) -> int:
        """Number of earlier calls of the same layer in this forward; counts this one."""
        index = self._calls[site.stack, layer]
        self._calls[site.stack, layer] += 1
        return index


def _sinks(arguments: dict[str, Any]) -> Tensor | None:
    sinks = arguments.get("s_aux")
    sinks = arguments.get("sinks") if sinks is None else sinks
    return None if sinks is None else sinks.detach()


def _replaying() -> bool:
    """Whether this runs inside a backward pass: gradient checkpointing replays forwards there."""
    return torch._C._current_graph_task_id() != -1


def _on_exit(stack: ExitStack, handle: torch.utils.hooks.RemovableHandle) -> None:
    stack.callback(handle.remove)
