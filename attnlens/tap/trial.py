"""A trial run of a model, on small inputs that its configuration describes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens.errors import InputError
from attnlens.tap.passing import output_tensors
from attnlens.tap.sites import pretrained_inside

_TOKENS = 12
_PADDING = 4


class Trial:
    """A forward pass on small inputs that leaves no trace in the model or the random state.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        inputs: keyword inputs of the model; made up for the pretrained model by default.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self._called = model
        if inputs is None:
            self._called = pretrained = pretrained_inside(model)
            inputs = example_inputs(pretrained)
        self._inputs = dict(inputs)

    def __call__(self) -> list[Tensor]:
        """Run the model in evaluation mode, always with the same random numbers.

        Returns:
            Every tensor it returned.
        """
        cuda = {p.device.index or 0 for p in self.model.parameters() if p.device.type == "cuda"}
        with evaluating(self.model), torch.random.fork_rng(sorted(cuda)):
            torch.manual_seed(0)
            return output_tensors(self._called(**self._inputs))


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Put every module back into training or evaluation mode, as it was, after a block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode for a block; afterwards every module is as it was."""
    with modes_restored(model):
        model.eval()
        yield


def example_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Make up two examples for a model, the second padded where the model takes a mask.

    Args:
        model: a pretrained model of text, images or audio.

    Returns:
        Keyword inputs.

    Raises:
        InputError: if the model's main input is of a kind that cannot be made up.
    """
    generator = torch.Generator().manual_seed(0)
    accepted = inspect.signature(model.forward).parameters
    main = model.main_input_name
    inputs: dict[str, Tensor] = {}
    if main == "input_ids" or "input_ids" in accepted:
        inputs |= _tokens(model.config, accepted, generator)
    if "pixel_values" in accepted and (main == "pixel_values" or _part(model.config, "vision")):
        inputs["pixel_values"] = _pixels(model.config, generator)
    if main == "input_values":
        inputs["input_values"] = torch.randn(2, 4000, generator=generator)
    if main not in inputs:
        raise InputError(
            f"{type(model).__name__} takes {main!r}, for which no example can be made up. Pass "
            f"inputs={{{main!r}: ...}}."
        )
    device = _device_of(model)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its inputs, also where its weights are kept elsewhere."""
    for module in model.modules():
        offloaded = getattr(module, "_hf_hook", None)
        device = getattr(offloaded, "execution_device", None)
        if device is not None and getattr(offloaded, "offload", False):
            return torch.device(device)
    return model.device


def _tokens(config: Any, accepted: Any, generator: torch.Generator) -> dict[str, Tensor]:
    text = _part(config, "text") or config
    size = min(int(getattr(text, "vocab_size", 100)), 30_000)
    ids = torch.randint(min(5, size - 1), size, (2, _TOKENS), generator=generator)
    inputs = {"input_ids": ids}
    if "attention_mask" in accepted:
        mask = torch.ones_like(ids)
        mask[1, -_PADDING:] = 0
        inputs["attention_mask"] = mask
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, : _TOKENS // 2].clone()
    return inputs


def _pixels(config: Any, generator: torch.Generator) -> Tensor:
    vision = _part(config, "vision") or config
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(2, channels, height, width, generator=generator)


def _part(config: Any, name: str) -> Any:
    return getattr(config, f"{name}_config", None)
