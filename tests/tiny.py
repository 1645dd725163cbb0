"""A single attention layer with exchangeable parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

HEADS, WIDTH = 4, 8


class TinyAttention(nn.Module):
    """Self-attention whose context passes `between` before it reaches `output`."""

    is_causal = False

    def __init__(
        self,
        between: nn.Module | None = None,
        output: nn.Module | None = None,
        implementation: str = "sdpa",
        **settings: Any,
    ) -> None:
        super().__init__()
        hidden = HEADS * WIDTH
        torch.manual_seed(0)
        self.inputs = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))
        self.between = nn.Identity() if between is None else between
        self.output = nn.Linear(hidden, hidden) if output is None else output
        self.implementation = implementation
        self.settings = settings

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for linear in self.inputs
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager_attention_forward)
        context, _ = attend(self, query, key, value, mask, **self.settings)
        return self.output(self.between(context.flatten(2)))


def hidden_states(batch: int = 2, tokens: int = 13) -> Tensor:
    return torch.randn(batch, tokens, HEADS * WIDTH, generator=torch.Generator().manual_seed(4))
