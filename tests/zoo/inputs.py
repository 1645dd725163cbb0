"""Default inputs: two sequences, the second one padded; two images; two sounds."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests.zoo.shrink import FIRST_ORDINARY_TOKEN, IMAGE, MEL_BINS, PATCH

TOKENS = 10
DECODER_TOKENS = 6
LARGEST_TOKEN = 100
PADDING_TOKEN = 1


def token_ids(
    tokens: int = TOKENS, *, batch: int = 2, largest: int = LARGEST_TOKEN, seed: int = 0
) -> Tensor:
    """Return random ordinary token ids. Shape [B, K]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY_TOKEN, largest, (batch, tokens), generator=generator)


def padding_mask(tokens: int = TOKENS, *, batch: int = 2, padded: int = 3) -> Tensor:
    """Return a 0/1 mask whose last row ends in padding. Shape [B, K]."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[-1, tokens - padded :] = 0
    return mask


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Return standard normal values of the given shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text(tokens: int = TOKENS, **settings: Any) -> dict[str, Tensor]:
    """Return token ids and their padding mask, both of shape [B, K]."""
    ids = token_ids(tokens, **settings)
    mask = padding_mask(tokens, batch=len(ids))
    return {"input_ids": ids.masked_fill(mask == 0, PADDING_TOKEN), "attention_mask": mask}


def images(size: int | tuple[int, int] = IMAGE, *, batch: int = 2) -> dict[str, Tensor]:
    """Return images. Shape [B, 3, height, width]."""
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": noise(batch, 3, height, width)}


def default_inputs(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return inputs for a model that follows transformers' naming conventions.

    Args:
        model: The model to be run.
        config: Its configuration, for image sizes.

    Returns:
        One tensor per argument of `forward` that the model needs.
    """
    accepted = inspect.signature(model.forward).parameters
    main = model.main_input_name
    inputs: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        inputs |= text()
        if "attention_mask" not in accepted:
            del inputs["attention_mask"]
    pixels = accepted.get("pixel_values")
    if pixels and (
        main == "pixel_values" or pixels.default is pixels.empty or hasattr(config, "vision_config")
    ):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", IMAGE)
        inputs |= images(size if isinstance(size, int) else tuple(size))
    if main == "input_values":
        inputs["input_values"] = noise(2, 1200)
    if main == "input_features":
        inputs["input_features"] = noise(2, 64, MEL_BINS)
    if "decoder_input_ids" in accepted and config.is_encoder_decoder:
        inputs["decoder_input_ids"] = token_ids(DECODER_TOKENS)
    return inputs


def uniform(*shape: int, seed: int = 1) -> Tensor:
    """Return values of the given shape, uniform in [0, 1)."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def video(*, frames: int, size: int = IMAGE, batch: int = 2) -> dict[str, Tensor]:
    """Return videos. Shape [B, frames, 3, height, width]."""
    return {"pixel_values": noise(batch, frames, 3, size, size)}


def variable_resolution_patches() -> dict[str, Tensor]:
    """Return two images as rows of patches: one of 4 x 4, one of 4 x 3 with padding."""
    return {
        "pixel_values": noise(2, 16, 3 * PATCH * PATCH),
        "pixel_attention_mask": padding_mask(16, padded=4),
        "spatial_shapes": torch.tensor([[4, 4], [4, 3]]),
    }


def flattened_patches(width: int, *, patches: int = 8) -> dict[str, Tensor]:
    """Return patches preceded by their row and column, the last ones of the second padded."""
    row = torch.arange(1.0, patches + 1).expand(2, patches)
    column = torch.ones(2, patches)
    content = noise(2, patches, width)
    return {
        "flattened_patches": torch.cat([row[..., None], column[..., None], content], dim=-1),
        "attention_mask": padding_mask(patches),
    }


def sounds(samples: int = 800, *, padded: int = 240) -> dict[str, Tensor]:
    """Return waveforms, the second one padded. Shape [B, samples]."""
    return {
        "input_values": noise(2, samples),
        "attention_mask": padding_mask(samples, padded=padded),
    }


def decoder_text() -> dict[str, Tensor]:
    """Return token ids for a decoder. Shape [B, Q]."""
    return {"decoder_input_ids": token_ids(DECODER_TOKENS, seed=4)}
