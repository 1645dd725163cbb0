"""What every observer is: two methods to write, and a default for everything else."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence

from attnlens.capture import Capture, HiddenState, LayerCapture
from attnlens.errors import AttnLensError, AttnLensWarning, InputError
from attnlens.results import LayerKey

__all__ = ["ChainObserver", "GradientObserver", "LayerObserver", "Observer", "SumObserver"]

Self = TypeVar("Self", bound="Observer")
State = dict[str, Tensor]
Sums = dict[str, Tensor]
Labels = Tensor | Callable[[Mapping[str, Any]], Tensor] | None
"""Integer labels `[B, K]`, or what computes them from a model's arguments by name."""

# What an observer needs so that what it saw can be forgotten, saved and merged.
_STATEFUL = ("reset", "state_dict", "add_state")
# How a quantity of this suffix is merged; every other is added.
_COMBINE = {"min": torch.minimum, "max": torch.maximum}


class Observer(ABC):
    """A streaming quantity over attention calls.

    Subclasses write :meth:`update` and :meth:`compute`. One that is to be saved, merged or shared
    out, by a scan or among processes, also writes :meth:`reset`, :meth:`state_dict` and
    :meth:`add_state`; where these are needed and missing, an error says so.

    Args:
        layers: layer indices to look at; None looks at all that the lens delivers.

    Raises:
        InputError: if layers are no indices.

    Attributes:
        needs_backward: whether it sees nothing without a backward pass.
        alike: settings that must be equal in observers to be merged.

    Examples:
        >>> class Count(Observer):
        ...     calls = 0
        ...
        ...     def update(self, capture):
        ...         self.calls += 1
        ...
        ...     def compute(self):
        ...         return self.calls
        >>> count = Count()
        >>> with Lens(model, count), torch.no_grad():
        ...     output = model(**batch)
        >>> count.compute()
        6
    """

    needs_backward: ClassVar[bool] = False
    alike: ClassVar[tuple[str, ...]] = ()
    layers: frozenset[int] | None = None

    def __init__(self, layers: Iterable[int] | None = None) -> None:
        self.layers = None if layers is None else frozenset(checked_indices("layers", layers))

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.alike)
        return f"{type(self).__name__}({settings})"

    @abstractmethod
    def update(self, capture: Capture) -> None:
        """Take one attention call into account.

        Args:
            capture: the call; it must not be kept alive unless its maps were asked for.
        """

    @abstractmethod
    def compute(self) -> Any:
        """Return the result over everything seen so far."""

    @property
    def unsaved(self) -> str:
        """What it keeps that is no part of its state, in words; empty if nothing."""
        return ""

    def wants(self, capture: Capture) -> bool:
        """Tell whether a capture concerns this observer."""
        return self.layers is None or capture.layer in self.layers

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:  # noqa: B027, optional
        """Open a forward pass of the model.

        Args:
            inputs: the model's arguments by name.
        """

    def seek(self, place: int) -> None:  # noqa: B027, most observers draw nothing
        """Say which forward pass of a run comes next, where runs are split or interrupted.

        Observers that draw random numbers then draw those of that pass, whatever they saw before.

        Args:
            place: number of the pass in the whole run, from 0.
        """

    def reset(self) -> None:
        """Forget everything seen."""
        self.require_state()

    def state_dict(self) -> State:
        """Return what was seen as named tensors on the CPU, for :meth:`add_state`."""
        self.require_state()
        return {}

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add a state to the present one, as if what it saw had been seen here.

        Args:
            state: what :meth:`state_dict` returned.
        """
        self.require_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, replacing the present one.

        Args:
            state: what :meth:`state_dict` returned.
        """
        self.require_state()
        self.reset()
        self.add_state(state)

    def merge(self: Self, other: Self) -> Self:
        """Add what another observer of the same kind and settings has seen.

        Args:
            other: left unchanged.

        Returns:
            This observer.
        """
        self._require_alike(other)
        self.add_state(other.state_dict())
        return self

    def sync(self, group: Any = None) -> None:
        """Replace the state by that of all processes of a distributed group together.

        Args:
            group: a `torch.distributed` process group; the default one when None.
        """
        own = self.state_dict()
        parts: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(parts, own, group=group)
        self._forget_state()
        for part in parts:
            self.add_state(part)

    def require_state(self) -> None:
        """Refuse where what was seen cannot be forgotten, saved and merged.

        Raises:
            InputError: naming the methods that are missing.
        """
        missing = self.missing_methods()
        if missing:
            raise InputError(
                f"{type(self).__name__} has no state that can be reset, saved and merged: it lacks "
                f"{', '.join(f'{name}()' for name in missing)}. Write them, or derive it from "
                f"SumObserver."
            )

    @classmethod
    def missing_methods(cls) -> list[str]:
        """Return what the class lacks for what it saw to be forgotten, saved and merged."""
        return [name for name in _STATEFUL if getattr(cls, name) is getattr(Observer, name)]

    def _forget_state(self) -> None:
        """Forget what :meth:`state_dict` returns."""
        self.reset()

    def _require_alike(self, other: Observer) -> None:
        if type(other) is not type(self):
            raise InputError(f"Cannot merge {type(other).__name__} into {type(self).__name__}.")
        for name in self.alike:
            own, others = getattr(self, name), getattr(other, name)
            if own != others:
                raise InputError(
                    f"Observers with different {name} cannot be merged. Got {own!r} and {others!r}."
                )


