"""Gradients of the loss with respect to contexts, from the user's own backward pass.

A tensor hook on the context that the model goes on with is all it takes; the hook goes when the
graph does. Under reentrant gradient checkpointing the forward pass has no graph. The context that
takes part in the backward pass then appears when the layer is replayed, and what the forward pass
knew of the call (which layer it was) waits until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from attnlens.capture import Capture
from attnlens.errors import CaptureError
from attnlens.tap.hooks import unobserved

DeliverGradient = Callable[[Capture, Tensor], None]

# Forward passes per site that may wait for a replay; those that never get one are pushed out.
_MOST_WAITING = 64


@dataclass(frozen=True, eq=False)
class LiveContext:
    """The context as the model goes on with it.

    Attributes:
        tensor: in the graph, in the model's own layout.
        arrange: brings a tensor of that layout to `[B, H, Q, D]`.
    """

    tensor: Tensor
    arrange: Callable[[Tensor], Tensor]


class Gradients:
    """Deliver the gradient of each context that has one.

    Args:
        deliver: called in the backward pass with the capture and `∂L/∂O`, `[B, H, Q, D]`.

    Attributes:
        delivered: whether any gradient arrived yet.
    """

    def __init__(self, deliver: DeliverGradient) -> None:
        self.delivered = False
        self._deliver = deliver
        self._hooks: WeakSet[_GradientHook] = WeakSet()
        self._waiting: dict[str, deque[deque[Capture]]] = {}

    def follow(self, capture: Capture, live: LiveContext) -> bool:
        """Deliver the gradient of a context when it comes.

        Args:
            capture: what is delivered with it, but for all activations except the context.
            live: the context that is hooked.

        Returns:
            Whether the context is in a graph; otherwise nothing happens.
        """
        if not live.tensor.requires_grad:
            return False
        hook = _GradientHook(_context_only(capture), live.arrange, self._arrived)
        register: Callable[..., Any] = live.tensor.register_hook
        hook.handle = register(hook)
        self._hooks.add(hook)
        return True

    def expect(self, capture: Capture, first: bool) -> None:
        """Wait for a replay of a call that ran without a graph; a frozen one never gets any.

        Args:
            capture: of the call.
            first: whether it is the first of its module's invocation.
        """
        waiting = self._waiting.setdefault(capture.site, deque(maxlen=_MOST_WAITING))
        if first or not waiting:
            waiting.append(deque())
        meta = capture.context.to("meta")
        waiting[-1].append(replace(_context_only(capture), context=meta))

    def replayed(self, site: str, live: Callable[[], LiveContext]) -> None:
        """Follow the context of a call that is replayed, if such a call is waited for.

        Args:
            site: name of the attention module.
            live: finds the context of the replay.
        """
        waiting = self._waiting.get(site)
        if not waiting:
            return
        capture = waiting[-1].popleft()  # invocations replay last to first
        if not waiting[-1]:
            waiting.pop()
        replay = live()
        with unobserved():
            context = replay.arrange(replay.tensor.detach())
        self.follow(replace(capture, context=context), replay)

    def close(self) -> None:
        """Take every hook off its tensor and wait for nothing more."""
        for hook in list(self._hooks):
            hook.handle.remove()
        self._hooks.clear()
        self._waiting.clear()

    def _arrived(self, capture: Capture, gradient: Tensor) -> None:
        self.delivered = True
        self._deliver(capture, gradient)


class _GradientHook:
    """A tensor hook; it alone keeps its handle, so that both live as long as the tensor's graph."""

    handle: Any

    def __init__(
        self, capture: Capture, arrange: Callable[[Tensor], Tensor], deliver: DeliverGradient
    ) -> None:
        self._capture = capture
        self._arrange = arrange
        self._deliver = deliver
        self._version = capture.context._version

    def __call__(self, gradient: Tensor) -> None:
        capture = self._capture
        if capture.context._version != self._version:
            raise CaptureError(
                f"{capture.site} changed its context in place, so the product of the context with "
                f"its gradient is lost. Leave this layer out with layers=."
            )
        with unobserved(), torch.autocast(gradient.device.type, enabled=False):
            self._deliver(capture, self._arrange(gradient.detach()))


def _context_only(capture: Capture) -> Capture:
    """A call that keeps no activation but its context alive; of the values only the shape stays."""
    values = capture.grouped_value.to("meta")
    return replace(capture, grouped_value=values, query=None, grouped_key=None, observed=None)
