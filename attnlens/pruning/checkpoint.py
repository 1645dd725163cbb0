"""Pruned models on disk: a configuration that says what was cut, and the weights that are left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from safetensors import torch as tensor_files
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from attnlens.errors import InputError
from attnlens.files import write_tensors
from attnlens.pruning.surgery import RECORD, rebuild, records

_WEIGHTS = "model.safetensors"


def write_checkpoint(model: nn.Module, folder: Path) -> None:
    """Write configuration and weights of a pruned model.

    Args:
        model: a pretrained model with pruned heads.
        folder: where to; made if it does not exist.

    Raises:
        InputError: if the model is no `PreTrainedModel`, or none of its heads was pruned.
    """
    model = _pretrained(model)
    noted = records(model)
    if not noted:
        raise InputError(f"{type(model).__name__} has no pruned heads. Use save_pretrained.")
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    setattr(config, RECORD, noted)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    write_tensors(folder / _WEIGHTS, _distinct(model.state_dict()), {"format": "pt"})


def read_checkpoint(
    folder: Path, model_class: type[PreTrainedModel] | None, implementation: str | None
) -> PreTrainedModel:
    """Build a pruned model and load its weights, every one of them and no other.

    Args:
        folder: what :func:`write_checkpoint` wrote.
        model_class: class of the model; by default the one the configuration names.
        implementation: attention implementation; by default that of the class.

    Returns:
        The model in evaluation mode.

    Raises:
        InputError: if the folder holds no pruned model, or weights that do not fit it.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        tensors = tensor_files.load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"Cannot read a pruned model from {folder}: {error}") from error
    noted = getattr(config, RECORD, None)
    if not noted:
        raise InputError(
            f"{folder} holds no pruned model: its configuration has no {RECORD}. Use "
            f"from_pretrained."
        )
    cls = _class_of(config) if model_class is None else model_class
    options = {} if implementation is None else {"attn_implementation": implementation}
    with torch.random.fork_rng([]):
        model = cast(PreTrainedModel, cls._from_config(config, **options))
    rebuild(model, noted)
    _load(model, tensors, folder)
    return model.eval()


def write_replaced(model: nn.Module, changed: Mapping[nn.Parameter, Tensor], folder: Path) -> None:
    """Save a model with `save_pretrained`, some weights replaced in the file only.

    Args:
        model: a pretrained model; not changed.
        changed: replacements by parameter.
        folder: where to.

    Raises:
        InputError: if the model is no `PreTrainedModel`, or some of its heads were pruned.
    """
    model = _pretrained(model)
    if records(model):
        raise InputError(
            "The model has pruned heads, so no other tool can read it. Export the unpruned model."
        )
    replacements = {id(parameter): tensor for parameter, tensor in changed.items()}
    state = {
        name: replacements.get(id(tensor), tensor.detach())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    model.save_pretrained(folder, state_dict=state)


def _pretrained(model: nn.Module) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"model must be a PreTrainedModel to be saved. Got {type(model).__name__}: pass the "
            f"pretrained model inside."
        )
    return model


def _class_of(config: Any) -> type[PreTrainedModel]:
    names = getattr(config, "architectures", None) or [""]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise InputError(f"transformers has no class {names[0]!r}. Pass model_class=.")
    return cast(type[PreTrainedModel], cls)


def _distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name; tied weights share memory."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen or not tensor.numel():
            kept[name] = tensor.contiguous()
        seen.add(key)
    return kept


def _load(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name in state and state[name].dtype != tensor.dtype:
            state[name].data = state[name].data.to(tensor.dtype)
    loaded = {id(state[name]) for name in tensors if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in loaded]
    try:
        _, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise InputError(f"The weights in {folder} do not fit: {error}") from error
    if missing or unexpected:
        raise InputError(
            f"The weights in {folder} do not fit: missing {missing[:3]}, unknown {unexpected[:3]}."
        )
