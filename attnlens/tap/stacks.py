"""Find the Transformer layers of a model by its structure, without a list of classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from attnlens.capture import Kind
from attnlens.tap.sites import Catalogue, Selection, Site, dispatches, looks_mixing, stack_of


@dataclass(frozen=True, eq=False)
class Layer(Site):
    """A Transformer layer in a model, named and counted like an attention module."""


def find_layers(catalogue: Catalogue) -> tuple[Layer, ...]:
    """List the layers of every stack of a model that mixes tokens.

    Layers are the outermost modules that can be checkpointed or, in a pretrained model without
    any, the members of its module lists.

    Args:
        catalogue: the modules of the model.

    Returns:
        The layers in module order; their index counts within their stack.
    """
    stacks: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in _candidates(catalogue.model):
        stacks.setdefault(stack_of(name), []).append((name, module))
    return tuple(
        Layer(name, module, stack, index, _layer_kind(catalogue, name, module))
        for stack, members in stacks.items()
        if any(_mixes_tokens(name, module) for name, module in members)
        for index, (name, module) in enumerate(members)
    )


def is_chosen(selection: Selection, layer: Layer, index: int) -> bool:
    """Tell whether a lens was asked for a layer, or for an attention module inside it.

    Args:
        selection: what the lens was asked for.
        layer: the layer.
        index: its index in the running forward.

    Returns:
        True if it was, or if no layers were named.
    """
    wanted, depth = selection.layers, selection.catalogue.depth(layer.stack)
    if wanted is None or index in wanted or index - depth in wanted:
        return True
    inside = f"{layer.name}."
    return any(isinstance(w, str) and f"{w}.".startswith(inside) for w in wanted)


def _candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that may be layers, in module order."""
    modules = dict(model.named_modules())
    roots = {"", *(name for name, module in modules.items() if isinstance(module, PreTrainedModel))}
    unclaimed, found = dict(modules), set[str]()
    for root in sorted(roots, key=len, reverse=True):  # inner models claim their modules first
        inside = {name: module for name, module in unclaimed.items() if _is_inside(name, root)}
        unclaimed = {name: module for name, module in unclaimed.items() if name not in inside}
        checkpointed = [n for n, m in inside.items() if isinstance(m, GradientCheckpointingLayer)]
        if checkpointed:
            found.update(_outermost(checkpointed))
        elif not any(_is_inside(name, root) for name in found):
            found.update(_outermost(_members(inside, modules)))
    return [(name, module) for name, module in modules.items() if name in found]


def _is_inside(name: str, root: str) -> bool:
    return name != root and (not root or name.startswith(f"{root}."))


def _members(inside: dict[str, nn.Module], modules: dict[str, nn.Module]) -> Iterator[str]:
    """Members of module lists that can be called."""
    for name, module in inside.items():
        parent = modules[name.rpartition(".")[0]]
        if isinstance(parent, nn.ModuleList) and not isinstance(module, nn.ModuleList):
            yield name


def _outermost(names: Iterable[str]) -> Iterator[str]:
    kept: set[str] = set()
    for name in names:  # parents come first
        parts = name.split(".")
        if not any(".".join(parts[:length]) in kept for length in range(1, len(parts))):
            kept.add(name)
            yield name


def _mixes_tokens(name: str, module: nn.Module) -> bool:
    names_of_list = looks_mixing(stack_of(name).removesuffix(".*"))
    return names_of_list or any(True for _ in _mixing_inside(module))


def _mixing_inside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, child in module.named_modules():
        if dispatches(child.__class__) or (path and looks_mixing(path)):
            yield path, child


def _layer_kind(catalogue: Catalogue, name: str, module: nn.Module) -> Kind:
    kinds = {catalogue.kind(f"{name}.{path}", child) for path, child in _mixing_inside(module)}
    return "decoder" if "decoder" in kinds else "encoder"
