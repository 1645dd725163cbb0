"""Where and when attention outside the interface is traced.

The first forward pass with a given kind of input is a discovery: every module is followed, and
the innermost module that contains both a softmax and its product is an attention site. What was
found is remembered for as long as the model lives, so that later passes, and later lenses, trace
only inside those modules and such as have never run.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from attnlens.tap import tracing
from attnlens.tap.hooks import Hook, replaying
from attnlens.tap.interrupts import uninterrupted
from attnlens.tap.multihead import takes_fused_path
from attnlens.tap.sites import stack_of
from attnlens.tap.tracing import AttentionTrace, Event, SeenProduct

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never run

Signature = tuple[object, ...]


@dataclass(slots=True, eq=False)
class _Known:
    """What forward passes of a kind have shown, by names of modules.

    Attributes:
        attending: those that ran attention.
        idle: those that ran none.
        followed: those that are followed from now on.
    """

    attending: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    followed: frozenset[str] = frozenset()


_remembered: MutableMapping[nn.Module, dict[Signature, _Known]] = WeakIdKeyDictionary()


@dataclass(slots=True, eq=False)
class Frame:
    """One running invocation of a followed module.

    Attributes:
        name: qualified name of the module.
        paused: whether tracing is off inside it.
        entered: whether its layer was already counted.
    """

    name: str
    module: nn.Module
    paused: bool = False
    entered: bool = False


class TraceScope:
    """Follow the modules that may hold attention, and trace while one of them runs.

    Args:
        model: the model that runs.
        heard: called with the innermost frame that contains an event, and the event.
        linear: called with input and weight of every linear function inside.
        replays: trace also where gradient checkpointing runs a module again.

    Attributes:
        fused: names of modules that ran torch's fused attention, which cannot be seen.
    """

    def __init__(
        self,
        model: nn.Module,
        heard: Callable[[Frame, Event], None],
        linear: Callable[[Tensor, Tensor], None],
        replays: bool = False,
    ) -> None:
        self.fused: set[str] = set()
        self._ran: set[str] = set()
        self._attending: set[str] = set()  # names of the modules in which attention was heard
        self._model = model
        self._modules = dict(model.named_modules())
        self._structure = _structure(model)
        self._heard = heard
        self._replays = replays
        self._path: list[Frame] = []
        self._trace = AttentionTrace(self._event, linear, lambda: tuple(self._path))
        self._removals: list[Callable[[], None]] = []
        self._followed: frozenset[str] | None = None
        self._signature: Signature | None = None

    def begin(self, inputs: Signature) -> None:
        """Prepare for a forward pass: follow the known modules, or all of them to discover.

        Args:
            inputs: what kind of input the pass gets; another kind may take other paths.
        """
        self.stop()
        self._signature = (self._structure, *inputs)
        known = _remembered.get(self._model, {}).get(self._signature)
        followed = frozenset(self._modules) if known is None else known.followed
        if followed != self._followed:
            with uninterrupted():
                self._follow(followed)
        if known is None:
            self._push("", self._model)

    def end(self, completed: bool) -> None:
        """Close a forward pass, and remember what it showed.

        Modules that it did not run, such as dropped layers, will be followed again.

        Args:
            completed: whether the forward returned. One that raised may have been stopped before
                a module ran its attention, so nothing is remembered of it.
        """
        if completed and self._signature is not None:
            self._remember(self._signature)
        self.stop()

    def never_ran(self) -> list[str]:
        """Name the modules that did not run, but differ by index only from some with attention."""
        stacks = {stack_of(name) for name in self._attending}
        ways = _remembered.get(self._model, {}).values()
        ran = self._ran.union(*(known.idle for known in ways))
        return [name for name in self._modules if stack_of(name) in stacks and name not in ran]

    def stop(self) -> None:
        """Stop tracing and forget what was being followed."""
        self._signature = None
        tracing.remove(self._trace)
        self._path.clear()
        self._trace.forget()

    def detach(self) -> None:
        """Stop, and remove every hook."""
        self.stop()
        self._unfollow()

    def _remember(self, signature: Signature) -> None:
        known = _remembered.setdefault(self._model, {}).setdefault(signature, _Known())
        known.attending |= self._attending | self.fused
        known.idle |= self._ran - known.attending
        followed = {
            name
            for name in self._modules
            if name not in known.idle and not isinstance(self._modules[name], _CONTAINERS)
        }
        if followed:  # inside these, tracing must pause
            followed |= {
                n for n, m in self._modules.items() if isinstance(m, nn.MultiheadAttention)
            }
        known.followed = frozenset(followed)

    def _unfollow(self) -> None:
        for remove in self._removals:
            remove()
        self._removals, self._followed = [], None

    def _follow(self, names: frozenset[str]) -> None:
        self._unfollow()
        for name in names:
            if not name:
                continue  # the root of a discovery is pushed by begin()
            module = self._modules[name]
            enter, leave = Hook(partial(self._enter, name)), Hook(self._leave)
            self._removals += [
                enter.attach(module.register_forward_pre_hook, with_kwargs=True),
                leave.attach(module.register_forward_hook, always_call=True),
            ]
        self._followed = names

    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._replays if replaying() else self._signature is not None:
            self._push(name, module, args, kwargs)

    def _push(self, name: str, module: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        self._ran.add(name)
        paused = isinstance(module, nn.MultiheadAttention) and takes_fused_path(
            module, args, kwargs or {}
        )
        if paused:
            self.fused.add(name)
            tracing.remove(self._trace)
        elif not self._path:
            tracing.push(self._trace)
        self._path.append(Frame(name, module, paused))

    def _leave(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        ignored = replaying() and not self._replays
        if ignored or not any(frame.module is module for frame in self._path):
            return
        while (frame := self._path.pop()).module is not module:
            continue
        if frame.paused and self._path:
            tracing.push(self._trace)
        if not self._path:
            tracing.remove(self._trace)
            self._trace.forget()

    def _event(self, event: Event) -> None:
        path: Sequence[Frame] = self._path
        if isinstance(event, SeenProduct):
            shared = zip(path, event.softmax_token, strict=False)
            path = [here for here, there in shared if here is there]
        if path:
            self._attending.add(path[-1].name)
            self._heard(path[-1], event)


def _structure(model: nn.Module) -> Signature:
    """What makes two models alike for discovery: module names, classes and implementations."""
    modules = tuple((name, type(module)) for name, module in model.named_modules())
    config = getattr(model, "config", None)
    return modules, getattr(config, "_attn_implementation", None)
