"""`Capture`: the frozen record of one attention call, with derived tensors on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attnlens.algebra.factors import default_rtol
from attnlens.algebra.nullspace import ValueBasis, shared_basis
from attnlens.algebra.rowwise import RowwiseBasis
from attnlens.algebra.softmax import EmptyRows, attention_weights
from attnlens.algebra.supports import Support, row_chunks, support_of
from attnlens.algebra.values import deficiency_factor, prepare_values, row_gram, working_dtype
from attnlens.errors import CaptureError
from attnlens.kernels import Backend
from attnlens.results import facts_html
from attnlens.saving import storable

Kind = Literal["encoder", "decoder", "cross"]
Link = Literal["first", "next", "broken"]


@storable("part")
@dataclass(frozen=True, eq=False)
class Masking:
    """What restricts or shifts the logits of a call, in one convention for every implementation.

    Attributes:
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend; None means
            everywhere.
        bias: additive, broadcastable to `[B, H, Q, K]`, finite; or None.
        causal: in addition, row `i` sees no key after `i` (the rule of scaled dot-product
            attention; no mask tensor exists).
        empty_rows: what the implementation makes of a row with nothing to attend to.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    empty_rows: EmptyRows = "zero"
    _supports: dict[tuple[int, int, int], Support] = field(default_factory=dict, repr=False)

    def support(self, batch: int, queries: int, keys: int, device: torch.device) -> Support:
        """Reduce the mask to its cheapest exact form; computed once for all layers that share it.

        Args:
            batch: B.
            queries: Q.
            keys: K.
            device: where to build it when there is no mask tensor.

        Returns:
            The support of every row.
        """
        shape = (batch, queries, keys)
        if shape not in self._supports:
            self._supports[shape] = support_of(self.mask, *shape, causal=self.causal, device=device)
        return self._supports[shape]


