"""Find which parts of a layer's weights belong to which head, without a list of class names.

A slice of a weight belongs to a head if that head's context has a derivative there and no other
head's has. The derivatives of each head's context, taken at the input of W_O, therefore show the
rows of q, k and v in whatever order a fused projection holds them, in `Conv1D` as in `Linear`,
behind rotary embeddings, norms and grouped queries, and tables that hold a column per head.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnlens.errors import InputError
from attnlens.pruning.heads import LayerHeads
from attnlens.tap.hooks import Hook, Replacement
from attnlens.tap.projection import is_linear
from attnlens.tap.trial import Trial


@dataclass(frozen=True, eq=False)
class Division:
    """How the indices along a dimension are divided among heads.

    Attributes:
        dim: number of the dimension.
        owners: `[H, size]` bool, the heads that use each index; several for grouped queries.
    """

    dim: int
    owners: Tensor

    def used_by(self, heads: Iterable[int]) -> Tensor:
        """List the indices that some of the heads use, in ascending order."""
        return self.owners[list(heads)].any(0).nonzero()[:, 0]

    def kept(self, pruned: Collection[int]) -> Tensor:
        """List the indices that some head uses that is not pruned, in ascending order."""
        return self.used_by(head for head in range(len(self.owners)) if head not in pruned)


@dataclass(frozen=True, eq=False)
class DividedWeight(Division):
    """A weight that is divided among heads along a dimension.

    Attributes:
        module: the module that has the weight.
        name: its name there.
    """

    module: nn.Module
    name: str

    @property
    def tensor(self) -> nn.Parameter:
        """The weight as it is now."""
        return self.module.get_parameter(self.name)

    @property
    def is_matrix(self) -> bool:
        """Whether it is the matrix of a linear module."""
        return is_linear(self.module) and self.tensor.dim() > 1


@dataclass(frozen=True, eq=False)
class DividedArgument(Division):
    """An argument of an attention module that holds a slice per head, such as a position bias.

    Attributes:
        name: keyword, or position.
    """

    name: str | int


@dataclass(frozen=True, eq=False)
class LayerDivision:
    """Everything of one attention layer that is divided among its heads.

    Attributes:
        layer: the layer, the first one where several share the weights.
        root: qualified name of the smallest module that holds attention and output projection.
        scope: the same, or the attention module where the root holds other attention as well.
        weights: weights before the context, and W_O.
        arguments: arguments of the attention module.
    """

    layer: LayerHeads
    root: str
    scope: str
    weights: tuple[DividedWeight, ...]
    arguments: tuple[DividedArgument, ...]


@dataclass(eq=False)
class _Trail:
    """What one call of a layer is about to leave behind: its arguments and its context."""

    layer: LayerHeads
    root: str
    scope: str
    weights: list[tuple[nn.Module, str]]
    arguments: dict[str | int, Tensor] = field(default_factory=dict)
    received: Tensor | None = None


def find_divisions(trial: Trial, layers: Sequence[LayerHeads]) -> list[LayerDivision]:
    """Find the weights and arguments of each layer that are divided among its heads.

    Args:
        trial: runs the model.
        layers: its heads; those without projection are left out.

    Returns:
        One entry per output projection.

    Raises:
        InputError: if weights are adapted or quantised, so that they cannot be divided.
    """
    modules = dict(trial.model.named_modules())
    sites = {layer.site for layer in layers}
    first: dict[nn.Module, LayerHeads] = {}
    for layer in layers:
        if layer.projection is not None:
            first.setdefault(layer.projection, layer)
    trails = [_trail(modules, layer, sites) for layer in first.values()]
    tensors = [module.get_parameter(name) for trail in trails for module, name in trail.weights]
    with _requiring_grad(tensors), ExitStack() as stack, torch.enable_grad():
        for trail in trails:
            _follow(trail, modules[trail.layer.site], stack)
        trial()
        return [_division(trail, modules[trail.layer.site]) for trail in trails]


def computes_position_bias(module: nn.Module) -> bool:
    """Tell whether an attention module computes the position bias that later layers are handed.

    Args:
        module: an attention module.

    Returns:
        True for the first layers of T5 and its kin.
    """
    return (
        bool(getattr(module, "has_relative_attention_bias", False))
        and hasattr(module, "compute_bias")
        and "position_bias" in inspect.signature(module.forward).parameters
    )


def head_layout(support: Tensor) -> Tensor | None:
    """Find the regular division among heads that observed derivatives agree with.

    Heads, or groups of heads, lie in blocks of equal width, and the sequence of blocks may repeat
    as in a fused qkv. Indices without any derivative are filled in.

    Args:
        support: `[H, S]` bool, whether a head's context has a derivative at an index.

    Returns:
        `[H, S]` bool, the heads that use each index; None if there is no such division.
    """
    columns, index = torch.unique(support.int(), dim=1, return_inverse=True)
    groups = [c for c in range(columns.shape[1]) if columns[:, c].any()]
    disjoint = bool((columns[:, groups].sum(1) == 1).all())
    alike = len({int(columns[:, c].sum()) for c in groups}) == 1
    size = support.shape[1]
    if len(groups) < 2 or not disjoint or not alike or size % len(groups):
        return None
    for repeats in range(1, size // len(groups) + 1):
        if size % (repeats * len(groups)):
            continue
        block = size // (repeats * len(groups))
        slots = torch.arange(size) // block % len(groups)
        inside = [set(index[slots == slot].tolist()) & set(groups) for slot in range(len(groups))]
        if all(len(group) == 1 for group in inside) and len(set.union(*inside)) == len(groups):
            order = torch.tensor([group.pop() for group in inside])
            owners: Tensor = columns[:, order[slots]].bool()
            return owners
    return None


def _trail(modules: dict[str, nn.Module], layer: LayerHeads, sites: set[str]) -> _Trail:
    """Name the weights that may be divided among the heads of a layer."""
    pairs = zip(layer.site.split("."), layer.name.split("."), strict=False)
    root = ".".join(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    prefix = f"{root}." if root else ""
    alone = not any(s != layer.site and s.startswith(prefix) for s in sites)
    scope = root if alone else layer.site
    module = modules[scope]
    for inner in module.modules():
        require_plain(inner, layer)
    weights = [
        (inner, name)
        for inner in module.modules()
        for name, parameter in inner.named_parameters(recurse=False)
        if parameter.is_floating_point() and not _is_shared_table(module, inner)
    ]
    return _Trail(layer, root, scope, weights)


def require_plain(module: nn.Module, layer: LayerHeads, *, offloaded: bool = False) -> None:
    """Raise an error unless the weights of a module can be cut.

    Args:
        module: a module of a layer.
        layer: the layer, for the message.
        offloaded: whether weights may be kept elsewhere than in the module.

    Raises:
        InputError: if they are adapted, computed from others, quantised or elsewhere.
    """
    if hasattr(module, "base_layer"):
        raise InputError(
            f"{layer.label} carries an adapter ({type(module).__name__}). Merge it into the "
            f"weights first, with merge_and_unload()."
        )
    parameters = module._parameters
    weight = parameters.get("weight")
    computed = {"weight_orig", "weight_g", "weight_v"} & parameters.keys()
    if computed or hasattr(module, "parametrizations"):
        raise InputError(
            f"{layer.label} has weights that are computed from others ({type(module).__name__} "
            f"under weight_norm, spectral_norm, prune or a parametrisation). Make them permanent "
            f"first, with remove_parametrizations() or remove()."
        )
    if weight is None:
        quantised = is_linear(module) and not isinstance(module, nn.MultiheadAttention)
        quantised &= not any(map(is_linear, module.children()))
    else:
        quantised = not weight.is_floating_point() or type(weight) is not nn.Parameter
    if weight is not None and weight.is_meta:
        if offloaded:
            return
        raise InputError(
            f"{layer.label} has its weights elsewhere ({type(module).__name__} is offloaded or on "
            f"the meta device). Load the model onto one device first."
        )
    if quantised:
        raise InputError(
            f"{layer.label} has quantised weights ({type(module).__name__}), which cannot be cut. "
            f"Prune first, then quantise."
        )


def _is_shared_table(root: nn.Module, module: nn.Module) -> bool:
    """Whether a module is a table of position biases that other layers are handed as well."""
    owners = (m for m in root.modules() if computes_position_bias(m))
    return isinstance(module, nn.Embedding) and any(
        module is child for owner in owners for child in owner.children()
    )


@contextmanager
def _requiring_grad(tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [tensor.requires_grad for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.requires_grad_()
        yield
    finally:
        for tensor, required in zip(tensors, before, strict=True):
            tensor.requires_grad_(required)


def _follow(trail: _Trail, site: nn.Module, stack: ExitStack) -> None:
    """Watch the first call of a layer."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if trail.received is not None:
            return None
        given: dict[str | int, Any] = dict(enumerate(args))
        given.update(kwargs)
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
                # A node of its own: earlier layers may have used the same tensor.
                leaf = value if value.requires_grad else value.detach().requires_grad_()
                trail.arguments[name] = given[name] = leaf.view_as(leaf)
        return tuple(given[i] for i in range(len(args))), {k: given[k] for k in kwargs}

    def arrive(module: nn.Module, args: tuple[Any, ...]) -> None:
        if trail.received is None:
            trail.received = args[0]

    register = site.register_forward_pre_hook
    stack.callback(Replacement(enter).attach(register, with_kwargs=True))
    assert trail.layer.projection is not None
    stack.callback(Hook(arrive).attach(trail.layer.projection.register_forward_pre_hook))


