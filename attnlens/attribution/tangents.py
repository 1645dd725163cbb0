"""Bundles of tangents, and how one layer of a model carries them.

A tangent is a direction in the space of hidden states. `push_forward` multiplies many of them at
once by a layer's Jacobian, `pull_back` by its transpose, without ever forming it.
"""

# torch leaves `TorchDispatchMode` untyped.
# mypy: allow-untyped-calls

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from attnlens.errors import InputError

Layer = Callable[[Tensor], Tensor]
"""A map of hidden states, `[B, K, M]` to `[B, K, M]`, with every other argument bound."""


def push_forward(
    layer: Layer,
    hidden: Tensor,
    tangents: Tensor,
    *,
    memory_budget: int = 2**28,
    out: Tensor | None = None,
) -> Tensor:
    """Push tangents through a layer: J t, with J the layer's Jacobian at `hidden`.

    Works with gradients recorded or not and in inference mode, records none, and draws no
    random numbers.

    Args:
        layer: the layer as a function of its hidden state alone. It is called once per chunk:
            dropout must be off, and it must not write a cache.
        hidden: the layer's actual input, `[B, K, M]`.
        tangents: tangents at that input, `[..., B, K, M]`.
        memory_budget: bytes that may be held beside `tangents` and the result. One tangent is
            the smallest chunk, whatever it takes.
        out: contiguous tensor that receives the result. `tangents` itself may be given, which
            saves a second bundle.

    Returns:
        Tangents at the layer's output, `[..., B, K, M]`.

    Raises:
        InputError: if the layer changes the shape of its hidden state, or draws random numbers.

    Examples:
        >>> hidden, tangents = torch.full((1, 1, 2), 3.0), torch.eye(2)[:, None, None]
        >>> push_forward(torch.square, hidden, tangents)[:, 0, 0].tolist()
        [[6.0, 0.0], [0.0, 6.0]]
    """
    hidden = hidden.detach()

    def push(tangent: Tensor) -> Tensor:
        # Under autocast the dtype may change from layer to layer; a tangent follows its primal.
        pushed: Tensor = jvp(layer, (hidden,), (tangent.to(hidden.dtype),))[1]
        return pushed

    return _in_chunks(push, tangents, memory_budget, out)


def pull_back(
    layer: Layer,
    hidden: Tensor,
    cotangents: Tensor,
    *,
    memory_budget: int = 2**28,
    out: Tensor | None = None,
) -> Tensor:
    """Pull cotangents back through a layer: Jᵀ t, with J the layer's Jacobian at `hidden`.

    Args:
        layer: the layer, as for :func:`push_forward`.
        hidden: the layer's actual input, `[B, K, M]`.
        cotangents: cotangents at the layer's output, `[..., B, K, M]`.
        memory_budget: bytes, as for :func:`push_forward`.
        out: contiguous tensor that receives the result; may be `cotangents`.

    Returns:
        Cotangents at the layer's input, `[..., B, K, M]`.

    Raises:
        InputError: as :func:`push_forward` does.

    Examples:
        >>> weight = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> hidden, cotangents = torch.zeros(1, 1, 2), torch.tensor([[[[1.0, 0.0]]]])
        >>> pull_back(lambda state: state @ weight, hidden, cotangents).tolist()
        [[[[1.0, 0.0]]]]
    """
    hidden = hidden.detach()

    def pull(cotangent: Tensor) -> Tensor:
        linearised = vjp(layer, hidden)
        output, transpose = linearised[0], linearised[1]
        pulled: Tensor = transpose(cotangent.to(output.dtype))[0]
        return pulled

    return _in_chunks(pull, cotangents, memory_budget, out)


