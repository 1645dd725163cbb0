"""Cut heads out of a model: weights, attributes that count them, and arguments shared by layers.

Everything that is done can be undone until it is kept, so that a cut that turns out wrong leaves
the model as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from attnlens.errors import CaptureError, InputError
from attnlens.pruning.division import DividedWeight, LayerDivision, computes_position_bias
from attnlens.tap.layout import HEAD_COUNTS
from attnlens.tap.sites import pretrained_models

RECORD = "attnlens_pruned"
_KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
_INNER_WIDTHS = ("all_head_size", "embed_dim", "head_size", "inner_dim", "split_size")
_SIZES: dict[type[nn.Module], dict[int, str]] = {
    nn.Linear: {0: "out_features", 1: "in_features"},
    Conv1D: {0: "nx", 1: "nf"},
    nn.Conv1d: {0: "out_channels", 1: "in_channels"},
    nn.Conv2d: {0: "out_channels", 1: "in_channels"},
    nn.Embedding: {1: "embedding_dim"},
}


class HeadArgument:
    """Hand an attention module only its remaining heads of an argument that layers share.

    The module's hooks are methods of this object. What the module passes on is the whole argument
    again, because the next layer may lack other heads.

    Args:
        name: keyword or position of the argument.
        dim: the dimension that holds the heads.
        keep: indices that remain.
    """

    def __init__(self, name: str | int, dim: int, keep: Sequence[int]) -> None:
        self.name = name
        self.dim = dim
        self.keep = list(keep)
        self._whole: Tensor | None = None
        self._part: Tensor | None = None

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks with an attention module, and return their handles."""
        return [
            module.register_forward_pre_hook(self.cut, with_kwargs=True),
            module.register_forward_hook(self.restore),
        ]

    def cut(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the remaining heads in the place of the argument; a pre-forward hook."""
        whole = args[self.name] if isinstance(self.name, int) else kwargs.get(self.name)
        if whole is None:
            whole = _computed_bias(module, args, kwargs)
        if whole is None:
            return None
        self._whole = whole
        keep = torch.tensor(self.keep, dtype=torch.long, device=whole.device)
        self._part = whole.index_select(self.dim, keep)
        if isinstance(self.name, int):
            return (*args[: self.name], self._part, *args[self.name + 1 :]), kwargs
        return args, {**kwargs, self.name: self._part}

    def restore(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the whole argument in the place of its part among the outputs; a forward hook."""
        whole, part = self._whole, self._part
        self._whole = self._part = None
        if part is None or not isinstance(output, tuple):
            return None
        return tuple(whole if _is_same(tensor, part) else tensor for tensor in output)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, from which the object is made again."""
        return {"name": self.name, "dim": self.dim, "keep": self.keep}


def _arguments_of(module: nn.Module) -> list[HeadArgument]:
    """What cuts arguments of an attention module already."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, HeadArgument)]


class Cut:
    """Changes to a model that can be undone.

    Args:
        model: the model to change.
        undo: takes what undoes each change; closing it before `pop_all` restores the model.
    """

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self._modules = dict(model.named_modules())
        self._undo = undo
        self._done: dict[int, set[int]] = {}  # dimensions along which a weight was cut
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self._modules.values():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, name))

    def remove(self, division: LayerDivision, pruned: Sequence[int]) -> None:
        """Remove heads of one layer, and note it on the layer's module.

        Args:
            division: what is divided among the heads of the layer.
            pruned: the heads to remove, as numbered now.
        """
        for weight in division.weights:
            self._cut_weight(weight, pruned)
        attributes = self._count_heads(division, pruned)
        site = self._modules[division.layer.site]
        for argument in division.arguments:
            self._cut_argument(site, argument.name, argument.dim, argument.kept(pruned).tolist())
        self._note(division, pruned, attributes)

    def _cut_weight(self, weight: DividedWeight, pruned: Sequence[int]) -> None:
        parameter = weight.tensor
        kept = weight.kept(pruned).to(parameter.device)
        done = self._done.get(id(parameter), set())
        if weight.dim in done:
            return  # tied to a weight of the same layer that was cut before
        shorter = parameter.detach().index_select(weight.dim, kept)
        replacement = nn.Parameter(shorter, requires_grad=parameter.requires_grad)
        places = self._places.pop(id(parameter))
        self._places[id(replacement)] = places
        self._done[id(replacement)] = {*done, weight.dim}
        for module, name in places:
            self._undo.callback(setattr, module, name, parameter)
            setattr(module, name, replacement)
            size = _size_attribute(module, weight.dim)
            if name == "weight" and size:
                _set(module, size, len(kept), self._undo)

    def _count_heads(
        self, division: LayerDivision, pruned: Sequence[int]
    ) -> dict[nn.Module, dict[str, int]]:
        """Adjust attributes that count heads, and return their new values by module."""
        layer = division.layer
        left = layer.heads - len(pruned)
        counts = {
            **{name: (layer.heads, left) for name in HEAD_COUNTS},
            **{n: (layer.heads // layer.group, left // layer.group) for n in _KEY_HEAD_COUNTS},
            **{n: (layer.heads * layer.width, left * layer.width) for n in _INNER_WIDTHS},
        }
        changed: dict[nn.Module, dict[str, int]] = {}
        for module in self._modules[division.scope].modules():
            for name, (before, after) in counts.items():
                if vars(module).get(name) == before:
                    _set(module, name, after, self._undo)
                    changed.setdefault(module, {})[name] = after
        return changed

    def _cut_argument(self, site: nn.Module, name: str | int, dim: int, keep: list[int]) -> None:
        for argument in _arguments_of(site):
            if (argument.name, argument.dim) == (name, dim):
                _set(argument, "keep", [argument.keep[index] for index in keep], self._undo)
                return
        for handle in HeadArgument(name, dim, keep).attach(site):
            self._undo.callback(handle.remove)

    def _note(
        self,
        division: LayerDivision,
        pruned: Sequence[int],
        attributes: Mapping[nn.Module, dict[str, int]],
    ) -> None:
        """Write on the layer's root what is needed to build it again, by attention module."""
        root = self._modules[division.root]
        paths = {module: path for path, module in root.named_modules()}
        site = self._modules[division.layer.site]
        others = vars(root).get(RECORD, {})
        before = others.get(paths[site], {})
        total = before.get("heads", division.layer.heads)
        gone = set(before.get("pruned", ()))
        left = [head for head in range(total) if head not in gone]
        shapes = {
            f"{paths[w.module]}.{w.name}".lstrip("."): list(w.tensor.shape)
            for w in division.weights
        }
        counts = {paths[module]: values for module, values in attributes.items()}
        record = {
            "heads": total,
            "pruned": sorted(gone | {left[head] for head in pruned}),
            "shapes": {**before.get("shapes", {}), **shapes},
            "attributes": {**before.get("attributes", {}), **counts},
            "arguments": [argument.to_dict() for argument in _arguments_of(site)],
        }
        _set(root, RECORD, {**others, paths[site]: record}, self._undo)


def note_in_config(model: nn.Module, undo: ExitStack) -> None:
    """Write the records of a pruned model into its configuration, where checkpoints keep them.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        undo: takes what undoes the change.
    """
    for pretrained in pretrained_models(model)[:1]:
        _set(pretrained.config, RECORD, records(pretrained), undo)


def records(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Collect what was noted about the pruned layers of a model.

    Args:
        model: any module.

    Returns:
        Qualified module name → name of an attention module in it → record, ready for JSON; empty
        if nothing was pruned.
    """
    return {
        name: vars(module)[RECORD]
        for name, module in model.named_modules()
        if RECORD in vars(module)
    }


def rebuild(model: nn.Module, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a model as its configuration describes it the shapes of its pruned self.

    The resized weights hold no values; load them next.

    Args:
        model: just built, in use nowhere.
        recorded: what :func:`records` returned for the pruned model.

    Raises:
        InputError: if the records do not belong to such a model.
    """
    try:
        for name, layers in recorded.items():
            root = model.get_submodule(name)
            for site, record in layers.items():
                _rebuild_layer(root, site, record)
            setattr(root, RECORD, dict(layers))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"The head plan in the configuration is not one of {type(model).__name__}: {error}."
        ) from error


def _rebuild_layer(root: nn.Module, site: str, record: Mapping[str, Any]) -> None:
    for path, shape in record["shapes"].items():
        owner, _, name = path.rpartition(".")
        module = root.get_submodule(owner)
        parameter = getattr(module, name)
        for dim, size in enumerate(shape if name == "weight" else ()):
            attribute = _size_attribute(module, dim)
            if attribute and size != parameter.shape[dim]:
                setattr(module, attribute, size)
        parameter.data = parameter.new_empty(shape)
    for path, values in record["attributes"].items():
        for name, value in values.items():
            setattr(root.get_submodule(path), name, value)
    for argument in record["arguments"]:
        HeadArgument(**argument).attach(root.get_submodule(site))


def _set(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Set an attribute, and say how to put back what was there."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _is_same(tensor: Any, part: Tensor) -> bool:
    """Whether a tensor is another one, or a view of all of it."""
    if tensor is part or not isinstance(tensor, Tensor):
        return tensor is part
    return tensor.shape == part.shape and tensor.data_ptr() == part.data_ptr()


def _size_attribute(module: nn.Module, dim: int) -> str | None:
    """The attribute in which a module notes a dimension of its weight."""
    for kind, names in _SIZES.items():
        if isinstance(module, kind):
            return names.get(dim)
    return None


def _computed_bias(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The position bias that the first layer would compute for itself and the layers after it."""
    if not computes_position_bias(module):
        return None
    if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
        raise CaptureError(
            f"{type(module).__name__} lacks heads and cannot run with a key-value cache. Pass "
            f"use_cache=False."
        )
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    length = hidden.shape[1]
    compute: Any = module.compute_bias
    bias: Tensor = compute(length, length, device=hidden.device)
    return bias
