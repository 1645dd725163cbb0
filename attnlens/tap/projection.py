"""W_O: the linear modules that may be it, and the per-head H read off the one that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnlens.capture import OutputProjection
from attnlens.tap.hooks import Hook, unheard
from attnlens.tap.trial import evaluating

# Largest error of the matrix that a module seems to be, relative to the largest output.
_LINEAR_ERROR = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_LINEAR = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)


class ProjectionSource:
    """A module found to be W_O, read afresh whenever its weight has changed.

    Args:
        name: qualified name in the model.
        module: the module of that name.
        heads: H.
        width: D.
    """

    def __init__(self, name: str, module: nn.Module, heads: int, width: int) -> None:
        self.name = name
        self.module = module
        self.heads = heads
        self.width = width
        self._current: OutputProjection | None = None
        self._read_at: tuple[Any, ...] | None = None

    def read(self, like: Tensor) -> tuple[OutputProjection | None, str]:
        """Return the per-head H as it is now.

        Args:
            like: a tensor of the dtype and on the device of what the module receives.

        Returns:
            The projection and an empty string, or None and why there is none.
        """
        if any(_mixes_adapters(hook) for hook in self.module._forward_pre_hooks.values()):
            return None, f"{self.name} applies another adapter to each example (adapter_names)"
        stamp = _stamp(self.module)
        if self._current is None or stamp != self._read_at:
            weight = self.module._parameters.get("weight")
            adapted = hasattr(self.module, "base_layer")
            if weight is not None and not adapted and is_plain(weight):
                matrix, bias = weight.detach(), getattr(self.module, "bias", None)
                if not isinstance(self.module, Conv1D):
                    matrix = matrix.flatten(1).T
            else:
                pushed = self._push_identity(like)
                if pushed is None:
                    kind = type(self.module).__name__
                    return None, (
                        f"{self.name} ({kind}) has no floating-point weight to slice into heads, "
                        f"and is no linear map of what it receives either"
                    )
                matrix, bias = pushed
            per_head = matrix.reshape(self.heads, self.width, -1)
            bias = bias.detach() if isinstance(bias, Tensor) else None
            self._current = OutputProjection(self.name, per_head, bias)
            self._read_at = stamp
        return self._current, ""

    def _push_identity(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Read the matrix `[H·D, M]` and bias of a module off what it makes of the identity.

        That is exact for adapters of every kind, for weights that are offloaded, and for weights
        that are quantised as long as what they are multiplied with is not.

        Args:
            like: a tensor of the dtype and on the device of what the module receives.

        Returns:
            Both, or None where the module is no linear map.
        """
        kinds = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        size = self.heads * self.width
        identity = torch.eye(size, dtype=next(kinds, like.dtype), device=like.device)
        generator = torch.Generator().manual_seed(0)
        trial = torch.randn(4, size, generator=generator).to(identity)
        try:
            # Not called as a module: hooks may replace what it receives, as those that mask do.
            # Tensors of a class of their own, such as quantised ones, say themselves what they do.
            with torch._C._EnableTorchFunction(), unheard(), evaluating(self.module):
                forward = self.module.forward
                for hook in self.module._forward_pre_hooks.values():
                    if type(hook).__module__.startswith("torch.nn.utils."):
                        hook(self.module, (trial,))  # computes the weight, as weight_norm does
                bias = forward(torch.zeros_like(identity[:1]))[0]
                matrix, expected = forward(identity) - bias, forward(trial)
            error = (trial @ matrix + bias - expected).abs().amax()
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
            return None
        linear = bool(error <= _LINEAR_ERROR[identity.dtype] * expected.abs().amax())
        return (matrix, bias) if linear else None


def is_plain(weight: Tensor) -> bool:
    """Tell whether a weight is an ordinary floating-point tensor with all of its values in it."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.is_floating_point()
        and not weight.is_meta
        and weight.dim() > 1
        and weight.untyped_storage().nbytes() >= weight.nbytes
    )


def _mixes_adapters(hook: Any) -> bool:
    """Whether this is the hook by which PEFT gives every example of a batch its own adapter."""
    return getattr(hook, "keywords", {}).get("adapter_names") is not None


def _stamp(module: Any) -> tuple[Any, ...]:
    """What differs whenever a module may have become another linear map."""
    tensors = (t for t in (*module.parameters(), *module.buffers()))
    versions = ((id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)
    names = ("active_adapters", "merged", "disable_adapters", "scaling")
    return (*versions, *(repr(getattr(module, name, None)) for name in names))


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is linear or a convolution, wrapped or quantised ones included."""
    if isinstance(module, _LINEAR) or hasattr(module, "base_layer"):
        return True
    if not type(module).__name__.endswith("Linear"):
        return False
    # A wrapper with state of its own (clipping bounds, scales) may change what it passes on;
    # one without is looked through.
    wraps = any(isinstance(child, _LINEAR) for child in module.children())
    stateful = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not wraps or bool(stateful)


def linear_hooks(
    model: nn.Module, received: Callable[[str, nn.Module, Tensor], None]
) -> Iterator[Callable[[], None]]:
    """Report the input of every linear module while the hooks live.

    Args:
        model: the model to watch.
        received: called with the module's name, the module and its first argument.

    Yields:
        What removes each hook, as soon as it is registered.
    """

    def report(name: str, module: nn.Module, args: Sequence[Any]) -> None:
        if args and isinstance(args[0], Tensor):
            received(name, module, args[0])

    for name, module in model.named_modules():
        if is_linear(module):
            # First in line: other hooks may replace the input, as those that mask heads do.
            hook = Hook(partial(report, name))
            yield hook.attach(module.register_forward_pre_hook, prepend=True)
