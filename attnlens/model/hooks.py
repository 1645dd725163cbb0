"""Module hooks that stay with the module they were given to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook that does nothing in a copy of its module.

    A deep copy or a pickle of a model takes the hooks along; the lens is not theirs.

    Args:
        function: what the hook does.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook; what it returns replaces the module's input or output, None nothing."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> str:
        return "no_hook"


def no_hook(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""