def layer_output(layer: Layer, hidden: Tensor) -> Tensor:
    """Run a layer once, as deterministically as its derivatives are taken.

    Args:
        layer: the layer, as for :func:`push_forward`.
        hidden: the layer's input, `[B, K, M]`.

    Returns:
        The layer's output, `[B, K, M]`.
    """
    # Mapped over a dummy, because inside vmap a random operation raises instead of drawing.
    run = vmap(lambda _: layer(hidden), out_dims=None)
    with _differentiable():
        return _apply(run, hidden.new_zeros(1))


def derivative_errors(layer: Layer, hidden: Tensor, mask: Tensor, precision: torch.dtype) -> Tensor:
    """Compare a layer's derivative in one direction with a finite difference.

    Operations that drop tangents, such as quantised ones or a detour through NumPy, raise no error:
    the derivative is too small then.

    Args:
        layer: the layer, as for :func:`push_forward`.
        hidden: the layer's input, `[B, K, M]`.
        mask: True for real tokens, `[B, K]`; the others are left alone.
        precision: that the layer computes in; sets the step of the difference.

    Returns:
        Distance of both relative to the length of the finite difference, `[B]`: that of the median
        token, since a router that sends a token to other experts within the step makes it jump.
        NaN for examples that are not finite.
    """
    hidden = hidden.detach()
    generator = torch.Generator().manual_seed(0)
    real = mask[..., None]
    size = hidden.float().square().mean(-1, keepdim=True).sqrt() * real  # of each token
    direction = torch.randn(hidden.shape, generator=generator).to(hidden) * size.to(hidden.dtype)
    pushed = push_forward(layer, hidden, direction[None])[0]
    step = torch.finfo(precision).eps ** (1 / 3)
    with _differentiable():
        above, below = (layer(hidden + sign * step * direction) for sign in (1, -1))
    difference = (above.double() - below.double()) / (2 * step)
    errors = (pushed.double() - difference).norm(dim=-1) / difference.norm(dim=-1)
    median: Tensor = errors.where(mask, torch.nan).nanmedian(-1).values
    return median


@contextmanager
def _differentiable() -> Generator[None]:
    # Neither the fused kernels of scaled dot product attention nor the fast path of
    # nn.TransformerEncoderLayer has a forward-mode derivative.
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def _in_chunks(
    derivative: Callable[[Tensor], Tensor], tangents: Tensor, budget: int, out: Tensor | None
) -> Tensor:
    # The first chunk is one tangent; what it takes at its peak says how many fit at once.
    out = torch.empty_like(tangents) if out is None else out
    shape = tangents.shape[-3:]
    source, result = tangents.reshape(-1, *shape), out.view(-1, *shape)
    mapped = vmap(derivative)
    with _differentiable():
        with _PeakMemory() as memory:
            first = _apply(mapped, source[:1])
        if first.shape[1:] != shape:
            raise InputError(
                f"A layer of a chain must keep the shape of its hidden state, {list(shape)}. "
                f"Got {list(first.shape[1:])}."
            )
        result[:1] = first
        size = max(1, budget // max(1, memory.peak))
        for start in range(1, len(source), size):
            chunk = slice(start, start + size)
            result[chunk] = _apply(mapped, source[chunk])
    return out


def _apply(mapped: Callable[[Tensor], Tensor], tangents: Tensor) -> Tensor:
    try:
        return mapped(tangents)
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise InputError(
            "A layer draws random numbers, so it has no one Jacobian: switch dropout off with "
            "model.eval()."
        ) from error


class _PeakMemory(TorchDispatchMode):
    """Measures the bytes that operations hold at once, by the lifetime of their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for _ in self._new_storages((args, kwargs)):
            pass  # inputs and parameters are not held by the operation
        result = func(*args, **(kwargs or {}))
        for storage in self._new_storages(result):
            self._live += storage.nbytes()
            weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result

    def _new_storages(self, tree: Any) -> Iterator[torch.UntypedStorage]:
        """Storages met for the first time."""
        for leaf in tree_iter(tree):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self._storages:
                storage = leaf.untyped_storage()
                self._storages[storage] = None
                yield storage

    def _release(self, size: int) -> None:
        self._live -= size
