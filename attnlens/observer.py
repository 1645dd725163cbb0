"""What every observer is: state that grows by one capture at a time and can be merged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlens.capture import Capture, HiddenState, LayerCapture
from attnlens.errors import AttnLensError, InputError
from attnlens.results import LayerKey

Self = TypeVar("Self", bound="Observer")
Sums = dict[str, Tensor]
Labels = Tensor | Callable[[Mapping[str, Any]], Tensor] | None
"""Integer labels `[B, K]`, or what computes them from a model's arguments by name."""

# How a quantity of this suffix is merged; every other is added.
_COMBINE = {"min": torch.minimum, "max": torch.maximum}


def is_summed(quantity: str) -> bool:
    """Tell whether a quantity is merged by addition, not by minimum or maximum."""
    return quantity.rsplit("_", 1)[-1] not in _COMBINE


def stack_heads(layers: Sequence[Sums]) -> Sums:
    """Stack fields of heads over layers, with NaN for heads that a layer does not have.

    Args:
        layers: the same fields of each, `[H, ...]`; H may differ.

    Returns:
        The fields, `[L, H, ...]`.
    """
    heads = max(len(tensor) for fields in layers for tensor in fields.values())

    def padded(tensor: Tensor) -> Tensor:
        missing = (0, 0) * (tensor.dim() - 1) + (0, heads - len(tensor))
        return torch.nn.functional.pad(tensor, missing, value=torch.nan)

    return {name: torch.stack([padded(fields[name]) for fields in layers]) for name in layers[0]}


class Observer(ABC):
    """A streaming quantity over attention calls.

    Args:
        layers: layer indices to look at; None looks at all that the lens delivers.
    """

    def __init__(self, layers: Iterable[int] | None = None) -> None:
        self.layers = None if layers is None else frozenset(layers)

    def wants(self, capture: Capture) -> bool:
        """Tell whether a capture concerns this observer."""
        return self.layers is None or capture.layer in self.layers

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:  # noqa: B027, optional
        """Open a forward pass of the model.

        Args:
            inputs: the model's arguments by name.
        """

    @abstractmethod
    def update(self, capture: Capture) -> None:
        """Take one attention call into account.

        Args:
            capture: the call; it must not be kept alive unless its maps were asked for.
        """

    def seek(self, place: int) -> None:  # noqa: B027, most observers draw nothing
        """Say which forward pass of a run comes next, where runs are split or interrupted.

        Observers that draw random numbers then draw those of that pass, whatever they saw before.

        Args:
            place: number of the pass in the whole run, from 0.
        """

    @abstractmethod
    def compute(self) -> Any:
        """Return the result over everything seen so far."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything seen."""

    @abstractmethod
    def merge(self: Self, other: Self) -> Self:
        """Add what another observer of the same kind and settings has seen.

        Args:
            other: left unchanged.

        Returns:
            This observer.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as named tensors, from which :meth:`load_state_dict` restores it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state.

        Args:
            state: what :meth:`state_dict` returned.
        """


class LayerObserver(Observer):
    """An observer of whole layers instead of attention calls.

    It sees every layer of the stacks a lens looks at, also those of which no result is wanted:
    derivatives go through them.
    """

    def wants(self, capture: Capture) -> bool:
        """Decline attention calls."""
        return False

    def update(self, capture: Capture) -> None:
        """Ignore an attention call.

        Args:
            capture: the call.
        """

    def update_layer(self, layer: LayerCapture) -> None:
        """Take one layer call into account.

        Args:
            layer: the call.
        """

    def watch_hidden(self, state: HiddenState) -> Callable[[Tensor], None] | None:
        """Ask for the gradient of a hidden state that takes part in a backward pass.

        Args:
            state: the hidden state.

        Returns:
            What to call with `∂loss/∂state`, `[B, K, M]`, when a backward pass has it, or None.
        """
        return None

    def end_forward(self, completed: bool) -> None:
        """Close a forward pass of the model; whatever was kept for it can go.

        Args:
            completed: False if the pass was interrupted.
        """


