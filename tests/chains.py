"""Tiny models with chains of layers, and their Jacobians the slow way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from tests.models import FAMILIES, HEADS, HIDDEN, LAYERS, TEXT, VOCABULARY, Family, initialise

CHAINS: dict[str, Family] = {
    **FAMILIES,
    "deberta": Family(
        hf.DebertaV2Model,
        lambda: hf.DebertaV2Config(
            **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
        ),
    ),
    "xlnet": Family(
        hf.XLNetModel,
        lambda: hf.XLNetConfig(
            vocab_size=VOCABULARY, d_model=HIDDEN, n_layer=LAYERS, n_head=HEADS, d_inner=48
        ),
    ),
}

# Where the chain of a family begins and ends, if it is not its only stack.
STACKS = {
    "bart": "encoder.layers.*",
    "clip": "text_model.encoder.layers.*",
}


def build_chain(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    """Make a model of a family in evaluation mode; the same name gives the same weights."""
    family = CHAINS[name]
    if family.model._supports_sdpa is False:
        implementation = "eager"
    return initialise(family.model, family.config(), implementation)


def jacobian_norms(
    model: nn.Module,
    inputs: dict[str, Any],
    modules: list[nn.Module],
    calls: int,
    example: int,
    tokens_first: bool = False,
) -> Tensor:
    """`‖∂e_j/∂x_i‖_F` for one example, `[L, K, K]`, through the model's own forward.

    A hook replaces what enters the first layer by the variable, others read what leaves each.
    """
    first = modules[0]
    axis = 1 if tokens_first else 0

    def entered() -> Tensor:
        kept: list[Tensor] = []
        hook = first.register_forward_pre_hook(
            lambda module, args, kwargs: kept.append(_hidden(args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            model(**inputs)
        hook.remove()
        return kept[0]

    hidden = entered()

    def run(state: Tensor) -> Tensor:
        whole = hidden.clone().detach()
        whole = torch.cat(
            [
                state.unsqueeze(axis) if i == example else part
                for i, part in enumerate(whole.split(1, axis))
            ],
            axis,
        )
        left: list[Tensor] = []
        started: list[bool] = []

        def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if started:
                return None
            started.append(True)
            old = _hidden(args, kwargs)
            return (
                tuple(whole if a is old else a for a in args),
                {k: whole if a is old else a for k, a in kwargs.items()},
            )

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            left.append(output if isinstance(output, Tensor) else output[0])

        handles = [first.register_forward_pre_hook(replace, with_kwargs=True)]
        handles += [module.register_forward_hook(keep) for module in modules]
        try:
            model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack([state.select(axis, example) for state in left])

    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(run)(hidden.select(axis, example))  # [L, K, M, K, M]
    assert jacobian.shape[0] == calls
    return jacobian.double().square().sum((2, 4)).sqrt().mT


def _hidden(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


Run = Callable[[], Any]
