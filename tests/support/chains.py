"""Tiny models with chains of layers, and the Jacobians of those chains the slow way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from tests.support.models import (
    FAMILIES,
    HEADS,
    HIDDEN,
    LAYERS,
    TEXT,
    VOCABULARY,
    Family,
    initialise,
)


def _deberta() -> hf.DebertaV2Config:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return hf.DebertaV2Config(**TEXT, **relative)


def _xlnet() -> hf.XLNetConfig:
    sizes = {"d_model": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 48}
    return hf.XLNetConfig(vocab_size=VOCABULARY, **sizes)


_OURS = ("bert", "albert", "distilbert", "electra", "modernbert", "vit", "clip", "t5", "bart")
CHAINS: dict[str, Family] = {
    **{name: FAMILIES[name] for name in (*_OURS, "wav2vec2")},
    "deberta": Family(hf.DebertaV2Model, _deberta),
    "xlnet": Family(hf.XLNetModel, _xlnet),
}
# Their rotary embeddings or norms run in float32 whatever the dtype of the model.
FLOAT32_PARTS = {"modernbert", "t5"}


def build_chain(name: str) -> PreTrainedModel:
    """Make a model of a family in evaluation mode; the same name gives the same weights."""
    family = CHAINS[name]
    implementation = "sdpa" if family.model._supports_sdpa else "eager"
    return initialise(family.model, family.config(), implementation)


def jacobian_norms(
    model: nn.Module,
    inputs: dict[str, Any],
    layers: list[nn.Module],
    example: int,
    tokens_first: bool = False,
    method: Callable[..., Any] = jacrev,
) -> Tensor:
    """`‖∂e_j/∂x_i‖_F` of one example, `[L, K, K]`, through the model's whole forward.

    Hooks put a variable in the place of what enters the first layer, and read what leaves each.
    """
    axis = 1 if tokens_first else 0
    entered: list[Tensor] = []
    variable: list[Tensor] = []
    left: list[Tensor] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        old = args[0] if args else kwargs["hidden_states"]
        entered.append(old)
        if len(entered) > 1 or not variable:
            return None
        parts = list(old.split(1, axis))
        parts[example] = variable[0].unsqueeze(axis)
        new = torch.cat(parts, axis)
        return tuple(new if a is old else a for a in args), {
            key: new if a is old else a for key, a in kwargs.items()
        }

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        left.append(output if isinstance(output, Tensor) else output[0])

    def states(state: Tensor) -> Tensor:
        entered.clear(), left.clear()
        variable[:] = [state]
        model(**inputs)
        return torch.stack([output.select(axis, example) for output in left])

    handles = [layers[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            model(**inputs)
            start = entered[0].select(axis, example).detach()
            jacobian = method(states)(start).double()  # [L, K, M, K, M]
    finally:
        for handle in handles:
            handle.remove()
    return jacobian.square().sum((2, 4)).sqrt().mT