class LayerObserver(Observer):
    """An observer of whole layers instead of attention calls.

    It sees every layer of the stacks a lens looks at, also those of which no result is wanted:
    derivatives go through them.

    Examples:
        >>> class Norms(LayerObserver):
        ...     def __init__(self):
        ...         self.norms = []
        ...
        ...     def update_layer(self, layer):
        ...         self.norms.append(layer.output.norm(dim=-1).mean())
        ...
        ...     def compute(self):
        ...         return torch.stack(self.norms)
        >>> norms = Norms()
        >>> with Lens(model, norms), torch.no_grad():
        ...     output = model(**batch)
        >>> len(norms.compute())
        6
    """

    def wants(self, capture: Capture) -> bool:
        """Decline attention calls."""
        return False

    def update(self, capture: Capture) -> None:
        """Ignore an attention call."""

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


class ChainObserver(LayerObserver):
    """An observer of whole stacks, whose layers are gathered until the forward pass has completed.

    It is told of each run of a stack: a siamese model runs one twice in a pass.
    """

    def __init__(self, layers: Iterable[int] | None = None) -> None:
        super().__init__(layers)
        self._chains: list[list[LayerCapture]] = []
        self._inputs: Mapping[str, Any] = {}

    @abstractmethod
    def update_chain(self, chain: Sequence[LayerCapture], inputs: Mapping[str, Any]) -> None:
        """Take a run of a stack into account.

        Args:
            chain: its layers in order, at least one.
            inputs: the model's arguments by name.
        """

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Begin to gather layers.

        Args:
            inputs: the model's arguments by name.
        """
        self._chains, self._inputs = [], inputs

    def update_layer(self, layer: LayerCapture) -> None:
        """Keep a layer until the pass ends.

        Args:
            layer: the call.
        """
        chain = next((c for c in reversed(self._chains) if c[0].stack == layer.stack), None)
        if layer.link == "first" or chain is None:
            chain = []
            self._chains.append(chain)
        elif layer.link == "next":
            chain[-1] = replace(chain[-1], output=layer.hidden)  # one copy of the two will do
        # A copy, because what comes next may change it in place.
        chain.append(replace(layer, output=layer.output.clone()))

    def end_forward(self, completed: bool) -> None:
        """Take the runs of a completed pass into account.

        Args:
            completed: False if the pass was interrupted; nothing is then counted.
        """
        chains, self._chains = self._chains, []
        inputs, self._inputs = self._inputs, {}
        for chain in chains if completed else ():
            self.update_chain(chain, inputs)

    def _nothing(self) -> str:
        """What to say where nothing was seen."""
        return (
            f"{type(self).__name__} has seen no complete forward pass of the layers it was asked "
            f"for. Run the model inside `with Lens(...)`, and check `layers`."
        )


class GradientObserver(Observer):
    """An observer that is also told the gradient of the loss with respect to each context.

    The gradient comes from the user's own backward pass, while the lens is active.
    """

    needs_backward = True

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
    :meth:`add` in `update`, and :meth:`stacked` or :meth:`seen` in `compute`.

    Attributes:
        sums: the sums of each layer by name.

    Examples:
        >>> class Largest(SumObserver):
        ...     def update(self, capture):
        ...         most = capture.attention().amax((0, 2, 3))
        ...         self.add((capture.stack, capture.layer), {"largest_max": most})
        ...
        ...     def compute(self):
        ...         return self.stacked(lambda sums: {"largest": sums["largest_max"]})[1]["largest"]
        >>> largest = Largest()
        >>> with Lens(model, largest), torch.no_grad():
        ...     output = model(**batch)
        >>> tuple(largest.compute().shape)
        (6, 12)
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
        total = self.sums.get(key)
        if total is None:
            self.sums[key] = {name: tensor.clone() for name, tensor in sums.items()}
            return
        for name, tensor in sums.items():
            if name not in total or tensor.shape != total[name].shape:
                before = list(total[name].shape) if name in total else "none"
                raise InputError(
                    f"{key[0]} layer {key[1]} had {name} of shape {before} and now has "
                    f"{list(tensor.shape)}. Use one observer per model."
                )
            combine = _COMBINE.get(_suffix(name), torch.add)
            total[name] = combine(total[name], tensor.to(total[name].device))

    def reset(self) -> None:
        """Forget everything seen."""
        self.sums = {}

    def merge(self: Any, other: Any) -> Any:
        """Add what another observer of the same kind and settings has seen, where it is.

        Args:
            other: left unchanged.

        Returns:
            This observer.
        """
        self._require_alike(other)
        for key, sums in other.sums.items():
            self.add(key, sums)
        return self

    def state_dict(self) -> State:
        """Return the sums on the CPU, named `stack/layer/quantity`."""
        return named_sums(self.sums)

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add a state to the present one, as if what it saw had been seen here.

        Args:
            state: what :meth:`state_dict` returned.
        """
        for key, sums in sums_by_layer(state).items():
            self.add(key, sums)

    def seen(self) -> dict[LayerKey, Sums]:
        """Return the sums of every layer, in order, on the CPU.

        Returns:
            The sums by layer; at least one.

        Raises:
            AttnLensError: if nothing was seen.
        """
        if not self.sums:
            raise AttnLensError(self._nothing())
        return {
            key: {name: tensor.cpu() for name, tensor in self.sums[key].items()}
            for key in self.ordered()
        }

    def stacked(self, fields: Callable[[Sums], Sums]) -> tuple[tuple[LayerKey, ...], Sums]:
        """Turn the sums of every layer into fields, and stack these over the layers.

        A field `skipped`, the number of examples with NaN or Inf, warns where it is not zero.

        Args:
            fields: from the sums of a layer to its fields, `[H, ...]`, where H may differ by
                layer, or scalars.

        Returns:
            The layers in order, and the fields `[L, H, ...]` with NaN for heads that a layer does
            not have, or `[L]`.
        """
        layers = self.seen()
        rows = [fields(sums) for sums in layers.values()]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        stacked = {
            name: pad_sequence(parts, True, torch.nan) if parts[0].dim() else torch.stack(parts)
            for name, parts in columns.items()
        }
        if "skipped" in stacked:
            warn_of_skipped(stacked["skipped"], tuple(layers), stacklevel=4)
        return tuple(layers), stacked

    def ordered(self) -> list[LayerKey]:
        """Return the layers in the order of their stacks' first appearance, then by index."""
        stacks = list(dict.fromkeys(stack for stack, _ in self.sums))
        return sorted(self.sums, key=lambda key: (stacks.index(key[0]), key[1]))

    def _nothing(self) -> str:
        """What to say where nothing was seen."""
        return (
            f"{type(self).__name__} has seen no attention call. Run the model inside "
            f"`with Lens(...)`."
        )


