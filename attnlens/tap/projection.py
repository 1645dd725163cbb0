"""W_O: the linear modules that may be it, and the per-head H read off the one that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnlens.capture import OutputProjection
from attnlens.tap.hooks import Hook

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
        self._read_at: tuple[int, int] | None = None

    def read(self) -> tuple[OutputProjection | None, str]:
        """Return the per-head H as it is now.

        Returns:
            The projection and an empty string, or None and why there is none.
        """
        if hasattr(self.module, "base_layer"):
            return self._read_adapted()
        weight = getattr(self.module, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            kind = type(self.module).__name__
            return None, f"{self.name} ({kind}) has no floating-point weight to slice into heads"
        stamp = (weight.data_ptr(), -1 if weight.is_inference() else weight._version)
        if self._current is None or stamp != self._read_at:
            self._current = self._sliced(self.module, weight.detach())
            self._read_at = stamp
        return self._current, ""

    def _read_adapted(self) -> tuple[OutputProjection | None, str]:
        """Read a PEFT layer: its base weight plus the active low-rank updates."""
        layer: Any = self.module
        base = layer.base_layer
        weight = getattr(base, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            return None, f"{self.name} adapts a layer without floating-point weight"
        matrix = weight.detach()
        active = [] if layer.merged or layer.disable_adapters else list(layer.active_adapters)
        for adapter in active:
            if adapter not in getattr(layer, "lora_A", {}):
                continue
            if getattr(layer, "use_dora", {}).get(adapter) or adapter in layer.lora_variant:
                return None, f"{self.name} has adapter {adapter!r}, which is not a fixed matrix"
            matrix = matrix + layer.get_delta_weight(adapter).detach()
        if not hasattr(layer, "lora_A") and active:
            kind = type(layer).__name__
            return None, f"{self.name} is adapted by {kind}, whose effective weight is not known"
        return self._sliced(base, matrix), ""

    def _sliced(self, module: nn.Module, matrix: Tensor) -> OutputProjection:
        """Cut `[M, H·D]` (transposed in `Conv1D`) into heads."""
        if not isinstance(module, Conv1D):
            matrix = matrix.flatten(1).T
        per_head = matrix.reshape(self.heads, self.width, -1)
        bias = getattr(module, "bias", None)
        bias = bias.detach() if isinstance(bias, Tensor) else None
        return OutputProjection(self.name, per_head, bias)


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
