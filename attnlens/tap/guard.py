"""What becomes of an error inside a model's own forward or backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Guard:
    """Raise errors where they happen, or keep the first and let the model go on unobserved.

    Args:
        raising: whether to raise.

    Attributes:
        error: the error that was kept; from then on nothing that is guarded runs.
    """

    def __init__(self, raising: bool) -> None:
        self.error: Exception | None = None
        self._raising = raising

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Guard a function, which returns None once something failed.

        Args:
            function: what may fail.

        Returns:
            The guarded function; the function itself where errors are raised.
        """
        if self._raising:
            return function

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.error is not None:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.error = error
                return None

        return guarded
