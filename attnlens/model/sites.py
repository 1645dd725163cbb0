"""Find the attention modules of a model and say which layer and stack each belongs to."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attnlens.capture import Kind
from attnlens.errors import InputError

_DISPATCH = frozenset({"get_interface", "ALL_ATTENTION_FUNCTIONS"})
_CROSS = re.compile(r"cross|enc_?dec_?att|encoder_att", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Site:
    """An attention module in a model.

    Attributes:
        name: qualified name within the model the lens was given.
        module: the module.
        stack: the name with its indices replaced by `*`.
        layer: index among the sites of its stack, in module order.
        kind: encoder or decoder self-attention, or cross-attention.
    """

    name: str
    module: nn.Module
    stack: str
    layer: int
    kind: Kind


def interface_sites(model: nn.Module) -> list[Site]:
    """List the modules that dispatch through transformers' attention interface.

    They are recognised by their code, not by class name: some method of the class refers to the
    interface.

    Args:
        model: any module.

    Returns:
        The sites in module order; a module that appears twice is listed once.
    """
    return label_sites(model, [(n, m) for n, m in model.named_modules() if dispatches(m.__class__)])


def label_sites(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> list[Site]:
    """Number attention modules within their stacks and name their kind.

    Args:
        model: the model they belong to.
        modules: `(qualified name, module)` in module order.

    Returns:
        One site per module.
    """
    decoders = _decoder_names(model)
    layers: dict[str, int] = {}
    sites = []
    for name, module in modules:
        stack = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        layer = layers.get(stack, 0)
        layers[stack] = layer + 1
        sites.append(Site(name, module, stack, layer, _kind(name, module, decoders)))
    return sites


@dataclass(frozen=True)
class Selection:
    """The sites a lens looks at, and which of their layers.

    Attributes:
        sites: chosen sites.
        wanted: pairs of stack and layer, or None for every layer of the sites.
    """

    sites: tuple[Site, ...]
    wanted: frozenset[tuple[str, int]] | None = None

    def accepts(self, stack: str, layer: int) -> bool:
        """Tell whether a layer of a stack was asked for."""
        return self.wanted is None or (stack, layer) in self.wanted


def select_sites(
    model: nn.Module,
    sites: list[Site],
    layers: Iterable[int | str] | None,
    kinds: Iterable[Kind] | None,
) -> Selection:
    """Choose sites by layer index or name and by kind.

    Args:
        model: the model they belong to.
        sites: all sites of the model.
        layers: layer indices (negative ones count from the end of each stack) and module names;
            None takes all.
        kinds: kinds of attention to take. None takes the encoder's self-attention, or where a
            model has none, every self-attention.

    Returns:
        The selection.

    Raises:
        InputError: if a layer or name matches nothing, or nothing is left.
    """
    sites = _of_kind(sites, kinds)
    if layers is None:
        return Selection(tuple(sites))
    depth, shared = _depths(model, sites)
    wanted: set[tuple[str, int]] = set()
    for layer in layers:
        found = {
            (stack, index)
            for stack, size in depth.items()
            for index in _indices(layer, stack, size, sites, stack in shared)
        }
        if not found:
            raise InputError(
                f"layers={layer!r} matches no attention module. There are "
                f"{max(depth.values(), default=0)} layers; names look like {sites[0].name!r}."
            )
        wanted |= found
    if not wanted:
        raise InputError("layers is empty, so there is nothing to look at; None looks at all.")
    stacks = {stack for stack, _ in wanted}
    chosen = [
        site
        for site in sites
        if (site.stack, site.layer) in wanted or site.stack in shared & stacks
    ]
    return Selection(tuple(chosen), frozenset(wanted))


def forward_roots(model: nn.Module) -> list[nn.Module]:
    """List the modules whose call is a forward pass: the model and every pretrained one inside.

    Args:
        model: the model the lens was given.

    Returns:
        Distinct modules, outermost first.
    """
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [model, *(module for module in inner if module is not model)]


@cache
def dispatches(cls: Any) -> bool:
    """Tell whether some method of a module class refers to the attention interface.

    Args:
        cls: a module class.

    Returns:
        True if instances call the interface themselves.
    """
    for base in cls.__mro__:
        if base is nn.Module or base is PreTrainedModel:
            break
        for attribute in vars(base).values():
            function = inspect.unwrap(attribute) if callable(attribute) else attribute
            if isinstance(function, FunctionType) and _DISPATCH & set(function.__code__.co_names):
                return True
    return False


def _of_kind(sites: list[Site], kinds: Iterable[Kind] | None) -> list[Site]:
    if kinds is None:
        encoder = [site for site in sites if site.kind == "encoder"]
        return encoder or [site for site in sites if site.kind != "cross"] or sites
    wanted = set(kinds)
    chosen = [site for site in sites if site.kind in wanted]
    if not chosen:
        found = sorted({site.kind for site in sites})
        raise InputError(f"The model has no attention of kind {sorted(wanted)}; it has {found}.")
    return chosen


def _depths(model: nn.Module, sites: list[Site]) -> tuple[dict[str, int], set[str]]:
    """Number of layers of each stack, and the stacks whose modules serve several layers."""
    modules = Counter(site.stack for site in sites)
    encoder = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    declared = getattr(getattr(encoder, "config", None), "num_hidden_layers", 0)
    if len(modules) > 1 or not isinstance(declared, int):
        return dict(modules), set()
    depth = {stack: max(count, declared) for stack, count in modules.items()}
    return depth, {stack for stack, size in depth.items() if size > modules[stack]}


def _indices(
    layer: int | str, stack: str, size: int, sites: list[Site], shared: bool
) -> Iterable[int]:
    """Layers of one stack that a user's index or name stands for."""
    if isinstance(layer, int):
        return [layer % size] if -size <= layer < size else []
    named = [site for site in sites if site.stack == stack and site.name == layer]
    if named and shared:
        return range(size)
    return [site.layer for site in named]


def _decoder_names(model: nn.Module) -> tuple[str, ...]:
    """Qualified names of the decoder halves of encoder-decoders inside a model."""
    names = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(module, PreTrainedModel) and getattr(config, "is_encoder_decoder", False):
            for child, _ in module.named_children():
                if "decoder" in child:
                    names.append(f"{name}.{child}." if name else f"{child}.")
    return tuple(names)


def _kind(name: str, module: nn.Module, decoders: tuple[str, ...]) -> Kind:
    leaf = name.rsplit(".", 2)[-2:]
    if getattr(module, "is_cross_attention", False) or any(map(_CROSS.search, leaf)):
        return "cross"
    if name.startswith(decoders) or getattr(module, "is_decoder", False):
        return "decoder"
    return "encoder"
