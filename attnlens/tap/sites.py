"""Where attention runs in a model: attention modules and Transformer layers, by structure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from attnlens.capture import Kind
from attnlens.errors import InputError

_DISPATCH = frozenset({"get_interface", "ALL_ATTENTION_FUNCTIONS"})
_CROSS = re.compile(r"cross|enc_?dec_?att|encoder_att", re.IGNORECASE)
_MIXING = re.compile(r"att|fourier|mixer", re.IGNORECASE)
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")

Named = tuple[str, nn.Module]


@dataclass(frozen=True, eq=False)
class Site:
    """An attention module, or a whole Transformer layer, in a model.

    Attributes:
        name: qualified name of the module within the model the lens was given.
        stack: the name with its indices replaced by `*`.
        layer: index of its block in the model's list of blocks, whether or not all of them attend.
        kind: encoder or decoder self-attention, or cross-attention.
    """

    name: str
    module: nn.Module
    stack: str
    layer: int
    kind: Kind


@dataclass(frozen=True)
class Blocks:
    """The list of blocks that some modules are in; hybrids have blocks that do not attend.

    Attributes:
        names: the blocks in module order; the modules themselves where they are in no list.
        depth: number of parts of a block's name.
    """

    names: tuple[str, ...]
    depth: int

    @classmethod
    def around(cls, peers: Sequence[str], modules: Iterable[str], layers: Sequence[str]) -> Blocks:
        """Find the list that modules whose names differ by indices only are in.

        The last index that differs is the block's. Where none does, as for the only attention of
        a hybrid, it is that of the Transformer layer around it.

        Args:
            peers: the names of the modules.
            modules: the names of all modules of the model, in order.
            layers: the names of its Transformer layers.

        Returns:
            The list.
        """
        split = [name.split(".") for name in peers]
        differing = [i for i, parts in enumerate(zip(*split, strict=True)) if len({*parts}) > 1]
        if not differing and split:
            around = (name for name in layers if _is_inside(peers[0], name) or peers[0] == name)
            innermost = max(around, key=len, default="").split(".")
            differing = [i for i, part in enumerate(innermost) if part.isdigit()][-1:]
        if not differing:
            return cls(tuple(peers), 1 + max(map(len, split), default=0))
        depth = differing[-1] + 1
        pattern = re.compile(
            r"\.".join(
                r"\d+" if i in differing else re.escape(part)
                for i, part in enumerate(split[0][:depth])
            )
        )
        return cls(tuple(filter(pattern.fullmatch, modules)), depth)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.names)

    def index(self, name: str) -> int:
        """Return the index of the block that a module is, or is inside."""
        return self.names.index(".".join(name.split(".")[: self.depth]))


class Catalogue:
    """The modules of a model by name, and which stack, layer and kind each would be as a site.

    Attributes:
        model: the model.
        interface: the attention modules that use transformers' attention interface.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = dict(model.named_modules())
        self._pretrained = [
            name for name, module in self._modules.items() if isinstance(module, PreTrainedModel)
        ]
        self._decoders = _decoder_names(self._modules)
        config = next((inner.config for inner in pretrained_models(model)), None)
        self._declared: Any = getattr(config, "num_hidden_layers", 0)
        dispatching = [n for n, module in self._modules.items() if dispatches(module.__class__)]
        # Where some modules of a stack use the interface, these alone count as its layers.
        self._peers = {**_by_stack(self._modules), **_by_stack(dispatching)}
        self._sites: dict[str, Site] = {}
        self._blocks: dict[str, Blocks] = {}
        self.interface = tuple(map(self.site, dispatching))

    def site(self, name: str) -> Site:
        """Describe the module of a name as an attention site; always by the same object."""
        if name not in self._sites:
            stack = stack_of(name)
            peers = self._peers[stack]
            if name not in peers:  # runs its own attention where its peers use the interface
                peers.append(name)
            module = self._modules[name]
            kind, _ = self.kind(name)
            self._sites[name] = Site(name, module, stack, self._blocks_of(stack).index(name), kind)
        return self._sites[name]

    def layers(self) -> tuple[Site, ...]:
        """List the Transformer layers of every stack that mixes tokens.

        Layers are the outermost modules that can be checkpointed or, in a pretrained model without
        any, the members of its module lists.

        Returns:
            The layers in module order.
        """
        return tuple(
            Site(name, self._modules[name], stack, blocks.index(name), self._layer_kind(name))
            for stack, members in _by_stack(self._layer_names).items()
            if any(self._mixes_tokens(name) for name in members)
            for blocks in (Blocks.around(members, self._modules, self._layer_names),)
            for name in members
        )

    def has(self, name: str) -> bool:
        """Tell whether an attention module of this name may exist."""
        return name in self._peers.get(stack_of(name), ())

    def served_by(self, site: Site) -> Iterable[int]:
        """List the layers that a site may serve: its own, or every layer where it is shared."""
        depth = self.depth(site.stack)
        return range(depth) if depth > len(self._blocks_of(site.stack)) else (site.layer,)

    def kinds(self) -> set[Kind]:
        """List the kinds of attention that the names of modules promise."""
        return {
            self.kind(name)[0]
            for names in self._peers.values()
            for name in names
            if re.search("att", _leaf(name), re.IGNORECASE)
        }

    def depth(self, stack: str) -> int:
        """Count the blocks of a stack; a shared one serves as many as the config declares."""
        blocks = len(self._blocks_of(stack))
        shared = blocks == 1 and isinstance(self._declared, int)
        return max(1, self._declared) if shared else blocks

    def kind(self, name: str) -> tuple[Kind, str]:
        """Tell the kind of an attention module.

        Args:
            name: its name.

        Returns:
            The kind, and what tells it, in words.
        """
        module = self._modules[name]
        if getattr(module, "is_cross_attention", False):
            return "cross", "is_cross_attention is set"
        if any(map(_CROSS.search, name.split(".")[-2:])):
            return "cross", "it is named like cross-attention"
        for flag in ("is_decoder", "is_causal"):
            if getattr(module, flag, False) is True:
                return "decoder", f"{flag} is set"
        if name.startswith(self._decoders):
            return "decoder", "it is in the decoder of an encoder-decoder"
        owners = (n for n in self._pretrained if not n or name.startswith(f"{n}."))
        owner = max(owners, key=len, default=None)
        if owner is not None:
            pretrained: Any = self._modules[owner]
            if _only_generates(pretrained.config):
                return "decoder", f"{type(pretrained).__name__} is a causal language model"
        return "encoder", "nothing says that it is a decoder"

    def _layer_kind(self, name: str) -> Kind:
        module = self._modules[name]
        inside = (f"{name}.{path}" if path else name for path, _ in _mixing_inside(module))
        kinds = {self.kind(path)[0] for path in inside}
        return "decoder" if "decoder" in kinds else "encoder"

    def _blocks_of(self, stack: str) -> Blocks:
        """The list of blocks that the modules of a stack are in."""
        if stack not in self._blocks:
            peers = self._peers.get(stack, ())
            self._blocks[stack] = Blocks.around(peers, self._modules, self._layer_names)
        return self._blocks[stack]

    @cached_property
    def _layer_names(self) -> list[str]:
        """Names of the modules that may be layers, in module order."""
        roots = {"", *self._pretrained}
        unclaimed, layers = list(self._modules), set[str]()
        for root in sorted(roots, key=len, reverse=True):  # inner models claim their modules first
            inside = [name for name in unclaimed if _is_inside(name, root)]
            unclaimed = [name for name in unclaimed if not _is_inside(name, root)]
            checkpointed = [
                n for n in inside if isinstance(self._modules[n], GradientCheckpointingLayer)
            ]
            if checkpointed:
                layers.update(_outermost(checkpointed))
            elif not any(_is_inside(name, root) for name in layers):
                layers.update(_outermost(filter(self._is_list_member, inside)))
        return [name for name in self._modules if name in layers]

    def _is_list_member(self, name: str) -> bool:
        """Whether a module can be called and stands in a module list."""
        parent = self._modules[name.rpartition(".")[0]]
        return isinstance(parent, nn.ModuleList) and not isinstance(
            self._modules[name], nn.ModuleList
        )

    def _mixes_tokens(self, name: str) -> bool:
        of_list = _looks_mixing(stack_of(name).removesuffix(".*"))
        return of_list or any(True for _ in _mixing_inside(self._modules[name]))


