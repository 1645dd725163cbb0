"""The arguments of a module's call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def by_name(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call as the module's signature does.

    Args:
        module: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The arguments by name; the keyword arguments alone where they do not fit the signature.
    """
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return dict(kwargs)
    return {
        name: value
        for key, given in bound.items()
        for name, value in (given.items() if key == "kwargs" else [(key, given)])
    }
