"""A layer's call, kept so that it can be repeated with another hidden state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.moe import ExpertsInterface

from attnlens.errors import InputError
from attnlens.tap.hooks import is_suspended, suspended
from attnlens.tap.passing import output_tensors
from attnlens.tap.shared import SharedSetting, replaced

Layout = Literal["batch", "tokens", "packed"]
"""Hidden states as `[B, K, M]`, as `[K, B, M]`, or as `[K, M]` with all examples in a row."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer without its hidden state.

    Attributes:
        name: qualified name of the layer.
        module: the module of that name.
        args: positional arguments, with a gap wherever the hidden state was given.
        kwargs: keyword arguments, likewise.
        places: the gaps, as positions and keywords.
        autocast: device type, dtype and whether autocast was on.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: tuple[int | str, ...]
    autocast: tuple[str, torch.dtype, bool]

    @classmethod
    def of(
        cls, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[LayerCall, Tensor] | None:
        """Take a call apart.

        Args:
            name: qualified name of the layer.
            module: the module of that name.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            The call and the hidden state it was given, or None if no argument can be one.
        """
        given: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        hidden = given.get("hidden_states")
        if not isinstance(hidden, Tensor):
            tensors = (value for value in given.values() if isinstance(value, Tensor))
            hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        if hidden is None:
            return None
        device = hidden.device.type
        without_empty = partial(_without_empty, module)
        call = cls(
            name,
            module,
            tuple(None if value is hidden else without_empty(value) for value in args),
            {k: None if value is hidden else without_empty(value) for k, value in kwargs.items()},
            tuple(place for place, value in given.items() if value is hidden),
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)),
        )
        return call, hidden

    def again(self, hidden: Tensor, layout: Layout = "batch") -> Tensor:
        """Call the layer with another hidden state, unheard by any lens.

        Args:
            hidden: `[B, K, M]`.
            layout: how the layer has its hidden states.

        Returns:
            The layer's output, `[B, K, M]`.

        Raises:
            InputError: if the layer would write a cache a second time.
        """
        caches = filter(_is_cache, (*self.args, *self.kwargs.values()))
        for cache in caches:
            raise InputError(
                f"{self.name} was given a {type(cache).__name__}, of earlier tokens or of a fixed "
                f"size, which calling it again would write to. Tokens can be followed through one "
                f"forward pass over the whole sequence: not through a step of generate(), a static "
                f"cache or the prefix of prefix tuning."
            )
        hidden = hidden.squeeze(0) if layout == "packed" else arranged(hidden, layout)
        args, kwargs = list(self.args), dict(self.kwargs)
        for place in self.places:
            if isinstance(place, int):
                args[place] = hidden
            else:
                kwargs[place] = hidden
        device, dtype, enabled = self.autocast
        with (
            suspended(),
            _differentiable_experts.held(),
            # Casts made here must not be reused by the model, which may need their gradients.
            torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False),
        ):
            # Transformers collects hidden states in a context variable: an empty context has none.
            output = Context().run(self.module, *args, **kwargs)
        return arranged(output_tensors(output)[0], layout)

    def mixes_first_axis(self, hidden: Tensor) -> bool | None:
        """Find out whether the first axis of a hidden state counts tokens, by changing one entry.

        Args:
            hidden: what the layer was given.

        Returns:
            True if other entries of the output depend on the first one; None where the layer
            cannot be called again.
        """
        changed = hidden.clone()
        changed[0] = hidden[0].flip(-1)
        try:
            before, after = (self._seeded(state)[1:] for state in (hidden, changed))
        except (InputError, RuntimeError):
            return None
        return not torch.equal(before, after)

    def _seeded(self, hidden: Tensor) -> Tensor:
        """Call the layer again; every call draws the same random numbers, none of the user's."""
        devices = [hidden.device] if hidden.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            return self.again(hidden)


def arranged(tensor: Tensor, layout: Layout) -> Tensor:
    """Bring a hidden state, or its gradient, to batch-first layout.

    Args:
        tensor: as the model has it.
        layout: how that is.

    Returns:
        `[B, K, M]`, a view; examples that were packed remain one example.
    """
    if layout == "packed":
        return tensor.unsqueeze(0)
    return tensor.transpose(0, 1) if layout == "tokens" else tensor


def _is_cache(value: Any) -> bool:
    return isinstance(value, Cache) or type(value).__name__.endswith("Cache")


def _without_empty(module: nn.Module, value: Any) -> Any:
    """An argument of a layer, or None for a cache in which the layer has nothing yet."""
    cache = getattr(value, "self_attention_cache", value)
    places = (getattr(inner, "layer_idx", None) for inner in module.modules())
    place = next((place for place in places if isinstance(place, int)), None)
    if not isinstance(cache, Cache) or place is None:
        return value
    layers = cache.layers[place : place + 1]
    return value if any(map(_holds_tokens, layers)) else None


def _holds_tokens(layer: Any) -> bool:
    """Whether a layer of a cache has, or has room for, tokens that its masks count."""
    states = getattr(layer, "has_previous_state", {}).values()
    return isinstance(layer, StaticLayer) or getattr(layer, "is_initialized", False) or any(states)


@contextmanager
def _eager_experts() -> Iterator[None]:
    """Let layers that are called again run their experts one by one.

    Grouped products of all experts have no forward derivative.
    """
    former = ExpertsInterface.get_interface

    def get_interface(self: ExpertsInterface, implementation: str, default: Any) -> Any:
        return default if is_suspended() else former(self, implementation, default)

    with replaced(ExpertsInterface, "get_interface", get_interface):
        yield


_differentiable_experts = SharedSetting(_eager_experts)
