"""Process-wide settings that several lenses hold at once: on with the first, off with the last."""

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
