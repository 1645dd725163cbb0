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
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from attnlens.tap.hooks import is_suspended
from attnlens.tap.passing import by_name
from attnlens.tap.shared import SharedSetting, replaced
from attnlens.tap.tracing import AttentionTrace, Event, in_interface

# What transformers registers itself; a name of someone else's may follow other conventions.
_OWN = frozenset({"eager", *AttentionInterface._global_mapping})


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """One call of an attention function, as it happened.

    Attributes:
        module: the attention module.
        implementation: `"eager"`, `"sdpa"`, ...
        arguments: every argument by name.
        context: the first result, `[B, Q, H, D]`.
        function: the attention function.
        events: the softmax·V products that ran inside it, if it is not one of transformers' own,
            for which alone the arguments are known to say what runs; else None.
    """

    module: nn.Module
    implementation: str
    arguments: dict[str, Any]
    context: Tensor
    function: Callable[..., Any]
    events: list[Event] | None = None

    @property
    def is_causal(self) -> bool:
        """The causal rule as the implementations resolve it; eager attention has none."""
        if self.implementation == "eager":
            return False
        given = self.arguments.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if given is None else given)


Listener = Callable[[InterfaceCall], None]

_lock = threading.Lock()
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


@contextmanager
def _wrapping() -> Iterator[None]:
    """Let every way to an attention function lead to it wrapped, whoever laid the way."""
    interface: Any = AttentionInterface
    instance: Any = ALL_ATTENTION_FUNCTIONS
    named, indexed = interface.get_interface, interface.__getitem__

    def get_interface(self: AttentionInterface, implementation: str, default: Any) -> Any:
        return _named(named, self, implementation, default)

    def getitem(self: AttentionInterface, implementation: str) -> Any:
        return _watched(indexed(self, implementation), implementation)

    with ExitStack() as stack:
        stack.enter_context(replaced(interface, "get_interface", get_interface))
        stack.enter_context(replaced(interface, "__getitem__", getitem))
        if "get_interface" in vars(instance):  # which the class's does not reach
            own = vars(instance)["get_interface"]
            named_here = functools.partial(_named, lambda _, *args: own(*args), instance)
            stack.enter_context(replaced(instance, "get_interface", named_here))
        yield


def _named(
    named: Callable[..., Any], interface: AttentionInterface, implementation: str, default: Any
) -> Any:
    function = named(interface, implementation, default)
    eager = implementation in (None, "eager") or function is default
    return _watched(function, "eager" if eager else implementation)


_wrapped = SharedSetting(_wrapping)


def _watched(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Wrap an attention function so that listeners of the calling module hear of the call."""
    if hasattr(function, "_attnlens_original"):
        function = function._attnlens_original

    is_own = implementation in _OWN and function.__module__.startswith("transformers.")

    @functools.wraps(function)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listeners = () if is_suspended() else _listeners.get(id(module), ())
        events = None if is_own or not listeners else list[Event]()
        with in_interface.entered(), nullcontext() if events is None else _inside(events):
            result = function(module, *args, **kwargs)
        if listeners:
            arguments = _by_name(function, module, args, kwargs)
            call = InterfaceCall(module, implementation, arguments, result[0], function, events)
            for listener in listeners:
                listener(call)
        return result

    watched._attnlens_original = function  # type: ignore[attr-defined]
    return watched


def _inside(events: list[Event]) -> AttentionTrace:
    """Collect the softmax·V products that run in a block."""
    return AttentionTrace(events.append, lambda *_: None, lambda: None, everywhere=True)


def _by_name(
    function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Bind positional arguments; what follows the mask has no common order."""
    names = ("query", "key", "value", "attention_mask")
    given = by_name(function, (module, *args), kwargs) if len(args) > len(names) else kwargs
    return {**given, **dict(zip(names, args, strict=False))}