def _division(trail: _Trail, site: nn.Module) -> LayerDivision:
    """Take the derivatives of each head's context and read the division off them."""
    layer = trail.layer
    tensors = [module.get_parameter(name) for module, name in trail.weights]
    supports = _supports(trail, [*tensors, *trail.arguments.values()])
    weights = [
        DividedWeight(dim, owners, module, name)
        for (module, name), support in zip(trail.weights, supports, strict=False)
        for dim, owners in _divided(support)
        if not (name == "bias" and is_linear(module))
    ]
    weights += [
        DividedWeight(0, weight.owners, weight.module, "bias")
        for weight in weights
        if weight.dim == _output_dim(weight.module)
        and isinstance(getattr(weight.module, "bias", None), nn.Parameter)
    ]
    cut = [weight.tensor for weight in weights]
    named = zip(trail.arguments.items(), supports[len(tensors) :], strict=True)
    arguments = [
        DividedArgument(dim, owners, name)
        for (name, argument), support in named
        for dim, owners in _divided(support)
        if not _depends_on(argument, cut)
    ]
    if computes_position_bias(site) and not arguments:
        arguments.append(DividedArgument(1, torch.eye(layer.heads).bool(), "position_bias"))
    weights.append(output_weight(layer))
    return LayerDivision(layer, trail.root, trail.scope, tuple(weights), tuple(arguments))


