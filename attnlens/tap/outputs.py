"""What models and their modules return, as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


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
