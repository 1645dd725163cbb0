"""Tap on modules that run their own attention: softmax·V, or a direct SDPA call.

A `TorchFunctionMode` watches the torch functions that run inside an attention module. It follows
what comes out of a softmax through reshapes, dropout and masking until a product consumes it:
that product is `A V`. Direct calls of `scaled_dot_product_attention` are seen as they are, also
inside `F.multi_head_attention_forward`. Nothing is replaced and nothing is computed differently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlens.tap.hooks import is_suspended, unobserved
from attnlens.tap.layout import Product, einsum_product, matmul_product
from attnlens.tap.multihead import open_body
from attnlens.tap.shared import ThreadDepth

_modes: Any = torch.overrides

# Inside an attention function of transformers' interface, which is heard as a whole.
in_interface = ThreadDepth()

# Logits at or below this were masked: no model's scores reach it, every additive mask does.
_MASKED = -5000.0

_SOFTMAX = frozenset({"softmax", "_softmax"})
_BEGINNINGS = _SOFTMAX | {"scaled_dot_product_attention", "linear"}
_DROPOUT = frozenset({"dropout", "dropout_", "feature_dropout", "alpha_dropout"})
_MATMUL = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum"})
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
        return _arrangement(partial(_as_product, None, 0), self.output, self.value)


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


class _Ran(NamedTuple):
    """A torch function that ran."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


class _Step(NamedTuple):
    """A torch function with a gap among its positional arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gap: int

    def again(self, tensor: Tensor) -> Any:
        before, after = self.args[: self.gap], self.args[self.gap + 1 :]
        return self.function(*before, tensor, *after, **self.kwargs)


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
        everywhere: report what runs inside functions of transformers' interface, too.
    """

    def __init__(
        self,
        heard: Callable[[Event], None],
        linear: Callable[[Tensor, Tensor], None],
        where: Callable[[], Any],
        everywhere: bool = False,
    ) -> None:
        super().__init__()
        self._everywhere = everywhere
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
        if (in_interface and not self._everywhere) or is_suspended():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with open_body(), self:
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._derived or name in _BEGINNINGS:
            with unobserved():
                self._observe(_Ran(func, name, args, kwargs, output))
        return output

    def _observe(self, ran: _Ran) -> None:
        if ran.name in _SOFTMAX and isinstance(ran.output, Tensor):
            softmax = _Softmax(ran.argument(0, "input"), ran.output, self._where())
            self._derived[id(ran.output)] = _Derived(ran.output, softmax)
        elif ran.name == "scaled_dot_product_attention":
            self._heard(_direct_call(ran))
        elif ran.name == "linear":
            self._linear(ran.args[0], ran.argument(1, "weight"))
        elif self._derived:
            self._follow(ran)

    def _follow(self, ran: _Ran) -> None:
        """Go on with what came out of a softmax."""
        if ran.name in _MATMUL:
            operands = _operands(ran)
            places = self._followed(operands)
            if len(places) == 1 and len(operands) == 2:
                self._consume(ran, operands, places[0])
            elif ran.name == "einsum" and len(operands) == 2:
                self._contract(ran.args[0], *operands)
            return
        places = self._followed(ran.args)
        if places and ran.name in _DROPOUT:
            source = self._derived[id(ran.args[places[0]])]
            rate = max(source.dropout, _dropout_rate(ran))
            self._derived[id(ran.output)] = replace(source, tensor=ran.output, dropout=rate)
        elif places and (ran.name in _REARRANGE or ran.name in _ADJUST):
            self._derive(ran, places[0])

    def _followed(self, values: Sequence[Any]) -> list[int]:
        """Positions of tensors that came out of a softmax."""
        return [place for place, value in enumerate(values) if id(value) in self._derived]

    def _contract(self, equation: str, received: Tensor, weight: Any) -> None:
        """Report an einsum over heads and widths, such as `ibnd,hnd->ibh`, as a linear function."""
        left, _, right = equation.replace(" ", "").partition("->")[0].partition(",")
        if isinstance(weight, torch.nn.Parameter) and len(right) == 3 and left[-2:] == right[1:]:
            self._linear(received.flatten(-2), weight)

    def _derive(self, ran: _Ran, place: int) -> None:
        """Follow the results of a function of a followed tensor."""
        source = self._derived[id(ran.args[place])]
        if ran.output is ran.args[place]:
            return  # in place: the same tensor, already followed
        gap = (*ran.args[:place], None, *ran.args[place + 1 :])
        steps = (*source.steps, _Step(ran.function, gap, ran.kwargs, place))
        if isinstance(ran.output, Tensor):
            self._derived[id(ran.output)] = replace(source, tensor=ran.output, steps=steps)
        elif isinstance(ran.output, (tuple, list)) and not isinstance(ran.output, torch.Size):
            for index, part in enumerate(ran.output):  # chunk, split, unbind
                pick = _Step(operator.getitem, (None, index), {}, 0)
                self._derived[id(part)] = replace(source, tensor=part, steps=(*steps, pick))

    def _consume(self, ran: _Ran, operands: list[Tensor], index: int) -> None:
        """Report the product that a followed tensor takes part in."""
        source = self._derived[id(operands[index])]
        attention, value = source.tensor.detach(), operands[1 - index].detach()
        if source.dropout:
            attention = _replay(source, source.softmax.output.detach())
        as_product = partial(_as_product, ran.args[0] if ran.name == "einsum" else None, index)
        product = as_product(attention, value, ran.output.detach())
        if product is None:
            return
        keep = source.softmax.logits.detach() > _MASKED
        masked = None
        if not bool(keep.all()):
            marks = _replay(source, keep.to(torch.uint8), marks=True) != 0
            masked = as_product(marks, value, ran.output.detach())
        self._heard(
            SeenProduct(
                product,
                None if masked is None else masked.attention,
                source.dropout,
                source.softmax.token,
                ran.output,
                partial(_arrangement, as_product, attention, value),
            )
        )


