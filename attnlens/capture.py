"""`Capture`: the frozen record of one attention call, with derived tensors on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attnlens.algebra.factors import ValueBasis
from attnlens.algebra.layer_level import LayerLevel, layer_level, layer_reads
from attnlens.algebra.minimal_distribution import MinimalDistributions, minimal_distributions
from attnlens.algebra.norm_weights import summed_norms
from attnlens.algebra.problem import problem
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.softmax import AttentionRows, EmptyRows
from attnlens.algebra.supports import Support, support_of
from attnlens.algebra.values import Reach, reach_of, repeated, working_dtype
from attnlens.errors import CaptureError, InputError
from attnlens.kernels import Backend
from attnlens.kernels.ranks import require_rtol
from attnlens.kernels.torch_gram import selected_rows
from attnlens.results import facts_html
from attnlens.saving import storable
from attnlens.showing import Shown

Kind = Literal["encoder", "decoder", "cross"]
Link = Literal["first", "next", "broken"]
Level = Literal["head", "layer"]


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
    _supports: dict[Any, tuple[Tensor | None, Support]] = field(default_factory=dict, repr=False)

    def support(
        self,
        batch: int,
        queries: int,
        keys: int,
        *,
        own: bool = True,
        padding: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Support:
        """Reduce the mask to its cheapest exact form; computed once for all layers that share it.

        Args:
            batch: B.
            queries: Q.
            keys: K.
            own: whether queries and keys are the same tokens.
            padding: `[B, Q]` bool, the rows that may count; None leaves it to the mask.
            device: where to build it when there is no mask tensor.

        Returns:
            The support of every row that counts.
        """
        known = (batch, queries, keys, own, id(padding))
        if known not in self._supports:
            whole = support_of(self.mask, batch, queries, keys, causal=self.causal, device=device)
            # the padding is kept with it, so that its identity stays its own
            self._supports[known] = padding, whole.counted(own=own, padding=padding)
        return self._supports[known][1]


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
    def reads(self) -> Tensor:
        """`W_O` of all heads together without what it does not write, `[H, D, R]` float64."""
        return layer_reads(self.weight)

    @property
    def separates_heads(self) -> bool:
        """Whether the stacked `W_O` has full row rank: no head can make up for another then."""
        heads, width, rank = self.reads.shape
        return rank == heads * width

    @cached_property
    def reach(self) -> Reach:
        """What each head's slice reads of its context."""
        return reach_of(self.weight)


