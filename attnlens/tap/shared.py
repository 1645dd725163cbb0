"""State that several lenses or threads share: settings of the process, and depths of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

_ABSENT = object()


class SharedSetting:
    """A setting that is on while at least one holder needs it, from whatever thread.

    Args:
        switch: returns what is entered when the first holder arrives, and left with the last.
    """

    def __init__(self, switch: Callable[[], AbstractContextManager[Any]]) -> None:
        self._switch = switch
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._on = ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the setting for the duration of a block."""
        holder = object()
        try:
            with self._lock:
                first = not self._holders
                self._holders.add(holder)
                if first:
                    self._on.enter_context(self._switch())
            yield
        finally:
            with self._lock:
                self._holders.discard(holder)
                if not self._holders:
                    self._on.close()


class ThreadDepth:
    """How many blocks of a kind this thread is inside; true while it is inside one."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def __bool__(self) -> bool:
        return getattr(self._thread, "depth", 0) > 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for the duration of a block."""
        before = getattr(self._thread, "depth", 0)
        try:
            self._thread.depth = before + 1
            yield
        finally:
            self._thread.depth = before


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute for a block; afterwards it has, or inherits, the former.

    What someone else put in its place meanwhile stays.
    """
    former = vars(owner).get(name, _ABSENT)
    try:
        setattr(owner, name, value)
        yield
    finally:
        if vars(owner).get(name) is not value:
            pass
        elif former is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, former)
