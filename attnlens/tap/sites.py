"""Find the attention modules of a model and say which layer and stack each belongs to."""

from __future__ import annotations

import inspect
import re
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
KINDS: frozenset[Kind] = frozenset(("encoder", "decoder", "cross"))
_CROSS = re.compile(r"cross|enc_?dec_?att|encoder_att", re.IGNORECASE)
_MIXING = re.compile(r"att|fourier|mixer", re.IGNORECASE)


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


class Catalogue:
    """The modules of a model by name, and which stack, layer and kind each would be as a site.

    Args:
        model: any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._decoders = _decoder_names(model)
        inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        self._config = getattr(inner, "config", None)
        self._peers: dict[str, list[str]] = {}
        for name, _ in model.named_modules():
            self._peers.setdefault(stack_of(name), []).append(name)
        self._sites: dict[str, Site] = {}
        dispatching = [(n, m) for n, m in model.named_modules() if dispatches(m.__class__)]
        stacks = {stack_of(name) for name, _ in dispatching}
        for stack in stacks:
            kept = {name for name, _ in dispatching}
            self._peers[stack] = [name for name in self._peers[stack] if name in kept]
        self.interface = tuple(self.site(name, module) for name, module in dispatching)

    def site(self, name: str, module: nn.Module) -> Site:
        """Describe a module as an attention site.

        Args:
            name: its qualified name in the model.
            module: the module.

        Returns:
            The site, the same object for the same name.
        """
        if name not in self._sites:
            stack = stack_of(name)
            layer = self._peers[stack].index(name)
            self._sites[name] = Site(name, module, stack, layer, self.kind(name, module))
        return self._sites[name]

    def kind(self, name: str, module: nn.Module) -> Kind:
        """Tell what kind of attention a module of this name runs.

        Args:
            name: its qualified name in the model.
            module: the module.

        Returns:
            The kind; a decoder's is told by its flags, its config or its place in the model.
        """
        return _kind(name, module, self._decoders)

    def has(self, name: str) -> bool:
        """Tell whether a module of this name exists."""
        return name in self._peers.get(stack_of(name), ())

    def served_by(self, site: Site) -> Iterable[int]:
        """Name the layers a site may serve: its own, or all of its stack where it is shared."""
        depth = self.depth(site.stack)
        return range(depth) if depth > len(self._peers[site.stack]) else (site.layer,)

    def kinds(self) -> set[Kind]:
        """Name the kinds of attention that the names of modules promise."""
        names = (name for peers in self._peers.values() for name in peers)
        modules = dict(self.model.named_modules())
        return {
            _kind(name, modules[name], self._decoders)
            for name in names
            if re.search("att", name.rsplit(".", 1)[-1], re.IGNORECASE)
        }

    def depth(self, stack: str) -> int:
        """Count the layers of a stack; shared modules serve as many as the config declares."""
        modules = len(self._peers.get(stack, ()))
        declared = getattr(self._config, "num_hidden_layers", 0)
        return max(modules, declared) if isinstance(declared, int) and modules == 1 else modules


@dataclass(frozen=True)
class Selection:
    """Which attention a lens looks at.

    Attributes:
        catalogue: the modules of the model.
        layers: layer indices (negative ones from the end of each stack) and module names, or
            None for all.
        kinds: the kinds of attention.
    """

    catalogue: Catalogue
    layers: frozenset[int | str] | None
    kinds: frozenset[Kind]

    def takes(self, site: Site) -> bool:
        """Tell whether some layer of a site may be wanted."""
        if site.kind not in self.kinds:
            return False
        served = self.catalogue.served_by(site)
        return any(self.accepts(site, layer) for layer in served)

    def accepts(self, site: Site, layer: int) -> bool:
        """Tell whether a layer of a site is wanted."""
        if self.layers is None or site.name in self.layers:
            return True
        return layer in self.layers or layer - self.catalogue.depth(site.stack) in self.layers


def select(
    catalogue: Catalogue,
    layers: Iterable[int | str] | None,
    kinds: Iterable[Kind] | None,
) -> Selection:
    """Check what a user asks for against the modules there are.

    Args:
        catalogue: the modules of the model.
        layers: layer indices and module names; None takes all.
        kinds: kinds of attention. None takes the encoder's self-attention, or where a model has
            none, every self-attention.

    Returns:
        The selection.

    Raises:
        InputError: if a layer, name or kind cannot match anything.
    """
    known = {site.kind for site in catalogue.interface}
    chosen: set[Kind]
    if kinds is None:
        chosen = {"encoder", "decoder"} if known and "encoder" not in known else {"encoder"}
    else:
        chosen = set(kinds)
        if not chosen or chosen - KINDS:
            raise InputError(f"kinds must be among {sorted(KINDS)}. Got {sorted(chosen)}.")
        there = known | catalogue.kinds()
        if there and not chosen & there:
            raise InputError(f"The model has attention of kinds {sorted(there)} only.")
    wanted = None if layers is None else frozenset(layers)
    selection = Selection(catalogue, wanted, frozenset(chosen))
    for layer in wanted or ():
        _check_layer(layer, selection)
    if wanted is not None and not wanted:
        raise InputError("layers is empty, so there is nothing to look at; None looks at all.")
    return selection


def forward_roots(model: nn.Module) -> list[nn.Module]:
    """List the modules whose call is a forward pass: the model and every pretrained one inside.

    Args:
        model: the model the lens was given.

    Returns:
        Distinct modules, outermost first.
    """
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [model, *(module for module in inner if module is not model)]


def mixing_module(model: nn.Module) -> tuple[str, nn.Module]:
    """Name the first module that looks as if it mixed tokens, for error messages.

    Args:
        model: a model in which no attention was seen.

    Returns:
        Its qualified name and the module; the model itself if nothing looks like it.
    """
    for name, module in model.named_modules():
        if name and looks_mixing(name):
            return name, module
    return "the model", model


def looks_mixing(name: str) -> bool:
    """Tell whether a module is named like one that mixes tokens.

    Args:
        name: its qualified name; the last word counts.

    Returns:
        True for attention, Fourier transforms and mixers.
    """
    return _MIXING.search(name.rsplit(".", 1)[-1]) is not None


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


def stack_of(name: str) -> str:
    """Replace the indices in a qualified name by `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _check_layer(layer: int | str, selection: Selection) -> None:
    """Raise where a layer index or name can match no attention module."""
    catalogue = selection.catalogue
    sites = [site for site in catalogue.interface if site.kind in selection.kinds]
    example = f" Names look like {sites[0].name!r}." if sites else ""
    if isinstance(layer, str):
        inside = [site.name for site in sites if site.name.startswith(f"{layer}.")]
        if not catalogue.has(layer) or inside:
            what = f"holds attention at {inside[0]!r}" if inside else "is no module of the model"
            raise InputError(f"layers={layer!r} {what}.{example}")
        return
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise InputError(f"layers holds indices and module names. Got {layer!r}.")
    depth = max((catalogue.depth(site.stack) for site in sites), default=None)
    if depth is not None and not -depth <= layer < depth:
        raise InputError(
            f"layers={layer!r} matches no attention module: there are {depth} layers.{example}"
        )


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
    leaf = name.split(".")[-2:]
    if getattr(module, "is_cross_attention", False) or any(map(_CROSS.search, leaf)):
        return "cross"
    decoder = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    if name.startswith(decoders) or decoder is True:
        return "decoder"
    return "encoder"
