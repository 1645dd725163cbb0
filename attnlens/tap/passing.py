"""What calls are given, by name, and what they return, as plain tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def by_name(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the arguments of a call as the signature of the function does.

    Args:
        function: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The arguments by name; the keyword arguments alone where they do not fit the signature.
    """
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call will complain in its own words
        return dict(kwargs)
    return {**bound, **bound.pop("kwargs", {})}


def output_tensors(output: Any) -> list[Tensor]:
    """Flatten what a model returned.

    Args:
        output: a tensor, a model output, or nested tuples, lists and mappings of them.

    Returns:
        The tensors in order.
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in output_tensors(part)]
    return []
