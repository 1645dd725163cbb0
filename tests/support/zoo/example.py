"""Build a tiny model of any registered architecture, with its inputs."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from tests.support.zoo.audio import audio
from tests.support.zoo.catalogue import Architecture, Catalogue, Recipe
from tests.support.zoo.decoders import decoder
from tests.support.zoo.dense import dense
from tests.support.zoo.detection import detection
from tests.support.zoo.encoder_decoder import encoder_decoder
from tests.support.zoo.inputs import default_inputs
from tests.support.zoo.multimodal import multimodal
from tests.support.zoo.packed import packed
from tests.support.zoo.text import text
from tests.support.zoo.time_series import time_series
from tests.support.zoo.video import video
from tests.support.zoo.vision import vision

_CATALOGUES = (
    text,
    vision,
    video,
    packed,
    audio,
    multimodal,
    encoder_decoder,
    detection,
    dense,
    time_series,
    decoder,
)


def select(catalogues: Iterable[Catalogue], known: Container[str]) -> dict[str, Architecture]:
    """Return the architectures whose model type is known.

    Args:
        catalogues: Where the architectures are registered.
        known: The model types that can be built.

    Returns:
        The architectures by model type, in the order of the catalogues.

    Raises:
        ValueError: If a model type is registered in two catalogues.
    """
    selected: dict[str, Architecture] = {}
    for catalogue in catalogues:
        for name, architecture in catalogue.architectures.items():
            if name in selected:
                raise ValueError(
                    f"{name!r} is registered as {selected[name].modality} and as "
                    f"{catalogue.modality}: remove one."
                )
            if name in known:
                selected[name] = architecture
    return selected


_ARCHITECTURES = select(_CATALOGUES, CONFIG_MAPPING)

NAMES: tuple[str, ...] = tuple(_ARCHITECTURES)

_SEED = 0
# Standard deviation of the perturbation that moves biases off zero and norm weights off one.
_PERTURBATION = 0.05


@dataclass(frozen=True)
class Example:
    """A tiny model with the inputs of one forward pass.

    Attributes:
        name: Model type.
        modality: Name of the catalogue, e.g. "text".
        model: The model, in eval mode.
        inputs: Arguments of its forward pass: two examples, the second one padded wherever
            the architecture takes a mask. The forward passes of big_bird, bigbird_pegasus,
            informer, reformer, vilt and vits draw random numbers: seed before comparing.
        padding_leaks: Why the outputs of real tokens depend on padding; None if they do not.
    """

    name: str
    modality: str
    model: PreTrainedModel
    inputs: dict[str, Tensor]
    padding_leaks: str | None = None

    def singles(self) -> list[dict[str, Tensor]] | None:
        """Return the inputs of each example alone, cut to its real length.

        Returns:
            One dict of inputs per example, or None where the architecture reads no padded
            tokens or its outputs depend on padding.
        """
        mask = self.inputs.get("attention_mask")
        if mask is None or self.padding_leaks:
            return None
        tokens = [v for k, v in self.inputs.items() if k != "attention_mask"]
        if not any(value.shape[:2] == mask.shape for value in tokens):
            return None
        return [self._single(row, int(length)) for row, length in enumerate(mask.sum(dim=1))]

    def _single(self, row: int, length: int) -> dict[str, Tensor]:
        # Inputs that share the shape [B, K] of the mask have one value per token.
        shape = self.inputs["attention_mask"].shape
        return {
            argument: value[row : row + 1, :length]
            if value.shape[:2] == shape
            else value[row : row + 1]
            for argument, value in self.inputs.items()
        }


def names(*modalities: str) -> tuple[str, ...]:
    """Return the names of the architectures of some modalities.

    Args:
        *modalities: Names of catalogues: "text", "vision", "video", "packed_vision", "audio",
            "multimodal", "encoder_decoder", "detection", "dense", "time_series", "decoder".

    Returns:
        The names in the order of `NAMES`.

    Raises:
        ValueError: If there is no such catalogue.
    """
    known = {catalogue.modality for catalogue in _CATALOGUES}
    if unknown := set(modalities) - known:
        raise ValueError(f"No modality {sorted(unknown)}: choose from {sorted(known)}.")
    return tuple(name for name, entry in _ARCHITECTURES.items() if entry.modality in modalities)


def build(
    name: str, attn_implementation: str | None = None, dtype: torch.dtype | None = None
) -> Example:
    """Build a tiny model and its inputs.

    The same name always gives the same parameters and inputs; the global random state is left
    as it was.

    Args:
        name: One of `NAMES`.
        attn_implementation: "eager", "sdpa", ...; None leaves the choice to transformers.
        dtype: Type of parameters and floating-point inputs; None means float32. In float64,
            autoformer, dab-detr, fastspeech2_conformer, gemma4_audio, kosmos-2 and mra cannot
            run: they mix in float32.

    Returns:
        The example.
    """
    architecture = _ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        recipe = architecture.recipe(name)
        model = _instantiate(recipe, attn_implementation).eval()
        _perturb(model)
    inputs = recipe.inputs or default_inputs(model, recipe.config)
    if dtype is not None:
        model = model.to(dtype)
        inputs = {
            argument: value.to(dtype) if value.is_floating_point() else value
            for argument, value in inputs.items()
        }
    return Example(name, architecture.modality, model, dict(inputs), architecture.padding_leaks)


def _instantiate(recipe: Recipe, attn_implementation: str | None) -> PreTrainedModel:
    model_class = getattr(transformers, recipe.model_class)
    # Automatic classes call it from_config, models _from_config.
    from_config = getattr(model_class, "from_config", None) or model_class._from_config
    return from_config(recipe.config, attn_implementation=attn_implementation)


def _perturb(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(_PERTURBATION * torch.randn_like(parameter))
