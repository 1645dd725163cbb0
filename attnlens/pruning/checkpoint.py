"""Pruned models on disk: a configuration that says what was cut, and the weights that are left.

save_pruned(model, "pruned")
model = load_pruned("pruned")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import torch as tensor_files
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.utils import CONFIG_NAME

from attnlens.errors import InputError
from attnlens.files import failures, make_folder, read_json
from attnlens.pruning.division import output_weight, require_plain
from attnlens.pruning.heads import find_heads
from attnlens.pruning.plan import Heads, require_same_in_shared_layers, resolve
from attnlens.pruning.surgery import RECORD, rebuild, records
from attnlens.tap.selection import Kinds
from attnlens.tap.trial import Trial

_WEIGHTS = "model.safetensors"


def is_pruned(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds a model with pruned heads, by its configuration.

    Args:
        path: the folder.

    Returns:
        False also where there is no readable configuration.

    Examples:
        >>> is_pruned(folder)
        False
    """
    config = Path(path) / CONFIG_NAME
    with suppress(InputError, OSError, ValueError):
        document = read_json(config, "a configuration") if config.is_file() else None
        return isinstance(document, dict) and bool(document.get(RECORD))
    return False


def save_pruned(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a model with pruned heads to a folder, as safetensors with the plan in the config.

    `from_pretrained` refuses such a folder, because the shapes are not those of the architecture;
    with `ignore_mismatched_sizes=True` it would make up the weights of the pruned layers. Load it
    with :func:`load_pruned`.

    Args:
        model: a `PreTrainedModel` after `prune_heads`.
        path: the folder; made if it does not exist.
        overwrite: write into a folder that holds something. The folder that the model came from is
            refused nevertheless.

    Raises:
        InputError: if the model has no pruned heads, or the folder cannot or must not be written.

    Examples:
        >>> smaller = copy.deepcopy(model)
        >>> report = prune_heads(smaller, {0: [3]})
        >>> save_pruned(smaller, folder / "pruned")
        >>> load_pruned(folder / "pruned").num_parameters() == smaller.num_parameters()
        True
    """
    model = _pretrained(model)
    recorded = records(model)
    if not recorded:
        raise InputError(f"{type(model).__name__} has no pruned heads. Use save_pretrained.")
    setattr(model.config, RECORD, recorded)
    # Key names as the model has them, and all weights in one file.
    _save(model, path, overwrite, save_original_format=False, max_shard_size="100TB")


def load_pruned(
    path: str | os.PathLike[str],
    *,
    model_class: Any = None,
    attn_implementation: str | None = None,
) -> Any:
    """Load a model that :func:`save_pruned` wrote, or a checkpoint of one from a `Trainer`.

    Args:
        path: the folder.
        model_class: class of the model; by default the one the configuration names.
        attn_implementation: as for `from_pretrained`.

    Returns:
        The model in evaluation mode, with bit-identical outputs; it can be trained and pruned
        further.

    Raises:
        InputError: if the folder holds no pruned model, or weights that do not fit it exactly.

    Examples:
        >>> smaller = copy.deepcopy(model)
        >>> report = prune_heads(smaller, {0: [3]})
        >>> save_pruned(smaller, folder / "pruned")
        >>> type(load_pruned(folder / "pruned")).__name__
        'BertModel'
    """
    folder = Path(path)
    try:
        config = AutoConfig.from_pretrained(folder)
        tensors = tensor_files.load_file(folder / _WEIGHTS)
    except Exception as error:  # transformers raises whatever a damaged configuration leads to
        raise InputError(f"Cannot read a pruned model from {folder}: {error}") from error
    recorded = getattr(config, RECORD, None)
    if not recorded:
        raise InputError(
            f"{folder} holds no pruned model: its configuration has no {RECORD}. Use "
            f"from_pretrained."
        )
    cls = _class_of(config) if model_class is None else model_class
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng([]):
        model = cls._from_config(config, **options)
    rebuild(model, recorded)
    _load(model, tensors, folder)
    return model.eval()


def export_masked(
    model: nn.Module,
    heads: Heads,
    path: str | os.PathLike[str],
    *,
    inputs: Mapping[str, Any] | None = None,
    kinds: Kinds = None,
    overwrite: bool = False,
) -> None:
    """Save a model with some heads silenced, for tools that know nothing of pruning.

    The columns of W_O that read these heads are zero in the files; all shapes are as ever, so
    `from_pretrained` loads them, and outputs equal those of `mask_heads`. The model at hand is not
    changed.

    Args:
        model: a `PreTrainedModel`.
        heads: `{layer: [head, …]}`, a boolean `[L, H]` tensor, or a plan.
        path: the folder.
        inputs: small keyword inputs of the model, to find the heads; made up by default.
        kinds: kinds of attention, as for a lens.
        overwrite: write into a folder that holds something, unless the model came from it.

    Raises:
        InputError: if a layer or head does not exist, layers that share weights are treated
            differently, heads of the model were pruned, or the folder must not be written.

    Examples:
        >>> export_masked(model, {0: [3]}, folder / "masked")
        >>> usual = type(model).from_pretrained(folder / "masked")
        >>> usual.num_parameters() == model.num_parameters()
        True
    """
    layers = find_heads(Trial(model, inputs), kinds)
    plan = resolve(heads, layers)
    if not plan:
        raise InputError(f"heads names no head to silence. Got {heads!r}.")
    require_same_in_shared_layers(plan, layers)
    model = _pretrained(model)
    if records(model):
        raise InputError(
            "The model has pruned heads, so no other tool can read it. Export the unpruned model."
        )
    silenced: dict[int, Tensor] = {}
    for layer in layers:
        if plan.of(layer):
            assert layer.projection is not None
            require_plain(layer.projection, layer, offloaded=True)
            weight = output_weight(layer)
            tensor = weight.tensor.detach()
            if tensor.is_meta:
                tensor = load_offloaded_parameter(model, f"{layer.name}.weight")
            columns = weight.used_by(plan.of(layer)).to(tensor.device)
            silenced[id(weight.tensor)] = tensor.index_fill(weight.dim, columns, 0)
    state = {
        name: silenced.get(id(tensor), tensor.detach())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    _save(model, path, overwrite, state_dict=state)


def _save(
    model: PreTrainedModel, path: str | os.PathLike[str], overwrite: bool, **options: Any
) -> None:
    source = model.config.name_or_path
    folder = make_folder(path, inputs=[source] if source else [], overwrite=overwrite)
    with failures("write", folder):
        model.save_pretrained(folder, **options)


def _pretrained(model: nn.Module) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"model must be a PreTrainedModel to be saved. Got {type(model).__name__}: pass the "
            f"pretrained model inside."
        )
    return model


def _class_of(config: Any) -> Any:
    names = getattr(config, "architectures", None) or [""]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise InputError(f"transformers has no class {names[0]!r}. Pass model_class=.")
    return cls


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
