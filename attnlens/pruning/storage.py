"""Save pruned models, load them again bit for bit, and export plans for other tools."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnlens.capture import Kind
from attnlens.errors import InputError
from attnlens.pruning.checkpoint import read_checkpoint, write_checkpoint, write_replaced
from attnlens.pruning.headed import output_weight
from attnlens.pruning.heads import Probe, find_heads
from attnlens.pruning.plan import Heads, require_same_in_shared_layers, resolve


def save_pruned(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model with pruned heads to a folder, as safetensors with the plan in the config.

    `from_pretrained` refuses such a folder, because the shapes are not those of the architecture;
    with `ignore_mismatched_sizes=True` it would make up the weights of the pruned layers. Load it
    with :func:`load_pruned`.

    Args:
        model: a `PreTrainedModel` after `prune_heads`.
        path: the folder; made if it does not exist.

    Raises:
        InputError: if the model has no pruned heads, or the path is a file.
    """
    write_checkpoint(model, _folder(path))


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
    """
    return read_checkpoint(_folder(path), model_class, attn_implementation)


def export_masked(
    model: nn.Module,
    heads: Heads,
    path: str | os.PathLike[str],
    *,
    inputs: Mapping[str, Any] | None = None,
    kinds: Iterable[Kind] | Kind | None = None,
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

    Raises:
        InputError: if a layer or head does not exist, layers that share weights are treated
            differently, or heads of the model were pruned.
    """
    layers = find_heads(Probe(model, inputs), kinds)
    plan = resolve(heads, layers)
    if not plan:
        raise InputError(f"heads names no head to silence. Got {heads!r}.")
    require_same_in_shared_layers(plan, layers)
    changed: dict[nn.Parameter, Tensor] = {}
    for layer in layers:
        if plan.of(layer):
            weight = output_weight(layer)
            silent = weight.owners[list(plan.of(layer))].any(0).nonzero()[:, 0]
            tensor = weight.tensor.detach()
            changed[weight.tensor] = tensor.index_fill(weight.dim, silent.to(tensor.device), 0)
    write_replaced(model, changed, _folder(path))


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if folder.is_file():
        raise InputError(f"path must be a folder. Got the file {folder}.")
    return folder
