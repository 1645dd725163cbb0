"""The choice between the PyTorch and the Triton kernels."""

import os
from functools import cache
from importlib import import_module
from typing import Literal

import torch

from attnlens.errors import InputError

Backend = Literal["auto", "torch", "triton"]

# A Triton kernel keeps the head dimension, padded to a power of two, on the chip.
TRITON_WIDTH = 128


def resolve(
    backend: Backend,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    width: int = 1,
) -> Literal["torch", "triton"]:
    """Choose the backend of one call.

    Args:
        backend: `"auto"` takes Triton where it can run and PyTorch elsewhere.
        device: where the tensors are.
        dtype: their type; float64 is left to PyTorch.
        width: the largest head dimension or rank; above 128 is left to PyTorch.

    Returns:
        `"torch"` or `"triton"`.

    Raises:
        InputError: if the name is unknown, or Triton was asked for and cannot run this call.

    Examples:
        >>> resolve("auto", torch.zeros(1))
        'torch'
    """
    if backend not in {"auto", "torch", "triton"}:
        raise InputError(f"backend must be 'auto', 'torch' or 'triton'. Got {backend!r}")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch"
    obstacle = _obstacle(device, dtype, width)
    if obstacle is None:
        return "triton"
    if backend == "auto":
        return "torch"
    raise InputError(f"backend='triton' cannot be used: {obstacle}; use backend='torch' or 'auto'")


def _obstacle(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return why Triton cannot run a call, or None."""
    if not _triton_imports():
        return "Triton cannot be imported (pip install triton)"
    if device.type != "cuda" and not interpreting():
        return f"it needs CUDA tensors, these are on {device}"
    if dtype == torch.float64:
        return "its kernels do not take float64"
    if width > TRITON_WIDTH:
        return f"its kernels take at most {TRITON_WIDTH} columns per head, here {width}"
    return None


@cache
def _triton_imports() -> bool:
    try:
        import_module("triton")
    except ImportError:
        return False
    return True


def interpreting() -> bool:
    """Return whether Triton was told to interpret its kernels, which it then does on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}
