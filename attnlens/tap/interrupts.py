"""All or nothing on entry, always off on exit: also where Ctrl-C comes in between."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a block has ended. Only the main thread is ever interrupted by it."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before in (None, signal.SIG_IGN):
        yield
        return
    arrived: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def attachment(attach: Callable[[ExitStack], None]) -> Generator[None]:
    """Attach something to a model, and take it off when the generator closes or is dropped.

    Args:
        attach: registers everything with a stack, each with its removal.

    Yields:
        Once, when all is attached.
    """
    stack = ExitStack()
    try:
        with uninterrupted():
            attach(stack)
        yield
    finally:
        try:
            with uninterrupted():
                stack.close()
        finally:
            stack.close()  # an interrupt came before it could be held back


attached = contextmanager(attachment)