class GradientObserver(Observer):
    """An observer that is also told the gradient of the loss with respect to each context.

    The gradient comes from the user's own backward pass, while the lens is active.
    """

    @abstractmethod
    def update_gradient(self, capture: Capture, gradient: Tensor) -> None:
        """Take the gradient of one attention call into account.

        Args:
            capture: the call, with its context but no queries, keys, values or output projection.
            gradient: `[B, H, Q, D]`, `∂L/∂O`, detached.
        """


class SumObserver(Observer):
    """An observer whose whole state is sums per layer, so that merging is addition.

    Quantities named `…_min` and `…_max` are merged by minimum and maximum. Subclasses call
    :meth:`add` and read :attr:`sums`.
    """

    def __init__(self, layers: Iterable[int] | None = None) -> None:
        super().__init__(layers)
        self.sums: dict[LayerKey, Sums] = {}

    def add(self, key: LayerKey, sums: Mapping[str, Tensor]) -> None:
        """Add sums to a layer.

        Args:
            key: stack and layer.
            sums: float64 tensors, the same names and shapes at every call for this layer.

        Raises:
            InputError: if the shapes differ from what the layer had before.
        """
        known = self.sums.get(key)
        if known is None:
            self.sums[key] = {name: tensor.clone() for name, tensor in sums.items()}
            return
        for name, tensor in sums.items():
            if tensor.shape != known[name].shape:
                raise InputError(
                    f"{key[0]} layer {key[1]} had {name} of shape {list(known[name].shape)} and "
                    f"now has {list(tensor.shape)}. Use one observer per model."
                )
            combine = _COMBINE.get(name.rsplit("_", 1)[-1], torch.add)
            known[name] = combine(known[name], tensor.to(known[name].device))

    def reset(self) -> None:
        """Forget everything seen."""
        self.sums = {}

    def merge(self: Any, other: Any) -> Any:
        """Add what another observer has seen.

        Args:
            other: an observer of the same class; left unchanged.

        Returns:
            This observer.

        Raises:
            InputError: if the other observer is of another class.
        """
        if type(other) is not type(self):
            raise InputError(f"Cannot merge {type(other).__name__} into {type(self).__name__}.")
        for key, sums in other.sums.items():
            self.add(key, sums)
        return self

    def sync(self, group: Any = None) -> None:
        """Replace the state by its sum over all processes of a distributed group.

        Layers that only some processes saw count as zero elsewhere.

        Args:
            group: a `torch.distributed` process group; the default one when None.
        """
        parts: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, self.state_dict(), group=group)
        self._forget_state()
        for part in parts:
            self.add_state(part)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums on the CPU, named `stack/layer/quantity`."""
        return {
            f"{stack}/{layer}/{name}": tensor.detach().cpu()
            for (stack, layer), sums in self.sums.items()
            for name, tensor in sums.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, replacing the present one.

        Args:
            state: what :meth:`state_dict` returned.
        """
        self.reset()
        self.add_state(state)

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add a state to the present one, as if what it saw had been seen here.

        Args:
            state: what :meth:`state_dict` returned.
        """
        layers: dict[LayerKey, Sums] = {}
        for name, tensor in state.items():
            stack, layer, quantity = name.rsplit("/", 2)
            layers.setdefault((stack, int(layer)), {})[quantity] = tensor
        for key, sums in layers.items():
            self.add(key, sums)

    def _forget_state(self) -> None:
        """Forget what :meth:`state_dict` returns."""
        self.sums = {}

    def seen(self, *, passes: str = "the model") -> dict[LayerKey, Sums]:
        """Return the sums of every layer, in order, on the CPU.

        Args:
            passes: what to run, for the error.

        Returns:
            The sums by layer; at least one.

        Raises:
            AttnLensError: if nothing was seen.
        """
        if not self.sums:
            raise AttnLensError(
                f"{type(self).__name__} has seen no attention call. Run {passes} inside "
                f"`with Lens(...)`."
            )
        return {
            key: {name: tensor.cpu() for name, tensor in self.sums[key].items()}
            for key in self.ordered()
        }

    def ordered(self) -> list[LayerKey]:
        """Layers in the order of their stacks' first appearance, then by index."""
        stacks: Collection[str] = list(dict.fromkeys(stack for stack, _ in self.sums))
        order = {stack: position for position, stack in enumerate(stacks)}
        return sorted(self.sums, key=lambda key: (order[key[0]], key[1]))
