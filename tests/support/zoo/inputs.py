"""Inputs: two texts, images, videos or sounds, the second one padded where that can be."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support.zoo.shrink import FIRST_ORDINARY_TOKEN, IMAGE, PATCH

TOKENS = 10
DECODER_TOKENS = 6
LARGEST_TOKEN = 100
PADDING_TOKEN = 1


def token_ids(
    tokens: int = TOKENS, *, batch: int = 2, largest: int = LARGEST_TOKEN, seed: int = 0
) -> Tensor:
    """Return random ids of ordinary tokens, below `largest`. Shape [B, K]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY_TOKEN, largest, (batch, tokens), generator=generator)


def padding_mask(tokens: int = TOKENS, *, batch: int = 2, padded: int = 3) -> Tensor:
    """Return a 0/1 mask whose last row ends in padding. Shape [B, K]."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[-1, tokens - padded :] = 0
    return mask


def first_token(tokens: int) -> Tensor:
    """Return a 0/1 mask of the first token of each example. Shape [B, K]."""
    mask = torch.zeros(2, tokens, dtype=torch.long)
    mask[:, 0] = 1
    return mask


def image_places() -> Tensor:
    """Return a 0/1 mask of the four tokens that stand for an image. Shape [B, K]."""
    mask = torch.zeros(2, TOKENS, dtype=torch.long)
    mask[:, 1:5] = 1
    return mask


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Return standard normal values of the given shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 1) -> Tensor:
    """Return values of the given shape, uniform in [0, 1)."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def text(
    tokens: int = TOKENS, *, batch: int = 2, largest: int = LARGEST_TOKEN
) -> dict[str, Tensor]:
    """Return token ids and their padding mask, both of shape [B, K]."""
    ids = token_ids(tokens, batch=batch, largest=largest)
    mask = padding_mask(tokens, batch=batch)
    return {"input_ids": ids.masked_fill(mask == 0, PADDING_TOKEN), "attention_mask": mask}


def images(size: int | tuple[int, int] = IMAGE) -> dict[str, Tensor]:
    """Return images. Shape [B, 3, height, width]."""
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": noise(2, 3, height, width)}


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


def default_inputs(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return text, images or both for a model that follows transformers' naming conventions.

    Args:
        model: The model to be run.
        config: Its configuration, for the size of images.

    Returns:
        Arguments of ``forward``: token ids and their mask, images, token ids of the decoder.
    """
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        inputs |= {name: value for name, value in text().items() if name in accepted}
    vision = getattr(config, "vision_config", config)
    pixels = accepted.get("pixel_values")
    if pixels and (
        model.main_input_name == "pixel_values"
        or pixels.default is pixels.empty
        or vision is not config
    ):
        size = getattr(vision, "image_size", IMAGE)
        inputs |= images(size if isinstance(size, int) else tuple(size))
    if "decoder_input_ids" in accepted and config.is_encoder_decoder:
        inputs |= decoder_text()
    return inputs