def checked_indices(name: str, indices: Iterable[int]) -> tuple[int, ...]:
    """Refuse what is no list of indices, such as a single number.

    Args:
        name: of the argument.
        indices: what a user passed.

    Returns:
        The indices.

    Raises:
        InputError: if they are none.
    """
    given = tuple(indices) if isinstance(indices, Iterable) else ()
    if not isinstance(indices, Iterable) or not all(type(index) is int for index in given):
        raise InputError(f"{name} must be a list of indices, such as [0, 3]. Got {indices!r}.")
    return given


def named_sums(sums: Mapping[LayerKey, Sums]) -> State:
    """Name the sums of layers `stack/layer/quantity`, and take them to the CPU."""
    return {
        f"{stack}/{layer}/{name}": tensor.detach().cpu()
        for (stack, layer), quantities in sums.items()
        for name, tensor in quantities.items()
    }


def sums_by_layer(state: Mapping[str, Tensor]) -> dict[LayerKey, Sums]:
    """Sort what :func:`named_sums` named by layers again."""
    layers: dict[LayerKey, Sums] = {}
    for name, tensor in state.items():
        stack, layer, quantity = name.rsplit("/", 2)
        layers.setdefault((stack, int(layer)), {})[quantity] = tensor
    return layers


def part_of(state: Mapping[str, Tensor], prefix: str) -> State:
    """Return the tensors whose names have a prefix, under the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def is_summed(quantity: str) -> bool:
    """Tell whether a quantity is merged by addition, not by minimum or maximum."""
    return _suffix(quantity) not in _COMBINE


def checked_labels(labels: Tensor | None, real: Tensor) -> Tensor:
    """Check the labels of tokens; without labels, all tokens share label 0.

    Args:
        labels: integer label of every token, `[B, K]`, or None.
        real: `[B, K]`, as many as there are tokens.

    Returns:
        `[B, K]` int64, on the device of `real`.

    Raises:
        InputError: if labels are no integers, or not as many.
    """
    if labels is None:
        return torch.zeros_like(real, dtype=torch.int64)
    if labels.shape != real.shape or labels.is_floating_point() or labels.is_complex():
        raise InputError(
            f"labels must be integers, one for each token, [B, K] = {list(real.shape)}. Got "
            f"{list(labels.shape)}, {labels.dtype}."
        )
    return labels.to(real.device, torch.int64)


def label_members(labels: Tensor | None, real: Tensor, groups: int) -> Tensor:
    """Tell which real tokens have which label.

    Args:
        labels: integer label of every token, `[B, K]`; tokens whose label is not in 0 … G − 1 are
            members of none. None: all tokens share label 0.
        real: `[B, K]` bool, the real tokens.
        groups: G, the number of labels.

    Returns:
        `[B, K, G]` bool.

    Raises:
        InputError: if labels are no integers, or not as many as there are tokens.

    Examples:
        >>> real = torch.tensor([[True, True, False]])
        >>> label_members(torch.tensor([[1, 0, 1]]), real, 2).int().tolist()
        [[[0, 1], [1, 0], [0, 0]]]
    """
    every = torch.arange(groups, device=real.device)
    return (checked_labels(labels, real)[..., None] == every) & real[..., None]


def warn_of_skipped(
    skipped: Tensor,
    layers: Sequence[LayerKey] = (),
    what: str = "example",
    stacklevel: int = 3,
) -> None:
    """Warn the caller of `compute` where something was left out, naming the first place.

    Args:
        skipped: how many were, `[L]` or `[L, H]`; NaN counts as none.
        layers: stack and layer of each row; none to leave the place out.
        what: was left out.
        stacklevel: as for `warnings.warn`, of the caller of `compute`.
    """
    places = (skipped > 0).nonzero().tolist()
    if places:
        row, *heads = places[0]
        place = f", first in {layers[row][0]} layer {layers[row][1]}" if layers else ""
        place += "".join(f", head {head}" for head in heads)
        count = int(skipped.nan_to_num().max())
        warnings.warn(
            f"{count} {what}(s) held NaN or Inf and were left out{place}. Check the "
            f"model's inputs.",
            AttnLensWarning,
            stacklevel=stacklevel,
        )


def _suffix(quantity: str) -> str:
    return quantity.rsplit("_", 1)[-1]
