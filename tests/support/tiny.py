"""A single attention layer with exchangeable parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

HEADS, WIDTH = 4, 8
HIDDEN = HEADS * WIDTH


class TinyAttention(nn.Module):
    """Self-attention whose context passes `between` before it reaches `output`."""

    is_causal = False

    def __init__(self, between: nn.Module | None = None, output: nn.Module | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inputs = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
            self.output = nn.Linear(HIDDEN, HIDDEN) if output is None else output
        self.between = nn.Identity() if between is None else between

    def function(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The context, `[B, Q, H, D]`."""
        return self.function()(self, query, key, value, None, scaling=0.3)[0]

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for linear in self.inputs
        )
        return self.output(self.between(self.attend(query, key, value).flatten(2)))


def hidden_states(batch: int = 2, tokens: int = 13) -> Tensor:
    return torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(4))
