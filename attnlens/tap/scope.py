"""Where and when attention outside the interface is traced.

The first forward pass with a given kind of input is a discovery: every module is followed, and
the innermost module that contains both a softmax and its product is an attention site. What was
found is remembered per model structure, so that later passes, and later lenses, trace only
inside those modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnlens.tap import tracing
from attnlens.tap.hooks import Hook, replaying
from attnlens.tap.multihead import takes_fused_path
from attnlens.tap.tracing import AttentionTrace, Event, SeenProduct

Signature = tuple[object, ...]

_remembered: dict[Signature, frozenset[str]] = {}  # names of attention modules


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
        self._attending: set[str] = set()  # names of the modules in which attention was heard
        self._model = model
        self._modules = dict(model.named_modules())
        self._structure = _structure(model)
        self._heard = heard
        self._replays = replays
        self._path: list[Frame] = []
        self._trace = AttentionTrace(self._event, linear, lambda: tuple(self._path))
        self._handles: list[RemovableHandle] = []
        self._followed: frozenset[str] | None = None
        self._signature: Signature | None = None

    def begin(self, inputs: Signature) -> None:
        """Prepare for a forward pass: follow the known modules, or all of them to discover.

        Args:
            inputs: what kind of input the pass gets; another kind may take other paths.
        """
        self.stop()
        self._signature = (self._structure, *inputs)
        sites = _remembered.get(self._signature)
        followed = frozenset(self._modules) if sites is None else self._with_guards(sites)
        if followed != self._followed:
            self._follow(followed)
        if sites is None:
            self._push("", self._model)

    def end(self, completed: bool) -> None:
        """Close a forward pass; after a discovery, remember what was found.

        Args:
            completed: whether the forward returned. One that raised has not shown every module,
                so nothing is remembered of it.
        """
        if completed and self._signature is not None and self._signature not in _remembered:
            _remembered[self._signature] = frozenset(self._attending | self.fused)
        self.stop()

    def stop(self) -> None:
        """Stop tracing and forget what was being followed."""
        tracing.remove(self._trace)
        self._path.clear()
        self._trace.forget()

    def detach(self) -> None:
        """Stop, and remove every hook."""
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._handles, self._followed = [], None

    def _with_guards(self, sites: frozenset[str]) -> frozenset[str]:
        """Sites, if there are any, and the modules inside which tracing must pause."""
        guards = (n for n, m in self._modules.items() if isinstance(m, nn.MultiheadAttention))
        return sites.union(guards) if sites else sites

    def _follow(self, names: frozenset[str]) -> None:
        self.detach()
        for name in names:
            if not name:
                continue  # the root of a discovery is pushed by begin()
            module = self._modules[name]
            enter = Hook(partial(self._enter, name))
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(Hook(self._leave), always_call=True))
        self._followed = names

    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._signature is not None and (self._replays or not replaying()):
            self._push(name, module, args, kwargs)

    def _push(self, name: str, module: nn.Module, args: Any = (), kwargs: Any = None) -> None:
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
