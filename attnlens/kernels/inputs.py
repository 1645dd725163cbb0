"""Checks of the kernels' arguments, made once at the public boundary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlens.errors import InputError


def check_tensor(
    name: str, tensor: Tensor, letters: str, sizes: Sequence[int | None] = (), *, like: Tensor
) -> None:
    """Check that a floating-point tensor has four dimensions, the given sizes and a device.

    Args:
        name: the argument's name, for the message.
        tensor: the argument.
        letters: its shape in letters, for the message.
        sizes: the size that each dimension must have; None leaves it free.
        like: the tensor whose device it must share.

    Raises:
        InputError: if it is not so.
    """
    sizes = sizes or (None,) * 4
    fits = tensor.ndim == 4 and all(
        wanted is None or wanted == size for wanted, size in zip(sizes, tensor.shape, strict=False)
    )
    if not fits or not tensor.is_floating_point():
        wanted = ", ".join(
            letter if size is None else f"{letter}={size}"
            for letter, size in zip(letters.split(), sizes, strict=True)
        )
        raise InputError(
            f"{name} must be a floating-point tensor [{wanted}]. "
            f"Got {tensor.dtype} {list(tensor.shape)}"
        )
    if not tensor.numel():
        raise InputError(f"{name} is empty. Got shape {list(tensor.shape)}")
    check_device(name, tensor, like)


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    """Check that a tensor lies on the same device as another.

    Raises:
        InputError: if it does not.
    """
    if tensor.device != like.device:
        raise InputError(
            f"{name} is on {tensor.device}, the other tensors on {like.device}; move it there"
        )


def head_mask(name: str, mask: Tensor | None, sizes: tuple[int, int, int]) -> Tensor | None:
    """Check a token mask `[B, N]` or `[B, 1|H, N]`.

    Args:
        name: the argument's name, for the message.
        mask: boolean, True = real token; or None.
        sizes: B, H and N.

    Returns:
        The mask as a view `[B, H, N]`, or None.

    Raises:
        InputError: if it is not boolean or does not fit.
    """
    if mask is None:
        return None
    batch, heads, tokens = sizes
    shape = tuple(mask.shape)
    fits = shape in {(batch, tokens), (batch, 1, tokens), (batch, heads, tokens)}
    if mask.dtype != torch.bool or not fits:
        raise InputError(
            f"{name} must be boolean, [{batch}, {tokens}] or [{batch}, 1 or {heads}, {tokens}], "
            f"True = real token. Got {mask.dtype} {list(shape)}"
        )
    return (mask[:, None] if mask.ndim == 2 else mask).expand(sizes)


def broadcastable(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], *, boolean: bool
) -> Tensor | None:
    """Check a mask or bias that must broadcast to `[B, H, Q, K]` and give it four dimensions.

    Args:
        name: the argument's name, for the message.
        tensor: the mask or bias; or None.
        shape: B, H, Q and K.
        boolean: whether it must be boolean (a mask) or floating point (a bias).

    Returns:
        A view with four dimensions, the last of size K, the others full, or 1 where nothing
        depends on them; or None.

    Raises:
        InputError: if its type is wrong or it does not broadcast.
    """
    if tensor is None:
        return None
    right_type = tensor.dtype == torch.bool if boolean else tensor.is_floating_point()
    sizes = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    fits = len(sizes) == 4 and all(
        size in {1, full} for size, full in zip(sizes, shape, strict=True)
    )
    if not right_type or not fits:
        kind = "boolean, True = may attend," if boolean else "floating point"
        raise InputError(
            f"{name} must be {kind} and broadcast to {list(shape)}. "
            f"Got {tensor.dtype} {list(tensor.shape)}"
        )
    tensor = tensor[(None,) * (4 - tensor.ndim)]
    for dim in range(3):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.expand(*tensor.shape[:3], shape[3])
