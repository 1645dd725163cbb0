"""What models and their modules return, as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from attnlens.errors import InputError
from attnlens.tap.hooks import Hook


def output_tensors(output: Any) -> list[Tensor]:
    """Flatten what a model returned.

    Args:
        output: a tensor, a model output, or nested tuples, lists and dictionaries of them.

    Returns:
        The tensors in order.
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, ModelOutput):
        output = output.to_tuple()
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in output_tensors(part)]
    return []


def outputs_of(
    model: nn.Module, names: Iterable[str], run: Callable[[], Any]
) -> dict[str, list[Tensor]]:
    """Run a model and keep what some of its modules return.

    Args:
        model: the model.
        names: qualified names; those that are no module are ignored.
        run: calls the model.

    Returns:
        For each module the outputs of its calls.
    """
    modules = dict(model.named_modules())
    kept: dict[str, list[Tensor]] = {name: [] for name in names if name in modules}

    def keeper(name: str) -> Callable[..., None]:
        return lambda module, args, output: kept[name].extend(output_tensors(output)[:1])

    handles = [modules[name].register_forward_hook(Hook(keeper(name))) for name in kept]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return kept


def pretrained_inside(model: nn.Module) -> PreTrainedModel:
    """Find the outermost pretrained model.

    Args:
        model: any module.

    Returns:
        The model itself or the first pretrained model inside it.

    Raises:
        InputError: if there is none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise InputError(f"{type(model).__name__} has no pretrained model inside.")