def pretrained_models(model: nn.Module) -> list[PreTrainedModel]:
    """List the pretrained models in a model, itself included, outermost first."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def pretrained_inside(model: nn.Module) -> PreTrainedModel:
    """Find the outermost pretrained model: the model itself, or the first one inside it.

    Returns:
        The pretrained model.

    Raises:
        InputError: if there is none.
    """
    for pretrained in pretrained_models(model):
        return pretrained
    raise InputError(f"{type(model).__name__} has no pretrained model inside.")


def mixing_module(model: nn.Module) -> Named:
    """Find the first module that looks as if it mixed tokens, for error messages.

    Args:
        model: a model in which no attention was seen.

    Returns:
        Its qualified name and the module; the model itself if nothing looks like it.
    """
    for name, module in model.named_modules():
        if name and _looks_mixing(name):
            return name, module
    return "the model", model


@cache
def dispatches(cls: Any) -> bool:
    """Tell whether some method of a module class refers to the attention interface."""
    for base in cls.__mro__:
        if base is nn.Module or base is PreTrainedModel:
            break
        for attribute in vars(base).values():
            function = inspect.unwrap(attribute) if callable(attribute) else attribute
            if isinstance(function, FunctionType) and _DISPATCH & set(function.__code__.co_names):
                return True
    return False


def _by_stack(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names that differ by their indices only."""
    stacks: dict[str, list[str]] = {}
    for name in names:
        stacks.setdefault(stack_of(name), []).append(name)
    return stacks


