"""State that several lenses or threads share: settings of the process, and depths of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SharedSetting:
    """A setting switched on while at least one holder needs it, from whatever thread.

    Args:
        switch_on: called when the first holder arrives.
        switch_off: called when the last holder leaves.
    """

    def __init__(self, switch_on: Callable[[], None], switch_off: Callable[[], None]) -> None:
        self._switch_on = switch_on
        self._switch_off = switch_off
        self._lock = threading.Lock()
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the setting for the duration of a block.

        Yields:
            Nothing.
        """
        with self._lock:
            if not self._holders:
                self._switch_on()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._switch_off()


class ThreadDepth:
    """How many blocks of a kind this thread is inside; true while it is inside one."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def __bool__(self) -> bool:
        return getattr(self._thread, "depth", 0) > 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for the duration of a block.

        Yields:
            Nothing.
        """
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread.depth -= 1
