"""Tap on transformers' attention dispatch.

While at least one lens is active, `AttentionInterface.get_interface` (and indexing, which
remote code uses) returns the attention function wrapped, so that a listener sees the arguments
and the result of each call of its own modules. The model's implementation, config and masks stay
as they are, and other modules run the same function with the same arguments.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from attnlens.tap.hooks import is_suspended
from attnlens.tap.passing import by_name
from attnlens.tap.shared import SharedSetting, ThreadDepth, replaced


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """One call of an attention function, as it happened.

    Attributes:
        module: the attention module.
        implementation: `"eager"`, `"sdpa"`, ...
        arguments: every argument by name.
        context: the first result, `[B, Q, H, D]`.
    """

    module: nn.Module
    implementation: str
    arguments: dict[str, Any]
    context: Tensor

    @property
    def is_causal(self) -> bool:
        """The causal rule as the implementations resolve it; eager attention has none."""
        if self.implementation == "eager":
            return False
        given = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if given is None else given)


Listener = Callable[[InterfaceCall], None]

_lock = threading.Lock()
_running = ThreadDepth()
_listeners: dict[int, tuple[Listener, ...]] = {}


@contextmanager
def listen(modules: Iterable[nn.Module], listener: Listener) -> Iterator[None]:
    """Hand every attention call of some modules to a listener, in the thread of the call."""
    identities = [id(module) for module in modules]
    with _wrapped.held():
        with _lock:
            for identity in identities:
                _listeners[identity] = (*_listeners.get(identity, ()), listener)
        try:
            yield
        finally:
            with _lock:
                for identity in identities:
                    others = _listeners.pop(identity)
                    rest = tuple(other for other in others if other is not listener)
                    if rest:
                        _listeners[identity] = rest


def running() -> bool:
    """Tell whether an attention function of the interface is running in this thread."""
    return bool(_running)


@contextmanager
def _wrapping() -> Iterator[None]:
    """Let both ways to an attention function lead to it wrapped."""
    interface: Any = AttentionInterface
    named, indexed = interface.get_interface, interface.__getitem__

    def get_interface(self: AttentionInterface, implementation: str, default: Any) -> Any:
        function = named(self, implementation, default)
        eager = implementation in (None, "eager") or function is default
        return _watched(function, "eager" if eager else implementation)

    def getitem(self: AttentionInterface, implementation: str) -> Any:
        return _watched(indexed(self, implementation), implementation)

    with (
        replaced(interface, "get_interface", get_interface),
        replaced(interface, "__getitem__", getitem),
    ):
        yield


_wrapped = SharedSetting(_wrapping)


def _watched(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Wrap an attention function so that listeners of the calling module hear of the call."""
    if hasattr(function, "_attnlens_original"):
        function = function._attnlens_original

    @functools.wraps(function)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _running.entered():
            result = function(module, *args, **kwargs)
        listeners = _listeners.get(id(module))
        if listeners and not is_suspended():
            arguments = _by_name(function, module, args, kwargs)
            call = InterfaceCall(module, implementation, arguments, result[0])
            for listener in listeners:
                listener(call)
        return result

    watched._attnlens_original = function  # type: ignore[attr-defined]
    return watched


def _by_name(
    function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Bind positional arguments; what follows the mask has no common order."""
    names = ("query", "key", "value", "attention_mask")
    given = by_name(function, (module, *args), kwargs) if len(args) > len(names) else kwargs
    return {**given, **dict(zip(names, args, strict=False))}