@dataclass(frozen=True, eq=False)
class LayerCapture:
    """One call of one Transformer layer on the residual stream; tensors are detached.

    Attributes:
        name: qualified name of the layer's module.
        stack: the name with its indices replaced by `*`.
        layer: index in its stack, counted by call where a module is shared.
        hidden: `[B, K, M]`, what entered the layer; a copy.
        output: `[B, K, M]`, what left it.
        mask: `[B, K]` bool, the real tokens.
        rerun: the layer as a function of its hidden state alone, every other argument as it was;
            it may be called any number of times, writes no cache and is seen by no lens.
        link: how `hidden` came about: `"first"` enters a chain of layers, `"next"` is what left
            the layer before, unchanged, and `"broken"` is neither.
        chosen: whether the lens was asked for this layer; others complete its chain.
        precision: that the layer computes in, which autocast may lower; by default of `hidden`.
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
    precision: torch.dtype | None = None


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
@dataclass(frozen=True, eq=False, repr=False)
class Capture(Shown):
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
        receiver: name of the module that received the context, which is W_O also where its weight
            is not known; empty where none was found.
        implementation: the attention implementation that ran, such as `"sdpa"`; `"direct sdpa"` or
            `"softmax"` where the module runs its own.
        observed: `[B, H, Q, K]` A as seen in the model, where it was seen; else None.
        padding: `[B, N]` bool, the `attention_mask` that the encoder was given, True for real
            tokens; None where it was given none. Some models let padding attend to itself.
        backend: which kernels derived quantities are computed with, see :mod:`attnlens.kernels`.

    Examples:
        >>> capture = record(model, **batch)[0]
        >>> torch.allclose(capture.attention() @ capture.value, capture.context, atol=1e-5)
        True
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
    receiver: str = ""
    implementation: str = ""
    observed: Tensor | None = field(default=None, repr=False)
    padding: Tensor | None = field(default=None, repr=False)
    backend: Backend = "auto"
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`(B, H, Q, K, D)` of the call."""
        batch, heads, queries, width = self.context.shape
        return batch, heads, queries, self.grouped_value.shape[-2], width

    @property
    def key(self) -> Tensor | None:
        """`[B, H, K, D]`, grouped heads repeated; None where only A was seen."""
        return None if self.grouped_key is None else repeated(self.grouped_key, self.shape[1])

    @property
    def value(self) -> Tensor:
        """`[B, H, K, D]`, grouped heads repeated."""
        return repeated(self.grouped_value, self.shape[1])

    @property
    def mask(self) -> Tensor | None:
        """Bool, broadcastable to `[B, H, Q, K]`, True where a query may attend; None if free."""
        mask = self.rows.mask_rows(slice(None))
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
    def rows(self) -> AttentionRows:
        """How A comes about."""
        return AttentionRows(
            shape=self.shape[:4],
            query=self.query,
            key=self.grouped_key,
            scaling=self.scaling,
            mask=self.masking.mask,
            bias=self.masking.bias,
            causal=self.masking.causal,
            softcap=self.softcap,
            sinks=self.sinks,
            empty_rows=self.masking.empty_rows,
            observed=self.observed,
            backend=self.backend,
            site=f"{self.site} (layer {self.layer})",
        )

    @property
    def support(self) -> Support:
        """The keys that every row that counts may attend to, in the cheapest exact form."""
        batch, _, queries, keys, _ = self.shape
        cross = self.kind == "cross"
        padding = self.padding
        if cross or padding is None or padding.shape != (batch, queries):
            padding = None
        return self.masking.support(
            batch, queries, keys, own=not cross, padding=padding, device=self.context.device
        )

    @property
    def real_rows(self) -> Tensor:
        """Query rows that are not padding, `[B, 1 or H, Q]` bool."""
        return self.support.active

    @property
    def value_space(self) -> Literal["T", "V"]:
        """`"T"` where H is known, else `"V"`: null spaces then refer to the values alone."""
        return "V" if self.output_projection is None else "T"

    @property
    def reach(self) -> Reach | None:
        """What the output projection reads of each context; None where it is not known."""
        return None if self.output_projection is None else self.output_projection.reach

    @property
    def derived(self) -> dict[Any, Any]:
        """What was derived of this call already, for the next who asks."""
        return self._derived

    @property
    def exact_context(self) -> bool:
        """Whether `context` is `A V` to float32 precision: wide enough and without dropout."""
        return self.dropout == 0 and self.context.dtype in (torch.float32, torch.float64)

    def attention(self, rows: slice | None = None) -> Tensor:
        """Return A, before dropout, as the implementation that ran computed it.

        Args:
            rows: query rows to compute; all by default.

        Returns:
            `[B, H, Q, K]` in `[0, 1]`, float32 or float64.

        Raises:
            CaptureError: if the call kept neither A nor the queries and keys.
        """
        return self.rows.attention(rows)

    def value_basis(
        self, simplex: bool = False, rtol: float | None = None
    ) -> ValueBasis | RowFactor:
        """Find an orthonormal basis of the column space of T; values not finite count as zero.

        Args:
            simplex: use `[T, 1]`, so that projected rows keep their sum.
            rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
                `max(n, D) · eps(float32)`.

        Returns:
            The basis: see :func:`attnlens.functional.value_basis`.
        """
        posed = problem(self, rtol)
        return posed.simplex_basis if simplex else posed.basis

    def effective_attention(
        self, simplex: bool = False, rtol: float | None = None, *, level: Level = "head"
    ) -> Tensor:
        """Compute null-space effective attention `A⊥`.

        Args:
            simplex: keep the row sums of A.
            rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
                `max(n, D) · eps(float32)`.
            level: what sees it: the output of each `"head"`, or that of the `"layer"`, the sum of
                all heads. What moves a model's answer is :func:`attnlens.effective_for`.

        Returns:
            `[B, H, Q, K]` with `A⊥ T = A T`, zero outside the mask. Heads whose values or output
            projection are not finite are NaN.

        Raises:
            InputError: if the level is none of these, or is to keep row sums.
        """
        if level not in get_args(Level) or (level == "layer" and simplex):
            raise InputError(
                f'level must be "head", or "layer" without simplex. Got {level!r}, '
                f"simplex={simplex!r}."
            )
        if level == "layer" and not self.known_projection.separates_heads:
            return self.layer_level(rtol).maps(self.support).to(working_dtype(self.context))
        projected = self.value_basis(simplex, rtol).project(self.attention())
        return torch.where(problem(self, rtol).finite[..., None, None], projected, torch.nan)

    def layer_level(self, rtol: float | None = None) -> LayerLevel:
        """Look at the attention of all heads as the layer's output does; H must be known.

        Args:
            rtol: relative threshold for the numerical rank, in `[1e-7, 1)`.

        Returns:
            See :class:`attnlens.algebra.layer_level.LayerLevel`.
        """
        reads = self.known_projection.reads.to(self.context.device)
        return layer_level(self.rows, self.value, self.support, reads, require_rtol(rtol))

    def projected_value(self) -> Tensor:
        """Compute `T = V H`, the values as they reach the residual stream.

        Returns:
            `[B, H, K, M]`.

        Raises:
            CaptureError: where H is not known, with the reason.
        """
        return self.value @ self.known_projection.weight.to(self.value.dtype)

    @property
    def known_projection(self) -> OutputProjection:
        """The output projection; a `CaptureError` with the reason where it is not known."""
        if self.output_projection is None:
            raise CaptureError(
                f"{self.site} has no per-head output projection: {self.projection_reason}"
            )
        return self.output_projection

    def minimal_distribution(self) -> MinimalDistributions:
        """Find the distribution of least norm that gives the output of every row.

        Returns:
            See :func:`attnlens.functional.minimal_distribution`.
        """
        return minimal_distributions(problem(self))

    def norm_weighted_attention(self, *, summed: bool = False) -> Tensor:
        """Compute norm-weighted attention, `p_ij ‖T_j‖` (Kobayashi et al., EMNLP 2020).

        Args:
            summed: over heads as vectors, `‖Σ_h p^h_ij T^h_j‖`, which takes a known H.

        Returns:
            `[B, H, Q, K]`, or summed `[B, Q, K]` float64. Where H is not known, V stands in for T.

        Raises:
            CaptureError: if neither A nor the queries and keys are known; or where H is not known
                and heads are to be summed, with the reason.
        """
        posed = problem(self)
        if not summed:
            attention = self.attention()
            return attention * posed.value_norms[..., None, :].to(attention.dtype)
        value = selected_rows(self.value, self.support.keys, torch.float64)
        return summed_norms(self.rows, value, self.known_projection.weight)

    def __repr__(self) -> str:
        shape = "·".join(map(str, self.shape))
        return (
            f"Capture of {self.site}, layer {self.layer}, {self.kind}, {self.implementation}\n"
            f"  B·H·Q·K·D = {shape}, {self.context.dtype} on {self.context.device}\n"
            f"  output projection {self.projection_reason or 'known'}"
        )

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
