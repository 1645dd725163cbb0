"""Randomly initialised encoders of published shapes, and inputs for them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)

Inputs = dict[str, Tensor]


def bert(layers: int = 12, positions: int = 512, implementation: str = "sdpa") -> PreTrainedModel:
    """BERT-base: 12 layers, 12 heads of width 64, hidden size 768."""
    config = BertConfig(
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        attn_implementation=implementation,
    )
    return _built(BertModel, config)


def minilm(layers: int = 12) -> PreTrainedModel:
    """MiniLM-L12: 12 layers, 12 heads of width 32, hidden size 384."""
    config = BertConfig(num_hidden_layers=layers, hidden_size=384, intermediate_size=1536)
    return _built(BertModel, config)


def vit(layers: int = 12) -> PreTrainedModel:
    """ViT-base at 384 pixels: 12 layers, 12 heads of width 64, 577 tokens."""
    return _built(ViTModel, ViTConfig(num_hidden_layers=layers, image_size=384))


def modernbert(layers: int = 22, implementation: str = "sdpa") -> PreTrainedModel:
    """ModernBERT-base: 22 layers, 12 heads of width 64, two of three with a window of 128."""
    return _built(
        ModernBertModel,
        ModernBertConfig(num_hidden_layers=layers, attn_implementation=implementation),
    )


def tokens(batch: int, length: int, *, padded: bool = False) -> Inputs:
    """Random token ids; where `padded`, all but the first example end early."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30_000, (batch, length), generator=generator)
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, length - row * length // (2 * batch) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def images(batch: int) -> Inputs:
    """Random images of 384 pixels."""
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(batch, 3, 384, 384, generator=generator)}


def _built(model_class: type[PreTrainedModel], config: object) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()  # type: ignore[arg-type]
