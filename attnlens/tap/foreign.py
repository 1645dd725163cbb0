"""Attention functions that are not transformers' own: what they compute is not known but checked.

Whoever registers one may compute something else than softmax(QKᵀ)V of its arguments: another
temperature, a sigmoid, a gate on the result. At the first call the claim is checked. Where it does
not hold, A is the softmax that ran inside the function and met the values there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnlens.capture import Capture
from attnlens.errors import AttnLensError, UnsupportedAttentionError
from attnlens.tap.calls import capture_of_call, capture_of_event, live_of_call, live_of_event
from attnlens.tap.dispatch import InterfaceCall
from attnlens.tap.gradients import LiveContext
from attnlens.tap.masks import Maskings
from attnlens.tap.tracing import Event

# Largest |A·V − O| relative to the largest |O| that is rounding.
_ROUNDING = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


class ForeignFunctions:
    """Turn interface calls into captures, those of functions of unknown origin after a check."""

    def __init__(self) -> None:
        self._as_declared: dict[Callable[..., Any], bool] = {}

    def capture(self, call: InterfaceCall, site: str, maskings: Maskings) -> Capture:
        """Record a call of the attention interface.

        Args:
            call: what was called with what.
            site: name of the attention module.
            maskings: the masks of the forward pass so far.

        Returns:
            The capture, without layer and projection.

        Raises:
            UnsupportedAttentionError: if the function computes something else than softmax·V.
        """
        if call.events is None or self._as_declared.get(call.function):
            return capture_of_call(call, site, maskings)
        if call.function not in self._as_declared:
            capture = _declared(call, site, maskings)
            # Under dropout O is not A·V, so that the claim cannot be checked.
            if capture is not None and not capture.dropout:
                self._as_declared[call.function] = _holds(capture)
            if self._as_declared.get(call.function):
                assert capture is not None
                return capture
        return capture_of_event(_only_event(call, site), call.module, site)

    def live(self, call: InterfaceCall) -> LiveContext:
        """Find the context of a call in the graph, after it was recorded."""
        if call.events is None or self._as_declared.get(call.function):
            return live_of_call(call)
        return live_of_event(call.events[0], call.module)


def _declared(call: InterfaceCall, site: str, maskings: Maskings) -> Capture | None:
    """The call as its arguments say it was, if they say anything."""
    try:
        return capture_of_call(call, site, maskings)
    except (AttnLensError, KeyError, AttributeError, IndexError, RuntimeError):
        return None


def _holds(capture: Capture) -> bool:
    real = capture.real_rows[..., None]

    def rows(context: Tensor) -> Tensor:
        return torch.where(real, context, 0).nan_to_num()

    output = rows(capture.context)
    error = (rows(capture.attention() @ capture.value) - output).abs().amax()
    return bool(error <= _ROUNDING[output.dtype] * output.abs().amax())


def _only_event(call: InterfaceCall, site: str) -> Event:
    events = call.events or []
    if len(events) == 1:
        return events[0]
    name = getattr(call.function, "__name__", repr(call.function))
    what = "no product" if not events else f"{len(events)} products"
    raise UnsupportedAttentionError(
        f"{site} runs the attention function {name!r} ({call.implementation!r}), which does not "
        f"compute softmax(QKᵀ)V of its arguments, and {what} of a softmax with values ran inside "
        f"it, so A is not known. Leave this layer out with layers=, or use an attention "
        f"implementation of transformers."
    )