def output_weight(layer: LayerHeads) -> DividedWeight:
    """Divide the weight of W_O among the heads it reads.

    Args:
        layer: a layer whose projection is known.

    Returns:
        The weight.
    """
    assert layer.projection is not None
    owners = torch.eye(layer.heads).bool().repeat_interleave(layer.width, 1)
    dim = 0 if isinstance(layer.projection, Conv1D) else 1
    return DividedWeight(dim, owners, layer.projection, "weight")


def _output_dim(module: nn.Module) -> int | None:
    """Which dimension of a linear module's weight holds its outputs; None if it is not linear."""
    if isinstance(module, Conv1D):
        return 1
    return 0 if is_linear(module) else None


def _supports(trail: _Trail, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """For each tensor and each of its dimensions, where each head has a derivative: `[H, size]`."""
    layer, received = trail.layer, trail.received
    if received is None or not received.requires_grad:
        return [[] for _ in tensors]
    contexts = layer.contexts(received)
    generator = torch.Generator().manual_seed(0)
    mixture = torch.randn(contexts.shape, generator=generator).to(contexts)
    heads = []
    for head in range(layer.heads):
        total = (contexts[..., head, :] * mixture[..., head, :]).sum()
        grads = torch.autograd.grad(total, tensors, retain_graph=True, allow_unused=True)
        heads.append([_touched(g, t) for g, t in zip(grads, tensors, strict=True)])
    return [
        [torch.stack(along) for along in zip(*(head[i] for head in heads), strict=True)]
        for i in range(len(tensors) if heads else 0)
    ]


def _touched(gradient: Tensor | None, tensor: Tensor) -> list[Tensor]:
    """For each dimension, the indices at which a gradient is not zero."""
    if gradient is None:
        return [torch.zeros(size, dtype=torch.bool) for size in tensor.shape]
    touched = (gradient != 0).cpu()
    sizes = enumerate(touched.shape)
    return [touched.movedim(dim, 0).reshape(size, -1).any(1) for dim, size in sizes]


def _divided(supports: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    for dim, support in enumerate(supports):
        owners = head_layout(support)
        if owners is not None:
            yield dim, owners


def _depends_on(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    if not others:
        return False
    total = tensor.sum()
    grads = torch.autograd.grad(total, others, retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in grads)
