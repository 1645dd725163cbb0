"""Models to mask and prune, beyond the twelve families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from attnlens.pruning.heads import LayerHeads, find_heads
from attnlens.tap.trial import Trial
from tests.support import models
from tests.support.models import FAMILIES, IMAGE, TEXT, VOCABULARY, Family

Plan = dict[Any, list[int]]


def _images(**settings: Any) -> dict[str, Any]:
    return {"inputs": lambda: {"pixel_values": models.pixels()}, "text": False, **settings}


def _deberta_v2() -> hf.DebertaV2Config:
    return hf.DebertaV2Config(
        **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16
    )


def _grouped() -> hf.EuroBertConfig:
    # Wide enough that what is left of k and v stays above the narrowest matrix products, whose
    # rounding differs.
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 3}
    sizes = {**TEXT, "hidden_size": 64, "num_attention_heads": 8}
    return hf.EuroBertConfig(**sizes, **ids, num_key_value_heads=4)


def _gpt2() -> hf.GPT2Config:
    ids = {"bos_token_id": 0, "eos_token_id": 2}
    return hf.GPT2Config(
        **ids, vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, n_positions=64
    )


def _swin() -> hf.SwinConfig:
    return hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=32, depths=[2], num_heads=[4], window_size=4
    )


def large_pixels() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


ALL: dict[str, Family] = {
    **FAMILIES,
    "eurobert": Family(hf.EuroBertModel, _grouped),
    "deit": Family(hf.DeiTModel, lambda: hf.DeiTConfig(**IMAGE), **_images()),
    "dinov2": Family(hf.Dinov2Model, lambda: hf.Dinov2Config(**IMAGE), **_images()),
    "deberta_v2": Family(hf.DebertaV2Model, _deberta_v2),
    "mpnet": Family(hf.MPNetModel, lambda: hf.MPNetConfig(**TEXT)),
    "swin": Family(hf.SwinModel, _swin, large_pixels, text=False),
    "gpt2": Family(hf.GPT2Model, _gpt2),
}
# Without a slice of zeros, a product may be added in another order. That changes float64 outputs
# by 2 eps; float32 ones too, on some processors.
ROUNDING = 16 * torch.finfo(torch.float32).eps
ONE_IMPLEMENTATION = ("deberta_v2", "mpnet", "swin")  # attention outside the interface
CASES = [
    (name, implementation)
    for name in ALL
    for implementation in (("eager",) if name in ONE_IMPLEMENTATION else ("sdpa", "eager"))
]


def build(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    implementation = "eager" if name in ONE_IMPLEMENTATION else implementation
    return models.initialise(ALL[name].model, ALL[name].config(), implementation)


def inputs(name: str) -> dict[str, Tensor]:
    return ALL[name].inputs()


def layers_of(model: PreTrainedModel, given: dict[str, Tensor]) -> tuple[LayerHeads, ...]:
    return find_heads(Trial(model, given))


def some_heads(name: str, model: PreTrainedModel) -> Plan:
    """A plan that differs between layers where it may: the first half, then the last quarter."""
    layers = layers_of(model, inputs(name))
    choices: list[Callable[[int], list[int]]] = [
        lambda heads: list(range(heads // 2)),
        lambda heads: list(range(heads - heads // 4, heads)),
    ]
    if name == "albert":
        choices = choices[:1]
    return {layer.key: choices[i % len(choices)](layer.heads) for i, layer in enumerate(layers)}


@torch.no_grad()
def outputs(model: PreTrainedModel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return models.outputs(model(**given))


def largest(found: dict[str, Tensor]) -> float:
    """The largest output, caches left out."""
    return max(float(t.abs().max()) for name, t in found.items() if "past_key_values" not in name)


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference between outputs; caches of keys and values lack the pruned heads."""
    same = [name for name in left if "past_key_values" not in name]
    assert same and all(left[name].shape == right[name].shape for name in same)
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in same)
