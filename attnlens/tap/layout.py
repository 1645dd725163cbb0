"""Bring a product A·V from whatever layout a model uses to `[B, H, Q, K]`, `[B, H, K, D]`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
    "nhead",
    "num_attn_heads",
)


@dataclass(frozen=True, eq=False)
class Product:
    """`output = attention @ value` with the same leading dimensions `P` on each.

    Attributes:
        attention: `[*P, Q, K]`.
        value: `[*P, K, D]`.
        output: `[*P, Q, D]`.
    """

    attention: Tensor
    value: Tensor
    output: Tensor

    def by_heads(self, heads: int | None) -> Product:
        """Fold the leading dimensions into `[B, H]`.

        Args:
            heads: number of heads, or None if the module does not say.

        Returns:
            The product with two leading dimensions; windows and blocks are folded into B.
        """
        leading = tuple(self.output.shape[:-2])
        if heads is None:
            heads = leading[1] if len(leading) > 1 else 1
        axis, split = _head_axis(leading, heads)
        parts = (self.attention, self.value, self.output)
        return Product(*(_fold(part, axis, heads, split) for part in parts))


def matmul_product(attention: Tensor, value: Tensor, output: Tensor) -> Product:
    """Align the leading dimensions of a (broadcast) matrix product.

    Args:
        attention: `[..., Q, K]`.
        value: `[..., K, D]`.
        output: `[..., Q, D]`.

    Returns:
        The product.
    """
    leading = output.shape[:-2]
    return Product(
        attention.expand(*leading, *attention.shape[-2:]),
        value.expand(*leading, *value.shape[-2:]),
        output,
    )


def einsum_product(
    equation: str, attention: Tensor, value: Tensor, output: Tensor, attention_first: bool
) -> Product | None:
    """Read a two-operand einsum as a product A·V.

    Args:
        equation: the equation, with an explicit output.
        attention: the operand that came from a softmax.
        value: the other operand.
        output: the product of both.
        attention_first: whether attention is the first operand.

    Returns:
        The product, or None where the equation is not one.
    """
    # "..." stands for the leading dimensions that both operands and the result share
    named = sum(label.isalpha() for label in equation.partition("->")[2])
    shared = "".join(chr(ord("À") + i) for i in range(output.dim() - named))
    inputs, _, result = equation.replace(" ", "").replace("...", shared).partition("->")
    terms = inputs.split(",") if attention_first else inputs.split(",")[::-1]
    if [len(term) for term in terms] != [attention.dim(), value.dim()] or not result:
        return None
    a, v = terms
    keys = [label for label in a if label in v and label not in result]
    queries = [label for label in a if label in result and label not in v]
    widths = [label for label in v if label in result and label not in a]
    batch = [label for label in result if label in a and label in v]
    if len(keys) != 1 or len(queries) != 1 or len(widths) != 1:
        return None

    def arranged(tensor: Tensor, labels: str, last: list[str]) -> Tensor:
        return tensor.permute([labels.index(label) for label in [*batch, *last]])

    return Product(
        arranged(attention, a, [*queries, *keys]),
        arranged(value, v, [*keys, *widths]),
        arranged(output, result, [*queries, *widths]),
    )


def declared_heads(module: nn.Module) -> int | None:
    """Read the number of heads off an attention module; None if no attribute says it."""
    for name in HEAD_COUNTS:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _head_axis(leading: tuple[int, ...], heads: int) -> tuple[int, bool]:
    """Which leading axis holds the heads, and whether it must be split as `(B, H)`."""
    exact = [axis for axis, size in enumerate(leading) if size == heads]
    if exact:
        later = [axis for axis in exact if axis > 0]
        return (later or exact)[0], False
    divisible = [axis for axis, size in enumerate(leading) if size % heads == 0]
    return (divisible[0], True) if divisible else (-1, False)


def _fold(tensor: Tensor, axis: int, heads: int, split: bool) -> Tensor:
    """`[*P, X, Y]` to `[B, H, X, Y]`."""
    if axis < 0:
        return tensor.reshape(-1, 1, *tensor.shape[-2:])
    if split:
        tensor = torch.unflatten(tensor, axis, (-1, heads))
        axis += 1
    moved = tensor.movedim(axis, -3)
    return moved.reshape(math.prod(moved.shape[:-3]), *moved.shape[-3:])
