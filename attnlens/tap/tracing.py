"""Tap on modules that run their own attention: softmax·V, or a direct SDPA call.

A `TorchFunctionMode` watches the torch functions that run inside an attention module. It follows
what comes out of a softmax through reshapes, dropout and masking until a product consumes it:
that product is `A V`. Direct calls of `scaled_dot_product_attention` are seen as they are, also
inside `F.multi_head_attention_forward`. Nothing is replaced and nothing is computed differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlens.tap import dispatch as interface
from attnlens.tap.hooks import is_suspended
from attnlens.tap.layout import Product, einsum_product, matmul_product, transposed_product
from attnlens.tap.shared import SharedSetting, ThreadDepth

# Logits at or below this were masked: no model's scores reach it, every additive mask does.
_MASKED = -5000.0

_SOFTMAX = frozenset({"softmax", "_softmax"})
_DROPOUT = frozenset({"dropout", "dropout_", "feature_dropout", "alpha_dropout"})
_MATMUL = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum"})
_LINEAR = frozenset({"linear"})
# Same entries in another arrangement: what holds of an entry of A holds after them.
_REARRANGE = frozenset(
    "view reshape permute transpose contiguous flatten unflatten squeeze unsqueeze expand movedim "
    "moveaxis swapaxes swapdims t clone __getitem__ narrow select repeat repeat_interleave view_as "
    "reshape_as expand_as chunk split unbind tensor_split roll pad __get__ detach "
    "as_strided".split()
)
# Changes of value or type that leave A recognisable as A.
_ADJUST = frozenset(
    "to type float half bfloat16 double type_as mul __mul__ __rmul__ mul_ __imul__ masked_fill "
    "masked_fill_ where nan_to_num".split()
)


Arrange = Callable[[Tensor], Product]


@dataclass(frozen=True, eq=False)
class DirectCall:
    """A direct call of `scaled_dot_product_attention`.

    Attributes:
        query: `[..., Q, D]`.
        key: `[..., K, D]`.
        value: `[..., K, D]`.
        mask: boolean or additive, or None.
        dropout: probability that acted.
        causal: the `is_causal` argument.
        scaling: factor on the logits, or None for the default.
        output: `[..., Q, D]`.
        live: the output in the graph.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scaling: float | None
    output: Tensor
    live: Tensor

    def arrangement(self) -> Arrange:
        """Return what reads a tensor like `live` as a product; it keeps no operand alive."""
        return _arrangement("matmul", (), self.output, self.value, 0)


@dataclass(frozen=True, eq=False)
class SeenProduct:
    """A softmax and the product that consumed it.

    Attributes:
        product: A before dropout, V and the output, in the product's own layout.
        keep: bool like A, False where the logits were masked; None where nothing was.
        dropout: probability that acted on A between the softmax and the product.
        softmax_token: what `where()` said when the softmax ran.
        live: the output in the graph, in the model's layout.
        arrangement: returns what reads a tensor like `live` as a product; that keeps no operand
            alive.
    """

    product: Product
    keep: Tensor | None
    dropout: float
    softmax_token: Any
    live: Tensor
    arrangement: Callable[[], Arrange]


Event = DirectCall | SeenProduct


# function, positional arguments with a gap, keyword arguments, position of the gap
_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int]


@dataclass(frozen=True, eq=False)
class _Softmax:
    logits: Tensor
    output: Tensor
    token: Any


@dataclass(frozen=True, eq=False)
class _Derived:
    """A tensor that came from a softmax, and the steps that led to it."""

    tensor: Tensor  # kept so that its identity stays its own
    softmax: _Softmax
    steps: tuple[_Step, ...] = ()
    dropout: float = 0.0


