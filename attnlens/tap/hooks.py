"""Module hooks that stay with the module they were given to, and when they do not listen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import module_tracker
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from attnlens.tap.shared import ThreadDepth

_modes: Any = torch.overrides
_suspended = ThreadDepth()


class Hook:
    """A hook of the thread that made it.

    It does nothing in other threads, in a copy of its module, while :func:`suspended`, nor once it
    was removed, although torch calls a hook once more that is removed while a module runs. A deep
    copy or a pickle of a model takes the hooks along; the lens is not theirs.

    Args:
        function: what the hook does.
        elsewhere: what it does in other threads.
    """

    def __init__(
        self, function: Callable[..., Any], elsewhere: Callable[[], None] | None = None
    ) -> None:
        self._function: Callable[..., Any] | None = function
        self._elsewhere = elsewhere
        self._thread = threading.get_ident()

    def attach(
        self, register: Callable[..., RemovableHandle], **options: bool
    ) -> Callable[[], None]:
        """Register the hook.

        Args:
            register: a method of the module such as `register_forward_hook`.
            **options: of that method.

        Returns:
            What removes the hook.
        """
        handle = register(self, **options)

        def remove() -> None:
            self._function = self._elsewhere = None
            handle.remove()

        return remove

    @property
    def removed(self) -> bool:
        """Whether the hook was removed."""
        return self._function is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook."""
        function = self._function
        if function is None or is_suspended():
            return
        if threading.get_ident() == self._thread or _in_engine():
            function(*args, **kwargs)
        elif self._elsewhere is not None:
            self._elsewhere()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_hook, ()


@dataclass(frozen=True)
class Lifted:
    """The hooks of a module that were taken off for a while, in order."""

    table: dict[int, Any]
    hooks: dict[int, Any]

    def put_back(self) -> None:
        """Put those back that were not removed meanwhile."""
        later = dict(self.table)
        self.table.clear()
        removed = (i for i, hook in self.hooks.items() if hook.removed)
        self.table.update({**self.hooks, **later})
        for identity in removed:
            del self.table[identity]


def lifted(module: nn.Module) -> Iterator[Lifted]:
    """Take all hooks off a module and those inside it, or none where some are not of a lens.

    Args:
        module: about to run.

    Yields:
        What puts them back, for each table of hooks.
    """
    tables = [
        table
        for inner in module.modules()
        for table in (inner._forward_pre_hooks, inner._forward_hooks)
        if table
    ]
    if all(type(hook) is Hook for table in tables for hook in table.values()):
        for table in tables:
            hooks = dict(table)
            table.clear()
            yield Lifted(table, hooks)


class Replacement(Hook):
    """A hook that replaces the module's input, also while :func:`suspended`.

    What it does is part of the model for as long as it is registered.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook and return what takes the input's place."""
        return None if self._function is None else self._function(*args, **kwargs)


def no_hook(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _copied_hook() -> Callable[..., None]:
    return no_hook


@contextmanager
def suspended() -> Iterator[None]:
    """Let no lens hear what this thread runs in a block, such as a layer called again."""
    with _suspended.entered():
        yield


def is_suspended() -> bool:
    """Tell whether this thread is inside :func:`suspended`."""
    return bool(_suspended)


def replaying() -> bool:
    """Tell whether a backward pass runs this: gradient checkpointing replays forwards there."""
    return torch._C._current_graph_task_id() != -1


def _in_engine() -> bool:
    """Tell whether this is a thread of torch's own, in which it runs backward passes."""
    return replaying() and isinstance(threading.current_thread(), threading._DummyThread)


@contextmanager
def unobserved() -> Iterator[None]:
    """Compute without gradients in a block, and without any mode seeing what is computed."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _operators_unseen():
        yield


@contextmanager
def unheard() -> Iterator[None]:
    """Let modules run in a block without gradients, seen by no lens and by no mode of the user."""
    with (
        suspended(),
        _functions_unseen(),
        torch.no_grad(),
        _operators_unseen(),
        _calls_uncounted(),
    ):
        yield


@contextmanager
def _calls_uncounted() -> Iterator[None]:
    """Take the hooks off every module by which torch's own FlopCounterMode follows calls."""
    tables: list[dict[int, Any]] = [
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
    ]
    before = [dict(table) for table in tables]
    try:
        for table, hooks in zip(tables, before, strict=True):
            for identity, hook in hooks.items():
                if getattr(hook, "__module__", "") == module_tracker.__name__:
                    del table[identity]
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


@contextmanager
def _functions_unseen() -> Iterator[None]:
    """Take every mode that watches torch's functions off in a block; subclasses go on."""
    taken = []
    try:
        while _modes._len_torch_function_stack():
            taken.append(_modes._pop_mode())
        yield
    finally:
        for mode in reversed(taken):
            _modes._push_mode(mode)


def _operators_unseen() -> Any:
    """Take every mode that watches torch's operators off in a block, such as FlopCounterMode."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else ExitStack()
