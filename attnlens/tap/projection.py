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
from attnlens.tap.hooks import Hook

LINEAR = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)
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


class ContextTrail:
    """The contexts of one site invocation, on their way to their output projections.

    Contexts are copies: a model may change its own in place, and then it is no longer `A V` that
    W_O receives.
    """

    def __init__(self) -> None:
        self._contexts: list[Tensor] = []  # [B, H, Q, D]
        self._found: dict[int, ProjectionSource] = {}

    def add(self, context: Tensor) -> None:
        """Follow one more context.

        Args:
            context: `[B, H, Q, D]`, a copy.
        """
        self._contexts.append(context)

    def arrive(self, name: str, module: nn.Module, received: Tensor) -> bool:
        """Compare the input of a linear module with the contexts.

        Tokens may come in any order, so that sequence-major layouts, unfolded windows and the
        concatenation of packed sequences are recognised; features must be heads × width.

        Args:
            name: the module's name.
            module: the module.
            received: its first argument.

        Returns:
            True once every context has found its projection.
        """
        open_ = [i for i in range(len(self._contexts)) if i not in self._found]
        groups = [[i] for i in open_] if len(open_) < 2 else [open_, *([i] for i in open_)]
        for group in groups:
            if _same_rows(received, [self._contexts[i] for i in group]):
                _, heads, _, width = self._contexts[group[0]].shape
                source = ProjectionSource(name, module, heads, width)
                self._found.update(dict.fromkeys(group, source))
                break
        return len(self._found) == len(self._contexts)

    def projections(self) -> Projections:
        """Return what was found for this invocation, to be used again for later ones."""
        sources = {self._found.get(i) for i in range(len(self._contexts))}
        joined = sources.pop() if len(sources) == 1 else None
        return Projections(dict(self._found), joined)


class Projections:
    """W_O of a site: one for each product of an invocation, or one for all of them.

    Args:
        single: source by position in the invocation.
        joined: the source of every product, where they share it.
    """

    def __init__(
        self, single: dict[int, ProjectionSource], joined: ProjectionSource | None
    ) -> None:
        self._single = single
        self._joined = joined

    def read(self, ordinal: int) -> tuple[OutputProjection | None, str]:
        """Return the projection of the n-th product of an invocation.

        Args:
            ordinal: position in the invocation.

        Returns:
            The projection and an empty string, or None and why there is none.
        """
        source = self._joined or self._single.get(ordinal)
        return (None, NOT_FOUND) if source is None else source.read()


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module can be an output projection.

    Args:
        module: any module.

    Returns:
        True for linear and convolution layers, also wrapped or quantised ones.
    """
    if isinstance(module, LINEAR) or hasattr(module, "base_layer"):
        return True
    if not type(module).__name__.endswith("Linear"):
        return False
    # A wrapper with state of its own (clipping bounds, scales) may change what it passes on;
    # one without is looked through.
    wraps = any(isinstance(child, LINEAR) for child in module.children())
    stateful = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not wraps or bool(stateful)


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
            # First in line: other hooks may replace the input, as those that mask heads do.
            yield module.register_forward_pre_hook(Hook(hook_for(name)), prepend=True)


def weight_owners(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Map the identity of each parameter to a module that has it as its weight.

    Args:
        model: the model.

    Returns:
        `id(parameter) → (qualified name, module)`; a bare parameter that is a weight by use only,
        as in XLNet, gets a module of its own.
    """
    owners: dict[int, tuple[str, nn.Module]] = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf != "weight":
            owner, module = name, nn.Module()
            module.weight = parameter
        owners[id(parameter)] = (owner, module)
    return owners


def _same_rows(received: Tensor, contexts: list[Tensor]) -> bool:
    """Whether an input holds the token rows `[H·D]` of the contexts, all and only, in any order."""
    features = contexts[0].shape[1] * contexts[0].shape[3]
    if received.numel() != sum(context.numel() for context in contexts):
        return False
    if received.dtype != contexts[0].dtype or received.dim() < 2:
        return False
    if received.shape[-1] != features:
        if received.shape[1] != features:
            return False
        received = received.movedim(1, -1)  # channels first
    rows = torch.cat([c.transpose(1, 2).reshape(-1, features) for c in contexts])
    other = received.reshape(-1, features)
    if torch.equal(rows, other):
        return True
    return torch.equal(_sorted_rows(rows), _sorted_rows(other))


def _sorted_rows(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort(stable=True)]