class AttentionTrace(TorchFunctionMode):
    """Report attention products to a listener while active.

    Args:
        heard: called with each event as it happens.
        linear: called with the input and weight of each linear function, also one written as a
            contraction over heads and widths.
        where: asked for a token at every softmax; returned with the event.
    """

    def __init__(
        self,
        heard: Callable[[Event], None],
        linear: Callable[[Tensor, Tensor], None],
        where: Callable[[], Any],
    ) -> None:
        super().__init__()
        self._heard = heard
        self._linear = linear
        self._where = where
        self._derived: dict[int, _Derived] = {}

    def forget(self) -> None:
        """Let go of every tensor followed so far."""
        self._derived.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if interface.running() or is_suspended():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _open_body(), self:
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        with torch.no_grad():
            self._observe(func, name, args, kwargs, output)
        return output

    def _observe(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if name in _SOFTMAX and isinstance(output, Tensor):
            logits = args[0] if args else kwargs["input"]
            softmax = _Softmax(logits, output, self._where())
            self._derived[id(output)] = _Derived(output, softmax)
        elif name == "scaled_dot_product_attention":
            self._heard(_direct_call(args, kwargs, output))
        elif name in _LINEAR:
            self._linear(args[0], args[1] if len(args) > 1 else kwargs["weight"])
        elif self._derived:
            self._follow(func, name, args, kwargs, output)

    def _follow(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        found = [i for i, arg in enumerate(args) if id(arg) in self._derived]
        if name in _MATMUL:
            operands = _operands(name, args)
            found = [i for i, operand in enumerate(operands) if id(operand) in self._derived]
            if len(found) == 1 and len(operands) == 2:
                self._consume(name, args, operands, found[0], output)
            elif name == "einsum" and len(operands) == 2:
                self._contract(args[0], *operands)
        elif found and name in _DROPOUT:
            source = self._derived[id(args[found[0]])]
            rate = _dropout_rate(args, kwargs)
            self._derived[id(output)] = _Derived(
                output, source.softmax, source.steps, max(source.dropout, rate)
            )
        elif found and (name in _REARRANGE or name in _ADJUST):
            self._derive(func, args, kwargs, found[0], output)

    def _contract(self, equation: str, received: Tensor, weight: Any) -> None:
        """Report an einsum over heads and widths, such as `ibnd,hnd->ibh`, as a linear function."""
        left, _, right = equation.replace(" ", "").partition("->")[0].partition(",")
        if isinstance(weight, torch.nn.Parameter) and len(right) == 3 and left[-2:] == right[1:]:
            self._linear(received.flatten(-2), weight)

    def _derive(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        position: int,
        output: Any,
    ) -> None:
        source = self._derived[id(args[position])]
        if isinstance(output, Tensor):
            if output is args[position]:
                return  # in place: the same tensor, already followed
            placeholder = (*args[:position], None, *args[position + 1 :])
            step = (func, placeholder, kwargs, position)
            self._derived[id(output)] = _Derived(
                output, source.softmax, (*source.steps, step), source.dropout
            )
            return
        if not isinstance(output, (tuple, list)) or isinstance(output, torch.Size):
            return
        for index, part in enumerate(output):  # chunk, split, unbind
            placeholder = (*args[:position], None, *args[position + 1 :])
            step = (func, placeholder, kwargs, position)
            pick: _Step = (_pick, (None, index), {}, 0)
            self._derived[id(part)] = _Derived(
                part, source.softmax, (*source.steps, step, pick), source.dropout
            )

    def _consume(
        self, name: str, args: tuple[Any, ...], operands: list[Tensor], index: int, output: Tensor
    ) -> None:
        source = self._derived[id(operands[index])]
        attention, value = source.tensor.detach(), operands[1 - index].detach()
        if source.dropout:
            attention = _replay(source, source.softmax.output.detach())
        keep = source.softmax.logits.detach() > _MASKED
        masked = (
            None if bool(keep.all()) else _replay(source, keep.to(torch.uint8), marks=True) != 0
        )
        product = _as_product(name, args, attention, value, output.detach(), index)
        if product is None:
            return
        if masked is not None:
            kept = _as_product(name, args, masked, value, output.detach(), index)
            masked = None if kept is None else kept.attention
        arrangement = partial(_arrangement, name, args, attention, value, index)
        self._heard(
            SeenProduct(product, masked, source.dropout, source.softmax.token, output, arrangement)
        )


def _as_product(
    name: str, args: tuple[Any, ...], attention: Tensor, value: Tensor, output: Tensor, index: int
) -> Product | None:
    if name == "einsum":
        return einsum_product(args[0], attention, value, output, index == 0)
    if attention.dim() < 2 or value.dim() < 2:
        return None
    if index == 0:
        return matmul_product(attention, value, output)
    return transposed_product(value, attention, output)


def _arrangement(
    name: str, args: tuple[Any, ...], attention: Tensor, value: Tensor, index: int
) -> Arrange:
    """How the output of a product is laid out, from the shapes of its operands alone."""
    equation = args[:1] if name == "einsum" else ()
    attention, value = attention.to("meta"), value.to("meta")

    def arrange(output: Tensor) -> Product:
        product = _as_product(name, equation, attention, value, output, index)
        assert product is not None
        return product

    return arrange


def _replay(source: _Derived, tensor: Tensor, marks: bool = False) -> Tensor:
    """Apply the steps from a softmax to its product to another tensor of the same layout."""
    for func, args, kwargs, position in source.steps:
        name = getattr(func, "__name__", "")
        if marks and name in _ADJUST:
            continue
        tensor = func(*args[:position], tensor, *args[position + 1 :], **kwargs)
    return tensor


def _pick(parts: Any, index: int) -> Tensor:
    return parts[index]


def _operands(name: str, args: tuple[Any, ...]) -> list[Any]:
    """The factors of a product; the addend of `baddbmm` is not one."""
    if name == "einsum":
        rest = args[1:]
        return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else [*rest]
    return list(args[1:3] if name == "baddbmm" else args[:2])


def _dropout_rate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return float(rate) if training else 0.0


def _direct_call(args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> DirectCall:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask")
    return DirectCall(
        given["query"].detach(),
        given["key"].detach(),
        given["value"].detach(),
        None if mask is None else mask.detach(),
        float(given.get("dropout_p") or 0.0),
        bool(given.get("is_causal")),
        given.get("scale"),
        output.detach(),
        output,
    )


_functional: Any = F
_HAS_TORCH_FUNCTION = _functional.has_torch_function
_open = ThreadDepth()


def _has_torch_function(tensors: Any) -> bool:
    return not _open and _HAS_TORCH_FUNCTION(tensors)


_answering = SharedSetting(
    lambda: setattr(_functional, "has_torch_function", _has_torch_function),
    lambda: setattr(_functional, "has_torch_function", _HAS_TORCH_FUNCTION),
)


@contextmanager
def _open_body() -> Iterator[None]:
    """Let `F.multi_head_attention_forward` run its body under the mode instead of handing over.

    The function asks a module-level `has_torch_function` whether to hand its call to the mode;
    for the duration, and in this thread only, the answer is no.
    """
    with _answering.held(), _open.entered():
        yield


def takes_fused_path(
    module: torch.nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell whether `nn.MultiheadAttention` may run torch's fused inference kernel.

    That kernel hides its attention, and a function mode would make torch avoid it, which changes
    the last bits of the output.

    Args:
        module: the module.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        True if the kernel may run for this call.
    """
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    same = given.get("query") is given.get("key") is given.get("value")
    gradient = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not module.training
        and not gradient
        and same
        and bool(module.batch_first)
        and module.num_heads % 2 == 0
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
        and not torch.is_autocast_enabled()
    )


def remove_mode(mode: TorchFunctionMode) -> None:
    """Take a mode off this thread's stack wherever it is, leaving the others in order.

    Args:
        mode: the mode; nothing happens if it is not active.
    """
    above = []
    if not any(active is mode for active in torch.overrides._get_current_function_mode_stack()):
        return
    while (top := torch.overrides._pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        torch.overrides._push_mode(other)