def stack_of(name: str) -> str:
    """Replace the indices in the name of a module by `*`."""
    return _INDEX.sub("*", name)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _looks_mixing(name: str) -> bool:
    """Whether a module is named like attention, a Fourier transform or a mixer."""
    return _MIXING.search(_leaf(name)) is not None


def _mixing_inside(module: nn.Module) -> Iterator[Named]:
    for path, child in module.named_modules():
        if dispatches(child.__class__) or (path and _looks_mixing(path)):
            yield path, child


def _is_inside(name: str, root: str) -> bool:
    return name != root and (not root or name.startswith(f"{root}."))


def _outermost(names: Iterable[str]) -> Iterator[str]:
    outer: set[str] = set()
    for name in names:  # parents come first
        parts = name.split(".")
        if not any(".".join(parts[:length]) in outer for length in range(1, len(parts))):
            outer.add(name)
            yield name


def _only_generates(config: Any) -> bool:
    """Whether models of a configuration are decoders, whatever its values."""
    kind = config.model_type
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not hasattr(config, "is_decoder")
    bidirectional = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or (
        getattr(config, "attn_type", None) == "bi"  # XLNet
    )
    causal = causal or kind in MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING_NAMES
    return causal and not bidirectional and not getattr(config, "is_encoder_decoder", False)


def _decoder_names(modules: dict[str, nn.Module]) -> tuple[str, ...]:
    """Beginnings of the names in the decoder halves of encoder-decoders inside a model."""
    return tuple(
        f"{name}.{child}.".lstrip(".")
        for name, module in modules.items()
        if isinstance(module, PreTrainedModel)
        and getattr(module.config, "is_encoder_decoder", False)
        for child, _ in module.named_children()
        if "decoder" in child
    )
