"""Statistics never allocate anything quadratic in the sequence, in any mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from attnlens import HeadStatistics, Lens

TOKENS, HEADS, WIDTH = 8192, 2, 8
# What grows with n, and the buffers of fixed size that blocks of rows are worked in.
BOUND = TOKENS * HEADS * WIDTH * 8 + (1 << 21)


class Largest(TorchDispatchMode):
    """The largest floating-point tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 8)
        return result


def encoder() -> BertModel:
    config = BertConfig(
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        hidden_size=HEADS * WIDTH,
        intermediate_size=16,
        vocab_size=50,
        max_position_embeddings=TOKENS,
    )
    return BertModel(config).eval()


def decoder() -> LlamaModel:
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        hidden_size=HEADS * WIDTH,
        intermediate_size=16,
        vocab_size=50,
        max_position_embeddings=TOKENS,
    )
    return LlamaModel(config).eval()


@pytest.mark.parametrize("fields", ["null_space", "all"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "dropout", "causal"])
def test_nothing_is_quadratic(kind: str, fields: Any) -> None:
    model = decoder() if kind == "causal" else encoder()
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    if kind == "dropout":
        model.train()
    ids = torch.randint(0, 50, (1, TOKENS))
    statistics = HeadStatistics(fields=fields)
    delivered: list[Any] = []
    with Lens(model, Watched(statistics, delivered)), torch.no_grad():
        model(ids)
    assert delivered
    assert max(delivered) <= BOUND < TOKENS * TOKENS // 8
    assert statistics.compute().effective_norm.isfinite().all()


class Watched(HeadStatistics):
    """HeadStatistics that notes the largest tensor of every update."""

    def __init__(self, inner: HeadStatistics, notes: list[Any]) -> None:
        super().__init__()
        self.inner = inner
        self.notes = notes

    def update(self, capture: Any) -> None:
        with Largest() as largest:
            self.inner.update(capture)
        self.notes.append(largest.elements)