def _as_product(
    equation: str | None, index: int, attention: Tensor, value: Tensor, output: Tensor
) -> Product | None:
    """Read a matrix product or an einsum whose operand number `index` is A as a product A·V."""
    if equation is not None:
        return einsum_product(equation, attention, value, output, index == 0)
    if attention.dim() < 2 or value.dim() < 2:
        return None
    if index == 0:
        return matmul_product(attention, value, output)
    return matmul_product(attention.mT, value.mT, output.mT)  # Vᵀ Aᵀ = Oᵀ


def _arrangement(
    as_product: Callable[[Tensor, Tensor, Tensor], Product | None], attention: Tensor, value: Tensor
) -> Arrange:
    """How the output of a product is laid out, from the shapes of its operands alone."""
    attention, value = attention.to("meta"), value.to("meta")

    def arrange(output: Tensor) -> Product:
        product = as_product(attention, value, output)
        assert product is not None
        return product

    return arrange


def _replay(source: _Derived, tensor: Tensor, marks: bool = False) -> Tensor:
    """Apply the steps from a softmax to its product to another tensor of the same layout."""
    for step in source.steps:
        if not (marks and getattr(step.function, "__name__", "") in _ADJUST):
            tensor = step.again(tensor)
    return tensor


def _operands(ran: _Ran) -> list[Any]:
    """The factors of a product; the addend of `baddbmm` is not one."""
    if ran.name == "einsum":
        rest = ran.args[1:]
        return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else [*rest]
    return list(ran.args[1:3] if ran.name == "baddbmm" else ran.args[:2])


def _dropout_rate(ran: _Ran) -> float:
    return float(ran.argument(1, "p", 0.5)) if ran.argument(2, "training", True) else 0.0


def _direct_call(ran: _Ran) -> DirectCall:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, ran.args, strict=False)), **ran.kwargs}
    query, key, value = (given[name].detach() for name in names[:3])
    mask = given.get("attn_mask")
    return DirectCall(
        query,
        key,
        value,
        None if mask is None else mask.detach(),
        float(given.get("dropout_p") or 0.0),
        bool(given.get("is_causal")),
        given.get("scale"),
        ran.output.detach(),
        ran.output,
    )


def push(mode: TorchFunctionMode) -> None:
    """Put a mode on top of this thread's stack."""
    _modes._push_mode(mode)


def remove(mode: TorchFunctionMode) -> None:
    """Take a mode off this thread's stack wherever it is, leaving the others in order."""
    if not any(active is mode for active in _modes._get_current_function_mode_stack()):
        return
    above = []
    while (top := _modes._pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        push(other)