@storable("part")
@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The slices of W_O that read each head's context.

    Attributes:
        name: qualified name of the module in the model.
        weight: `[H, D, M]` per-head H, so that `Σ_h O_h H_h + bias` is the module's output.
        bias: `[M]` or None.
    """

    name: str
    weight: Tensor
    bias: Tensor | None = None

    @cached_property
    def _gram(self) -> Tensor:
        return row_gram(self.weight)

    @cached_property
    def factor(self) -> Tensor | None:
        """None where every head has full row rank, else C with `H Hᵀ = C Cᵀ`, `[H, D, D]`."""
        return deficiency_factor(self.weight, gram=self._gram)

    @cached_property
    def root(self) -> Tensor:
        """X with `H Hᵀ = X Xᵀ` per head, `[H, D, D]` float64; triangular where H has full rank."""
        return torch.linalg.cholesky(self._gram) if self.factor is None else self.factor


@dataclass(frozen=True, eq=False)
class LayerCapture:
    """One call of one Transformer layer on the residual stream; tensors are detached.

    Attributes:
        name: qualified name of the layer's module.
        stack: the name with its indices replaced by `*`.
        layer: index in its stack, counted by call where a module is shared.
        hidden: `[B, K, M]`, what entered the layer.
        output: `[B, K, M]`, what left it.
        mask: `[B, K]` bool, the real tokens.
        rerun: the layer as a function of its hidden state alone, every other argument as it was;
            it may be called any number of times, writes no cache and is seen by no lens.
        link: how `hidden` came about: `"first"` enters a chain of layers, `"next"` is what left
            the layer before, unchanged, and `"broken"` is neither.
        chosen: whether the lens was asked for this layer; others complete its chain.
    """

    name: str
    stack: str
    layer: int
    hidden: Tensor
    output: Tensor
    mask: Tensor
    rerun: Callable[[Tensor], Tensor]
    link: Link = "first"
    chosen: bool = True


@dataclass(frozen=True, eq=False)
class HiddenState:
    """What left a layer, or entered the first one; detached.

    Attributes:
        stack: the stack of the layer.
        layer: index of the layer, or -1 for what entered the first one.
        hidden: `[B, K, M]`.
        mask: `[B, K]` bool, the real tokens.
    """

    stack: str
    layer: int
    hidden: Tensor
    mask: Tensor


@storable("entry")
@dataclass(frozen=True, eq=False)
class Capture:
    """One attention call of one site, exactly as the model ran it; every tensor is detached.

    Attributes:
        site: qualified name of the attention module.
        grouped_value: `[B, Hkv, K, D]`, exactly as multiplied by A, bias included.
        context: `[B, H, Q, D]`, the output `O`; `attention() @ value` unless dropout acted.
        masking: mask, bias and causal rule.
        layer: index of the layer in its stack, counted by call where a module is shared.
        stack: the site's name with its indices replaced by `*`; layers count within a stack.
        kind: `"encoder"` or `"decoder"` self-attention, or `"cross"`.
        call: index of this call among those of the same layer in one forward (packed sequences,
            several products).
        windows: how many windows or blocks of one example are folded into B; 1 where B counts
            examples.
        query: `[B, H, Q, D]`, after any rotary embedding or norm; None where only A was seen.
        grouped_key: `[B, Hkv, K, D]`, not repeated for grouped queries; None likewise.
        scaling: factor on the logits; None likewise.
        dropout: dropout probability that acted on A in this call; 0 in evaluation.
        softcap: c in `c · tanh(logits / c)`, or None.
        sinks: logits of an extra softmax column, or None.
        output_projection: W_O as found by following the context, or None with `projection_reason`.
        projection_reason: why there is no `projection`; empty when there is one.
        implementation: the attention implementation that ran, such as `"sdpa"`; `"direct sdpa"` or
            `"softmax"` where the module runs its own.
        observed: `[B, H, Q, K]` A as seen in the model, where it was seen; else None.
        padding: `[B, N]` bool, the `attention_mask` that the encoder was given, True for real
            tokens; None where it was given none. Some models let padding attend to itself.
        backend: which kernels derived quantities are computed with, see :mod:`attnlens.kernels`.
    """

    site: str
    grouped_value: Tensor
    context: Tensor
    masking: Masking
    layer: int = 0
    stack: str = ""
    kind: Kind = "encoder"
    call: int = 0
    windows: int = 1
    query: Tensor | None = None
    grouped_key: Tensor | None = None
    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None
    output_projection: OutputProjection | None = None
    projection_reason: str = ""
    implementation: str = ""
    observed: Tensor | None = field(default=None, repr=False)
    padding: Tensor | None = field(default=None, repr=False)
    backend: Backend = "auto"

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`(B, H, Q, K, D)` of the call."""
        batch, heads, queries, width = self.context.shape
        return batch, heads, queries, self.grouped_value.shape[-2], width

    @property
    def key(self) -> Tensor | None:
        """`[B, H, K, D]`, grouped heads repeated; None where only A was seen."""
        return None if self.grouped_key is None else self._repeated(self.grouped_key)

    @property
    def value(self) -> Tensor:
        """`[B, H, K, D]`, grouped heads repeated."""
        return self._repeated(self.grouped_value)

    @property
    def mask(self) -> Tensor | None:
        """Bool, broadcastable to `[B, H, Q, K]`, True where a query may attend; None if free."""
        mask = self._mask_rows(slice(None))
        return mask[None, None] if mask is not None and mask.dim() == 2 else mask

    @property
    def bias(self) -> Tensor | None:
        """Additive position bias, broadcastable to `[B, H, Q, K]`, or None."""
        return self.masking.bias

    @property
    def projection(self) -> Tensor | None:
        """Per-head H, `[H, D, M]`, or None for the reason in `projection_reason`."""
        return None if self.output_projection is None else self.output_projection.weight

    @cached_property
    def support(self) -> Support:
        """The keys every real row may attend to, in the cheapest exact form."""
        batch, _, queries, keys, _ = self.shape
        support = self.masking.support(batch, queries, keys, self.context.device)
        if self._padded_rows is not None and not support.shared:
            return support.restricted(self._padded_rows)
        return support

    @property
    def real_rows(self) -> Tensor:
        """Query rows that are not padding, `[B, 1 or H, Q]` bool."""
        rows = self.support.active(self.shape[2], cross=self.kind == "cross")
        return rows if self._padded_rows is None else rows & self._padded_rows

    @property
    def value_space(self) -> Literal["T", "V"]:
        """`"T"` where H is known, else `"V"`: null spaces then refer to the values alone."""
        return "V" if self.output_projection is None else "T"

    @property
    def value_factor(self) -> Tensor | None:
        """`[H, D, D]` float64 C with `LN(V H) = LN(V C)`; None where V itself serves."""
        return None if self.output_projection is None else self.output_projection.factor

    @property
    def exact_context(self) -> bool:
        """Whether `context` is `A V` to float32 precision: wide enough and without dropout."""
        return self.dropout == 0 and self.context.dtype in (torch.float32, torch.float64)

    @property
    def streams(self) -> bool:
        """Whether A follows from queries, keys, mask and bias alone, row by row."""
        seen = self.observed is not None or self.query is None
        return not seen and self.softcap is None and self.sinks is None

    def attention(self, rows: slice | None = None) -> Tensor:
        """Return A, before dropout, as the implementation that ran computed it.

        Args:
            rows: query rows to compute; all by default.

        Returns:
            `[B, H, Q, K]` in `[0, 1]`, float32 or float64.

        Raises:
            CaptureError: if the call kept neither A nor the queries and keys.
        """
        rows = slice(None) if rows is None else rows
        if self.observed is not None:
            return self.observed[:, :, rows].to(working_dtype(self.observed))
        if self.query is None or self.key is None:
            raise CaptureError(
                f"{self.site} (layer {self.layer}) was captured without A and without queries "
                f"and keys, so attention cannot be recomputed."
            )
        return attention_weights(
            self.query[:, :, rows],
            self.key,
            scaling=self.scaling,
            mask=self._mask_rows(rows),
            bias=_rows_of(self.bias, rows),
            softcap=self.softcap,
            sinks=_rows_of(self.sinks, rows),
            empty_rows=self.masking.empty_rows,
        )

    def attention_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Visit A in blocks of query rows, never as one `[B, H, Q, K]` tensor.

        Yields:
            `(rows, attention[:, :, rows])`.
        """
        batch, heads, queries, keys, _ = self.shape
        for start, stop in row_chunks(queries, batch * heads * keys):
            rows = slice(start, stop)
            yield rows, self.attention(rows)

    def prepared_values(self, *, simplex: bool = False, grouped: bool = False) -> Tensor:
        """Return the real value rows in float64, as the null space of T sees them.

        Args:
            simplex: append the constant column.
            grouped: leave grouped heads unrepeated where H allows it.

        Returns:
            `[B, H or Hkv, K, E]`, zero at masked keys.
        """
        values = self.reached_values(grouped=grouped)
        return prepare_values(values, self.support.keys, simplex=simplex)

    def reached_values(self, *, grouped: bool = False) -> Tensor:
        """Return the value rows as the null space of T sees them, padding included.

        Args:
            grouped: leave grouped heads unrepeated where H and the mask allow it.

        Returns:
            `[B, H or Hkv, K, E]`: V itself, or `V C` in float64 where H is rank-deficient.
        """
        factor = self.value_factor
        per_head = factor is not None or self.support.keys.shape[1] > 1
        value = self.grouped_value if grouped and not per_head else self.value
        return value if factor is None else value.double() @ factor.to(value.device)

    def reached_context(self) -> Tensor:
        """Return the model's outputs `A V` in the space of :meth:`reached_values`.

        Returns:
            `[B, H, Q, E]`: the context itself, or `O C` in float64 where H is rank-deficient.
        """
        factor = self.value_factor
        if factor is None:
            return self.context
        return self.context.double() @ factor.to(self.context.device)

    def value_basis(
        self, simplex: bool = False, rtol: float | None = None
    ) -> ValueBasis | RowwiseBasis:
        """Find an orthonormal basis of the column space of T.

        Args:
            simplex: use `[T, 1]`, so that projected rows keep their sum.
            rtol: relative threshold for the numerical rank.

        Returns:
            The basis: see :func:`attnlens.algebra.nullspace.value_basis`.
        """
        rtol = default_rtol(self.shape[3], self.shape[4]) if rtol is None else rtol
        values = self.prepared_values(simplex=simplex)
        if self.support.shared:
            return shared_basis(values, self.support, rtol, simplex=simplex, like=self.value)
        return RowwiseBasis(values, self.support, rtol, simplex, working_dtype(self.value))

    def effective_attention(self, simplex: bool = False, rtol: float | None = None) -> Tensor:
        """Compute null-space effective attention `A⊥`.

        Args:
            simplex: keep the row sums of A.
            rtol: relative threshold for the numerical rank.

        Returns:
            `[B, H, Q, K]` with `A⊥ T = A T`, zero outside the mask.
        """
        return self.value_basis(simplex, rtol).project(self.attention())

    def projected_value(self) -> Tensor:
        """Compute `T = V H`, the values as they reach the residual stream.

        Returns:
            `[B, H, K, M]`.

        Raises:
            CaptureError: where H is not known, with the reason.
        """
        if self.output_projection is None:
            raise CaptureError(
                f"{self.site} has no per-head output projection: {self.projection_reason}"
            )
        return self.value @ self.output_projection.weight.to(self.value.dtype)

    def _repr_html_(self) -> str:
        batch, heads, queries, keys, width = self.shape
        return facts_html(
            "Capture",
            [
                ("site", self.site),
                ("layer", f"{self.layer} of {self.stack}"),
                ("kind", self.kind),
                ("implementation", self.implementation or "unknown"),
                ("examples × heads", f"{batch} × {heads}"),
                ("queries × keys", f"{queries} × {keys}"),
                ("head dimension", width),
                ("output projection", self.projection_reason or "known"),
            ],
        )

    @property
    def _padded_rows(self) -> Tensor | None:
        """The encoder's attention mask, `[B, 1, Q]`, where it speaks of this call's queries."""
        batch, _, queries, _, _ = self.shape
        if self.padding is None or self.kind == "cross" or self.padding.shape != (batch, queries):
            return None
        return self.padding[:, None]

    def _mask_rows(self, rows: slice) -> Tensor | None:
        """The mask of some rows, with the causal rule made explicit for those rows only."""
        mask = _rows_of(self.masking.mask, rows)
        if not self.masking.causal:
            return mask
        _, _, queries, keys, _ = self.shape
        index = torch.arange(queries, device=self.context.device)[rows, None]
        seen = torch.arange(keys, device=self.context.device) <= index
        return seen if mask is None else seen & mask

    def _repeated(self, grouped: Tensor) -> Tensor:
        groups = self.context.shape[1] // grouped.shape[1]
        return grouped if groups == 1 else grouped.repeat_interleave(groups, 1)


def _rows_of(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """Pick query rows of a tensor broadcastable to `[B, H, Q, K]`."""
    if tensor is None or tensor.dim() < 2 or tensor.shape[-2] == 1:
        return tensor
    return tensor[..., rows, :]
