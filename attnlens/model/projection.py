"""Find W_O by following the context: the linear module whose input *is* the attention output.

Names do not tell (`dense`, `out_proj`, `o_proj`, `proj`, ...), the tensors do. A module is W_O
when it receives the context unchanged, in the context's own memory or value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnlens.capture import OutputProjection

NOT_FOUND = (
    "no linear module received the context unchanged: something sits between the attention "
    "product and the output projection"
)


class ProjectionSource:
    """A module found to be W_O, read afresh whenever its weight has changed."""

    def __init__(self, name: str, module: nn.Module, heads: int, width: int) -> None:
        self.name = name
        self.module = module
        self.heads = heads
        self.width = width
        self._current: OutputProjection | None = None
        self._read_at: tuple[int, int] | None = None

    def read(self) -> tuple[OutputProjection | None, str]:
        """Return the per-head H as it is now, or None and the reason.

        Returns:
            The projection and an empty string, or None and why there is none.
        """
        weight = getattr(self.module, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            kind = type(self.module).__name__
            return None, f"{self.name} ({kind}) has no floating-point weight to slice into heads"
        stamp = (weight.data_ptr(), -1 if weight.is_inference() else weight._version)
        if self._current is None or stamp != self._read_at:
            matrix = weight.detach()
            if not isinstance(self.module, Conv1D):
                matrix = matrix.flatten(1).T
            per_head = matrix.reshape(self.heads, self.width, -1)
            bias = getattr(self.module, "bias", None)
            bias = bias.detach() if isinstance(bias, Tensor) else None
            self._current = OutputProjection(self.name, per_head, bias)
            self._read_at = stamp
        return self._current, ""


class ContextTrail:
    """The contexts of one site invocation that have not reached their projection yet."""

    def __init__(self) -> None:
        self.contexts: list[Tensor] = []  # [B, Q, H, D]

    def leads_to(self, received: Tensor) -> bool:
        """Tell whether a linear module's input is the context, unchanged.

        Args:
            received: the module's first argument.

        Returns:
            True if it is the same memory, or equal value by value, also in sequence-major
            layout, or as the concatenation of the calls of packed sequences.
        """
        elements = sum(context.numel() for context in self.contexts)
        if not elements or received.numel() != elements:
            return False
        first = self.contexts[0]
        features = first.shape[-1] * first.shape[-2]
        if received.shape[-1] != features:
            return False
        if len(self.contexts) == 1:
            flat = first.reshape(*first.shape[:2], features)
            if _same_memory(received, flat) or _equal(received, flat):
                return True
            return _equal(received, flat.transpose(0, 1))
        joined = torch.cat([c.reshape(-1, features) for c in self.contexts])
        return _equal(received, joined)


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module can be an output projection.

    Args:
        module: any module.

    Returns:
        True for linear and convolution layers, also wrapped or quantised ones.
    """
    if isinstance(module, (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)):
        return True
    return hasattr(module, "base_layer") or type(module).__name__.endswith("Linear")


def linear_hooks(
    model: nn.Module, received: Callable[[str, nn.Module, Tensor], None]
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Report the input of every linear module while the hooks live.

    Args:
        model: the model to watch.
        received: called with the module's name, the module and its first argument.

    Yields:
        One handle per module, as soon as it is registered; the caller removes them.
    """

    def hook_for(name: str) -> Callable[[nn.Module, Sequence[Any]], None]:
        def hook(module: nn.Module, args: Sequence[Any]) -> None:
            if args and isinstance(args[0], Tensor):
                received(name, module, args[0])

        return hook

    for name, module in model.named_modules():
        if is_linear(module):
            yield module.register_forward_pre_hook(hook_for(name))


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return (
        left.is_contiguous()
        and right.is_contiguous()
        and left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
    )


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.reshape(right.shape), right)
