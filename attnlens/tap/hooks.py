"""Module hooks that stay with the module they were given to, and when they do not listen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attnlens.tap.shared import ThreadDepth

_suspended = ThreadDepth()


class Hook:
    """A hook that does nothing in a copy of its module, nor while :func:`suspended`.

    A deep copy or a pickle of a model takes the hooks along; the lens is not theirs.

    Args:
        function: what the hook does.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook."""
        if not is_suspended():
            self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_hook, ()


class Replacement(Hook):
    """A hook that replaces the module's input, also while :func:`suspended`.

    What it does is part of the model for as long as it is registered.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook and return what takes the input's place."""
        return self._function(*args, **kwargs)


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


@contextmanager
def unobserved() -> Iterator[None]:
    """Compute without gradients in a block, and without any mode seeing torch's functions."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield
