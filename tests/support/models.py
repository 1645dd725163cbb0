"""Tiny, randomly initialised models of twelve families, with padded inputs that run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

HIDDEN, HEADS, WIDTH, LAYERS, VOCABULARY = 32, 4, 8, 2, 96
LENGTHS = (19, 6)  # one example longer than the head dimension, one shorter

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
}
SEQ2SEQ: dict[str, Any] = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}


def text_inputs(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, Tensor]:
    """Random token ids, padded on the right with token 1."""
    generator = torch.Generator().manual_seed(seed)
    size = max(lengths)
    ids = torch.randint(5, VOCABULARY, (len(lengths), size), generator=generator)
    mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask}


def seq2seq_inputs() -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    return {**text_inputs(), "decoder_input_ids": ids}


def pixels(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def clip_inputs() -> dict[str, Tensor]:
    return {**text_inputs(), "pixel_values": pixels()}


def audio_inputs() -> dict[str, Tensor]:
    waves = torch.randn(2, 800, generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(800) < torch.tensor([800, 500])[:, None]).long()
    return {"input_values": waves, "attention_mask": mask}


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration and inputs; `text` if it reads token ids only."""

    model: type[PreTrainedModel]
    config: Callable[[], hf.PretrainedConfig]
    inputs: Callable[[], dict[str, Tensor]] = text_inputs
    text: bool = True


def _clip() -> hf.CLIPConfig:
    text = {**TEXT, "bos_token_id": 0, "eos_token_id": 2}
    return hf.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16)


def _wav2vec2() -> hf.Wav2Vec2Config:
    return hf.Wav2Vec2Config(
        **SIZES,
        conv_dim=(16, 16),
        conv_kernel=(10, 4),
        conv_stride=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )


def _modernbert() -> hf.ModernBertConfig:
    layers = ["sliding_attention", "full_attention"]
    ids = dict.fromkeys(["pad_token_id", "bos_token_id", "cls_token_id"], 1)
    ids |= dict.fromkeys(["eos_token_id", "sep_token_id"], 2)
    return hf.ModernBertConfig(**TEXT, **ids, local_attention=8, layer_types=layers)


def _eurobert() -> hf.EuroBertConfig:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 3}
    return hf.EuroBertConfig(**TEXT, **ids, num_key_value_heads=2)


FAMILIES: dict[str, Family] = {
    "bert": Family(hf.BertModel, lambda: hf.BertConfig(**TEXT)),
    "roberta": Family(hf.RobertaModel, lambda: hf.RobertaConfig(**TEXT)),
    "albert": Family(hf.AlbertModel, lambda: hf.AlbertConfig(**TEXT, embedding_size=16)),
    "distilbert": Family(
        hf.DistilBertModel,
        lambda: hf.DistilBertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            dim=HIDDEN,
            n_heads=HEADS,
            n_layers=LAYERS,
            hidden_dim=48,
        ),
    ),
    "electra": Family(hf.ElectraModel, lambda: hf.ElectraConfig(**TEXT, embedding_size=16)),
    "modernbert": Family(hf.ModernBertModel, _modernbert),
    "vit": Family(
        hf.ViTModel, lambda: hf.ViTConfig(**IMAGE), lambda: {"pixel_values": pixels()}, text=False
    ),
    "clip": Family(hf.CLIPModel, _clip, clip_inputs, text=False),
    "t5": Family(
        hf.T5EncoderModel,
        lambda: hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=WIDTH,
            d_ff=48,
            num_layers=LAYERS,
            num_heads=HEADS,
        ),
    ),
    "bart": Family(
        hf.BartModel,
        lambda: hf.BartConfig(**SEQ2SEQ, vocab_size=VOCABULARY, max_position_embeddings=64),
        seq2seq_inputs,
        text=False,
    ),
    "wav2vec2": Family(hf.Wav2Vec2Model, _wav2vec2, audio_inputs, text=False),
    "eurobert": Family(hf.EuroBertModel, _eurobert),
}
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.text]


def build(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    """Make a model of a family in evaluation mode; the same name gives the same weights."""
    family = FAMILIES[name]
    return initialise(family.model, family.config(), implementation)


def initialise(
    model: type[PreTrainedModel], config: hf.PretrainedConfig, implementation: str = "sdpa"
) -> PreTrainedModel:
    """Make a model whose heads differ: weights of unit scale instead of 0.02, biases too."""
    config._attn_implementation = implementation
    _drop(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = model(config).eval()
        for module in built.modules():
            if isinstance(module, nn.Linear | Conv1D):
                nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=0.2)
    return built


def _drop(config: hf.PretrainedConfig) -> None:
    """Let every dropout of a configuration act in training."""
    for name, setting in list(vars(config).items()):
        if isinstance(setting, hf.PretrainedConfig):
            _drop(setting)
        elif "drop" in name and "layerdrop" not in name and isinstance(setting, float):
            setattr(config, name, 0.1)


def inputs(name: str) -> dict[str, Tensor]:
    """Inputs of a family: a batch of two, padded where the modality can be."""
    return FAMILIES[name].inputs()


def outputs(result: Any) -> dict[str, Tensor]:
    """Every tensor of a model output by path."""
    found: dict[str, Tensor] = {}

    def visit(path: str, node: Any) -> None:
        if isinstance(node, Tensor):
            found[path] = node
        elif hasattr(node, "items"):
            for key, child in node.items():
                visit(f"{path}.{key}", child)
        elif isinstance(node, (tuple, list)):
            for index, child in enumerate(node):
                visit(f"{path}.{index}", child)

    visit("", result)
    return found
