"""One attention call as linear algebra sees it: the start of every quantity.

What one observer has asked for is not computed again for the next.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from attnlens.algebra.closed_forms import Outputs
from attnlens.algebra.factors import (
    SharedFactor,
    ValueBasis,
    condition,
    condition_of_rows,
    shared_factor,
)
from attnlens.algebra.rowchunks import RowChunk
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.softmax import AttentionRows, RowSums
from attnlens.algebra.supports import Support, support_of
from attnlens.algebra.values import (
    Reach,
    reach_of,
    repeated,
    require_finite_reach,
    require_squares,
    working_dtype,
)
from attnlens.errors import InputError
from attnlens.kernels.ranks import rank_threshold, require_rtol
from attnlens.kernels.torch_gram import independent, selected_rows

# From this bound of the squared condition number on, which is D² at least, float32 outputs are
# computed again: their rounding is amplified by its root.
_ILL_CONDITIONED = 1e5


def ill_conditioned(bound: Tensor, width: int) -> Tensor:
    """Tell where outputs in float32 amplify their rounding when they are solved for.

    Args:
        bound: at least the squared condition number of the values, or Inf where it is not known.
        width: head dimension D.

    Returns:
        Bool, the shape of `bound`.
    """
    return bound > max(_ILL_CONDITIONED, 100 * width**2)


class Call(Protocol):
    """What a problem is made of; a `Capture` is one."""

    @property
    def rows(self) -> AttentionRows:
        """How A comes about."""

    @property
    def support(self) -> Support:
        """The keys of every row that counts."""

    @property
    def grouped_value(self) -> Tensor:
        """`[B, Hkv, K, D]`."""

    @property
    def context(self) -> Tensor:
        """`[B, H, Q, D]`."""

    @property
    def exact_context(self) -> bool:
        """Whether `context` is `A V` to float32 precision."""

    @property
    def reach(self) -> Reach | None:
        """What the output projection reads, or None where it is not known."""

    @property
    def derived(self) -> MutableMapping[Any, Any]:
        """What was derived of this call already."""


def problem(call: Call, rtol: float | None = None) -> Problem:
    """Pose the problem of one attention call, or return it where it was posed before.

    Args:
        call: the call.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
            `max(n, D) · eps(float32)`, n the number of real keys.

    Returns:
        The problem.
    """
    posed: Problem | None = call.derived.get(("problem", rtol))
    if posed is not None:
        return posed
    reach, heads = call.reach, call.context.shape[1]
    values, context = call.grouped_value, call.context
    if reach is not None and reach.factor is not None:
        reads = reach.factor.to(values.device)
        values, context = repeated(values, heads).double() @ reads, context.double() @ reads
    elif call.support.keys.shape[1] > 1:
        values = repeated(values, heads)
    posed = Problem(
        values=values,
        model_outputs=context if call.exact_context else None,
        rows=call.rows,
        support=call.support,
        root=None if reach is None else reach.root.to(values.device),
        known=None if reach is None else reach.finite.to(values.device),
        dtype=working_dtype(call.grouped_value),
        rtol=rtol,
    )
    call.derived["problem", rtol] = posed
    return posed


def plain_problem(
    value: Tensor,
    queries: int,
    attention: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    rtol: float | None = None,
    cross: bool = False,
) -> Problem:
    """Pose the problem of plain tensors.

    Args:
        value: `[B, H, K, D]` values, grouped heads repeated.
        queries: number of query rows Q.
        attention: `[B, H, Q, K]` A, or None where it is not needed.
        mask: bool, True = may attend, broadcastable to `[B, H, Q, K]`; None = everywhere.
        projection: `[H, D, M]` output projection, or None where it is not known.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        The problem; without A it has neither outputs nor rows.

    Raises:
        InputError: if shapes, types or the threshold do not fit.
        NonFiniteError: if a value that is attended to, or the projection, is not finite.
    """
    batch, heads, keys, width = value.shape
    shape = (batch, heads, queries, keys)
    if mask is not None:
        sizes = zip(mask.shape, shape, strict=False)
        fits = mask.dim() == 4 and all(size in {1, wanted} for size, wanted in sizes)
        if mask.dtype != torch.bool or not fits:
            raise InputError(
                f"mask must be boolean, True = may attend, and broadcast to {list(shape)}; a "
                f"padding mask is [B, 1, 1, K]. Got {mask.dtype} {list(mask.shape)}."
            )
        mask = mask.to(value.device)
    if projection is not None and (projection.dim() != 3 or projection.shape[:2] != (heads, width)):
        raise InputError(
            f"projection must be [H, D, M] with H = {heads}, D = {width}. "
            f"Got {list(projection.shape)}."
        )
    support = support_of(mask, batch, queries, keys, device=value.device).counted(own=not cross)
    reach = None
    if projection is not None:
        reach = require_finite_reach(reach_of(projection.to(value.device)))
    values = value
    if reach is not None and reach.factor is not None:
        values = value.double() @ reach.factor
    require_squares(values, support.keys)
    return Problem(
        values=values,
        model_outputs=None,
        rows=AttentionRows(shape, observed=attention),
        support=support,
        root=None if reach is None else reach.root,
        known=None,
        dtype=working_dtype(value),
        rtol=require_rtol(rtol),
    )


@dataclass(eq=False)
class Problem:
    """The values, outputs and rows of one call, in the space that its output reads.

    Attributes:
        values: `[B, Hv, K, D]`; Hv divides H where grouped heads share them.
        model_outputs: `[B, H, Q, D]`, `O = A V` as the model computed it, or None where dropout or
            rounding spoilt it.
        rows: how A comes about.
        support: the keys of every row that counts.
        root: `[H, D, D]` float64 X with `‖A T‖ = ‖O X‖`, or None where H is not known.
        known: `[H]` bool, where H is finite; or None.
        dtype: working precision of maps.
        rtol: relative threshold for the numerical rank, or None for the default.
    """

    values: Tensor
    model_outputs: Tensor | None
    rows: AttentionRows
    support: Support
    root: Tensor | None
    known: Tensor | None
    dtype: torch.dtype
    rtol: float | None = None

    @property
    def heads(self) -> int:
        """Number of query heads H."""
        return self.rows.shape[1]

    @cached_property
    def active(self) -> Tensor:
        """The rows that count, `[B, H, Q]` bool."""
        return self.support.active.expand(self.rows.shape[:3])

    @cached_property
    def sizes(self) -> Tensor:
        """Number of keys of every row, `[B, H, Q]` int64; zero in rows that do not count."""
        return torch.where(self.active, self.support.sizes.expand(self.rows.shape[:3]), 0)

    @cached_property
    def over_all_keys(self) -> SharedFactor:
        """The factor of the values at all real keys, whatever single rows see of them."""
        union = replace(self.support, first=None, last=None, rows=None)
        # values in float64 only because H is rank-deficient are left to whoever takes them
        widened = self.values.dtype != self.dtype and self.values.dtype == torch.float64
        backend = "auto" if widened else self.rows.backend
        return shared_factor(self.values, union, self.rtol, backend=backend)

    @cached_property
    def factor(self) -> SharedFactor | RowFactor:
        """The factor of the values that each row sees."""
        if self.support.shared:
            return self.over_all_keys
        values = selected_rows(self.values, self.support.keys, torch.float64)
        finite = values.isfinite().flatten(2).all(-1)[..., None, None]
        values = torch.where(finite, values, 0.0)  # a factorisation must not meet them
        return RowFactor(values, self.support, self.heads, self.dtype, self.rtol)

    @cached_property
    def independent(self) -> Tensor:
        """Examples of at most D keys whose values are independent in all heads, `[B]` bool.

        Nothing is null there, `A⊥ = A`, and no factor is needed.
        """
        width, heads = self.values.shape[-1], self.values.shape[1]
        tokens = self.support.tokens
        proven = (tokens <= width).all(-1)
        if not self.support.shared or not bool(proven.any()):
            return proven & self.support.shared
        some = proven.nonzero()[:, 0]
        threshold = rank_threshold(tokens[some], width, self.rtol).expand(-1, heads)
        found = independent(self.values[some], self.support.keys[some], threshold)
        proven[some] = found.all(-1)
        return proven

    def part(self, examples: Tensor) -> Problem:
        """Take some examples.

        Args:
            examples: `[N]` int64.

        Returns:
            Their problem, with the sums of rows where they are known.
        """
        _, _, queries, keys = self.rows.shape
        outputs = self.model_outputs
        part = replace(
            self,
            values=self.values[examples],
            model_outputs=None if outputs is None else outputs[examples],
            rows=self.rows.part(examples, queries, keys),
            support=self.support.part(examples, queries, keys),
        )
        if "independent" in self.__dict__:
            part.independent = self.independent[examples]
        if "_summed" in self.__dict__:
            sums, context = self._summed
            picked = RowSums(*(one[examples] for one in sums))
            part._summed = picked, None if context is None else context[examples]
        return part

    @cached_property
    def finite(self) -> Tensor:
        """Where values at real keys and H are finite, `[B, H]` bool."""
        if bool(self.independent.all()):
            finite = torch.ones_like(self.active[..., 0])
        else:
            finite = repeated(self.over_all_keys.finite, self.heads)
        return finite if self.known is None else finite & self.known

    @cached_property
    def condition(self) -> Tensor:
        """Condition number of T over all real keys, `[B, H]` float64, ≥ 1."""
        short = self.independent
        if not bool(short.any()) or "over_all_keys" in self.__dict__:
            return condition(self.spectrum, repeated(self.over_all_keys.rank, self.heads))
        some, others = short.nonzero()[:, 0], (~short).nonzero()[:, 0]
        found = self.values.new_empty((len(short), self.heads), dtype=torch.float64)
        values, keys = self.values[some], self.support.keys[some]
        found[some] = condition_of_rows(values, keys, self.root, self.heads)
        if len(others):
            found[others] = self.part(others).condition
        return found

    @cached_property
    def spectrum(self) -> Tensor:
        """Squared singular values of T over all real keys, ascending, `[B, H, D]` float64."""
        return self.over_all_keys.spectrum(self.root, self.heads)

    @cached_property
    def value_norms(self) -> Tensor:
        """Lengths `‖T_j‖ = √(v_j H Hᵀ v_jᵀ)`, `[B, H, K]` float64, zero at masked keys."""
        values = selected_rows(self.values, self.support.keys, self.dtype)
        if self.root is not None:
            values = repeated(values, self.heads) @ self.root.to(values.dtype)
        norms: Tensor = torch.linalg.vector_norm(values, dim=-1)
        return repeated(norms, self.heads).double()

    @cached_property
    def basis(self) -> ValueBasis | RowFactor:
        """What maps are projected with; heads that are not finite count as zero."""
        return self._basis(simplex=False)

    @cached_property
    def simplex_basis(self) -> ValueBasis | RowFactor:
        """The same with the constant vector, so that projected rows keep their sum."""
        return self._basis(simplex=True)

    @cached_property
    def row_sums(self) -> RowSums:
        """Sums of every row of A."""
        return self._summed[0]

    @cached_property
    def outputs(self) -> Tensor:
        """`A V` without dropout and the rounding of half precision, `[B, H, Q, D]`."""
        if self.model_outputs is not None:
            return self.model_outputs
        if "_summed" in self.__dict__ or self.rows.bias is not None:
            outputs = self._summed[1]
            assert outputs is not None
            return outputs
        return self.rows.context(self._real_values)

    @cached_property
    def shift(self) -> Tensor:
        """About the mean value of every head, `[B, H, D]` float64, representable in float32."""
        factor = self.over_all_keys
        mean = factor.total / factor.tokens.clamp(min=1)[..., None]
        return repeated(mean.nan_to_num(0.0, 0.0, 0.0).float().double(), self.heads)

    def plain(self, shift: Tensor | None = None) -> Outputs:
        """The outputs as they are, with a shift that has not been applied."""
        batch, heads, _, width = self.outputs.shape
        if shift is None:
            shift = torch.zeros(
                batch, heads, width, dtype=torch.float64, device=self.outputs.device
            )
        return Outputs(self.outputs, shift, torch.zeros_like(shift[..., 0], dtype=torch.bool))

    def again(
        self, doubtful: Tensor, sums: RowSums | None = None, shift: Tensor | None = None
    ) -> tuple[Outputs, RowSums | None]:
        """Compute outputs, and sums of rows, of some heads again in float64.

        Args:
            doubtful: `[B, H]` bool, the heads.
            sums: sums to be replaced for them, or None.
            shift: `[B, H, D]` float64, taken from their values; zero by default.

        Returns:
            All outputs, in float64 if there are such heads, and the sums.
        """
        plain = self.plain(shift)
        if not self.can_refine or not bool(doubtful.any()):
            return plain, sums
        example, head = doubtful.nonzero(as_tuple=True)
        part = self.support.of_heads(example, head)
        values = self.values[example, head * self.values.shape[1] // self.heads][:, None].double()
        values = values - plain.shift[example, head][:, None, None]
        values = torch.where(part.keys[..., None], values, 0.0)
        found, context = self.rows.taken(example, head).sums(part, values)
        outputs = plain.context.double()
        assert context is not None
        outputs[example, head] = context[:, 0]
        again = Outputs(outputs, plain.shift, doubtful)
        if sums is None:
            return again, None
        replaced = RowSums(*(part.clone() for part in sums))
        for whole, new in zip(replaced, found, strict=True):
            whole[example, head] = new[:, 0]
        return again, replaced

    def outputs_of(self, chunk: RowChunk, outputs: Outputs, mass: Tensor) -> Tensor:
        """Pick the outputs of a chunk of rows, computed again where values are ill-conditioned.

        Args:
            chunk: the rows.
            outputs: of all heads.
            mass: `[B, H, Q]` float64 t, how often to subtract the shift m.

        Returns:
            `o − t m`, `[h, g, r, D]` float64.
        """
        shift = chunk.of_heads(outputs.shift)[:, :, None]
        left = torch.where(outputs.shifted[..., None], 0.0, mass)
        picked = chunk.take(outputs.context).double() - chunk.take(left)[..., None] * shift
        doubtful = ill_conditioned(chunk.row_bound, self.values.shape[-1])
        doubtful &= chunk.row_rank < chunk.row_sizes  # [h, r]
        if not self.can_refine or not bool(doubtful.any()):
            return picked
        some = doubtful.any(0).nonzero()[:, 0]
        span, values = chunk.near(some)
        heads = torch.arange(self.heads, device=some.device)
        heads = heads.unflatten(0, (-1, chunk.shared))[chunk.heads].flatten()
        example = torch.full_like(heads, chunk.example)
        rows = self.rows.taken(example, heads, chunk.rows[some], span)
        values = (values[:, None] - shift).flatten(0, 1)[:, None]
        context = rows.context(values)[:, 0].unflatten(0, (-1, chunk.shared))  # [h, g, s, D]
        picked[:, :, some] = torch.where(doubtful[:, None, some, None], context, picked[:, :, some])
        return picked

    @property
    def can_refine(self) -> bool:
        """Whether float64 rows of A would be more precise than the outputs at hand."""
        return self.rows.known and self.dtype != torch.float64

    @property
    def output_eps(self) -> float:
        """Relative rounding of the outputs."""
        return torch.finfo(self.dtype).eps

    @cached_property
    def ill_conditioned(self) -> Tensor:
        """Heads whose outputs amplify rounding when solved for, `[B, H]` bool."""
        factor = self.over_all_keys
        doubtful = ill_conditioned(factor.bound, self.values.shape[-1])
        return repeated(doubtful & ~factor.free, self.heads)

    @cached_property
    def _real_values(self) -> Tensor:
        """Values, zero at masked keys, in the precision that rows are summed in."""
        dtype = torch.promote_types(working_dtype(self.values), self.dtype)
        return selected_rows(self.values, self.support.keys, dtype)

    @cached_property
    def _summed(self) -> tuple[RowSums, Tensor | None]:
        """Sums of rows; where outputs must be recomputed, these come with them."""
        wanted = self.model_outputs is None and "outputs" not in self.__dict__
        return self.rows.sums(self.support, self._real_values if wanted else None)

    def _basis(self, *, simplex: bool) -> ValueBasis | RowFactor:
        factor = self.factor
        if isinstance(factor, RowFactor):
            return replace(factor, simplex=True) if simplex else factor
        return factor.basis(simplex=simplex).for_heads(self.heads, self.dtype)
