"""The forward passes of a model that are running, and which of them are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_iter

from attnlens.tap.hooks import unobserved
from attnlens.tap.passing import by_name
from attnlens.tap.sites import pretrained_models

Mode = Literal["train", "eval", "both"]


@dataclass(frozen=True, eq=False)
class Forward:
    """A running forward pass of a model, or of a pretrained one inside it.

    Attributes:
        arguments: what it was given, by name.
        batch: the first dimension of the first tensor it was given; None without any.
        padding: `[B, N]` bool, the real tokens as its attention mask has them, or None.
        path: what decides which way it takes: the class, the mode, and which inputs are given.
        has_graph: whether it began with gradients enabled.
    """

    arguments: Mapping[str, Any]
    batch: int | None
    padding: Tensor | None
    path: tuple[object, ...]
    has_graph: bool

    @classmethod
    def of(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], has_graph: bool
    ) -> Forward:
        """Describe a forward pass that begins.

        Args:
            module: what is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            has_graph: whether gradients are enabled.

        Returns:
            The forward pass.
        """
        arguments = by_name(module.forward, args, kwargs)
        values = (*args, *arguments.values())
        sizes = (len(value) for value in values if isinstance(value, Tensor) and value.dim())
        mask = arguments.get("attention_mask")
        is_padding = isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point()
        return cls(
            arguments,
            next(sizes, None),
            mask != 0 if isinstance(mask, Tensor) and is_padding else None,
            (
                type(module),
                module.training,
                frozenset(name for name, value in arguments.items() if value is not None),
            ),
            has_graph,
        )


class Forwards:
    """Follow the forward passes of a model and of the pretrained models inside it.

    Args:
        every: look at each N-th outermost forward.
        mode: which forward passes exist: those of a model in training mode, in evaluation mode,
            or both.

    Attributes:
        count: number of outermost forward passes so far.
        looked: whether any was looked at.
        without_values: what ran forward passes on tensors that stand for others, which cannot be
            looked at.
        running: those that run now and are looked at, outermost first.
    """

    def __init__(self, every: int, mode: Mode) -> None:
        self.count = 0
        self.looked = False
        self.without_values: set[str] = set()
        self.running: list[Forward] = []
        self._every = every
        self._mode = mode
        self._modules: list[nn.Module] = []  # also those that are not looked at
        self._looking = False

    def begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Open the forward pass of a module.

        Args:
            module: the model, or a pretrained model inside it.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            Whether no other is running around it.
        """
        if any(module is other for other in self._modules):
            self.clear()  # an interrupt tore down a forward without running its hooks
        self._modules.append(module)
        outermost = len(self._modules) == 1
        has_graph = torch.is_grad_enabled()
        with unobserved():
            if outermost:
                self._looking = self._choose(module, args, kwargs)
            if self._looking:
                self.looked = True
                self.running.append(Forward.of(module, args, kwargs, has_graph))
        return outermost

    def end(self, module: nn.Module) -> bool:
        """Close the forward pass of a module, and those inside it that never ended.

        Args:
            module: the model, or a pretrained model inside it.

        Returns:
            Whether no other is running around it.
        """
        while self._modules and self._modules.pop() is not module:
            continue
        del self.running[len(self._modules) :]
        return not self._modules

    def clear(self) -> None:
        """Forget everything that runs."""
        self._modules.clear()
        self.running.clear()

    def _choose(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Count an outermost forward pass and tell whether it is one to look at."""
        if self._mode != "both" and module.training != (self._mode == "train"):
            return False
        self.count += 1
        obstacle = _without_values(args, kwargs)
        if obstacle:
            self.without_values.add(obstacle)
            return False
        return (self.count - 1) % self._every == 0


def _without_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What runs a forward pass on tensors that have no values of their own; empty if nothing."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if torch.compiler.is_exporting() or any(map(torch._is_functional_tensor, tensors)):
        return "torch.export"
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return "fake or meta tensors"
    return ""


def forward_roots(model: nn.Module) -> list[nn.Module]:
    """List the modules whose call is a forward pass: the model and every pretrained one inside.

    Args:
        model: the model the lens was given.

    Returns:
        Distinct modules, outermost first.
    """
    return [model, *(inner for inner in pretrained_models(model) if inner is not model)]
