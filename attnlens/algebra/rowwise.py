"""Projectors for masks that differ from row to row: causal, sliding-window, packed, arbitrary.

Rows with equal support form a group, and every group has its own projector
`P = V_S (V_Sᵀ V_S)⁺ V_Sᵀ`. Groups are visited in chunks; inside a chunk the Gram matrices add up
the keys that all have in common and those that each has besides, so nothing cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import torch
from torch import Tensor

from attnlens.algebra.factors import Whitening, factor_values
from attnlens.algebra.supports import Support

_CHUNK_BYTES = 8 << 20
_REFINEMENTS = 2
_ROWS_PER_GROUP = 4


@dataclass(frozen=True)
class RowGroups:
    """A chunk of groups of query rows, for one example and one set of heads that share masks.

    Attributes:
        example: batch index.
        heads: slice of heads.
        rows: `[r]` int64, the query rows of all groups of the chunk.
        group: `[r]` int64, the group of each row, in `[0, g)`.
        span: the k keys that the chunk is about; no row of it may attend to others.
        keys: `[g, k]` bool, the support of each group.
        values: `[h, k, E]` float64.
        whitening: factors `[h, g, E, E]`, ranks `[h, g]`.
    """

    example: int
    heads: slice
    rows: Tensor
    group: Tensor
    span: slice
    keys: Tensor
    values: Tensor
    whitening: Whitening

    def scatter(self, target: Tensor, source: Tensor) -> None:
        """Write per-row results into a tensor over all rows.

        Args:
            target: `[B, H, Q, ...]`, changed in place.
            source: `[h, r, ...]`.
        """
        target[self.example, self.heads, self.rows] = source.to(target.dtype)

    def take(self, source: Tensor) -> Tensor:
        """Pick this chunk's rows, `[B, H, Q, ...]` to `[h, r, ...]`."""
        return source[self.example, self.heads, self.rows]

    def per_row(self, grouped: Tensor) -> Tensor:
        """Repeat a per-group quantity for its rows, `[h, g, ...]` to `[h, r, ...]`."""
        return grouped[:, self.group]

    def coordinates(self, context: Tensor) -> Tensor:
        """Express outputs `o_i = a_i V` in the orthonormal basis of their row.

        Args:
            context: `[h, r, E]` float64.

        Returns:
            `c_i = o_i W`, `[h, r, E]`, with `‖c_i‖ = ‖a⊥_i‖`.
        """
        return self._apply(context, self.whitening.factor)

    def solve(self, context: Tensor) -> Tensor:
        """Solve `G x = o` for every row, so that `a⊥_i = x_i V_Sᵀ`.

        Args:
            context: `[h, r, E]` float64 outputs `o_i = a_i V`.

        Returns:
            `x`, `[h, r, E]`.
        """
        return self._apply(self.coordinates(context), self.whitening.factor.mT)

    def _apply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Multiply every row `[h, r, X]` by its group's matrix, `[h, g, X, Y]` to `[h, r, Y]`."""
        groups = matrices.shape[1]
        if rows.shape[1] <= _ROWS_PER_GROUP * groups:
            return torch.einsum("hrx,hrxy->hry", rows, self.per_row(matrices))
        result = rows.new_empty(*rows.shape[:2], matrices.shape[-1])
        for index in range(groups):  # few groups of many rows: no matrix is repeated
            members = self.group == index
            result[:, members] = rows[:, members] @ matrices[:, index]
        return result


@dataclass(frozen=True)
class RowwiseBasis:
    """The projectors of a mask that differs by row, computed in chunks when asked for.

    Attributes:
        values: `[B, H, K, E]` float64 values, zero outside the real keys.
        support: the keys of every row.
        rtol: the relative threshold that decides ranks.
        simplex: whether the constant column was included.
        dtype: working precision of results.
    """

    values: Tensor
    support: Support
    rtol: float
    simplex: bool
    dtype: torch.dtype

    @property
    def queries(self) -> int:
        """Number of query rows Q."""
        rows = self.support.rows if self.support.rows is not None else self.support.last
        assert rows is not None
        return rows.shape[2]

    @property
    def tokens(self) -> Tensor:
        """Number of keys each row may attend to, `[B, H, Q]` int64."""
        return self.support.sizes().expand(*self.values.shape[:2], self.queries)

    @cached_property
    def rank(self) -> Tensor:
        """Numerical rank of the values each row may attend to, `[B, H, Q]` int64."""
        rank = self.tokens.new_zeros(self.tokens.shape)
        for chunk in self.groups():
            chunk.scatter(rank, chunk.per_row(chunk.whitening.rank))
        return rank

    @property
    def nullity(self) -> Tensor:
        """Dimension of every row's left null space, `[B, H, Q]` int64."""
        return self.tokens - self.rank

    def project(self, attention: Tensor) -> Tensor:
        """Remove what the output cannot see from attention rows.

        Args:
            attention: `[B, H, Q, K]`.

        Returns:
            `A⊥`, `[B, H, Q, K]`, exactly zero outside each row's support.
        """
        result = torch.zeros(attention.shape, dtype=self.dtype, device=attention.device)
        for chunk in self.groups():
            rows = chunk.take(attention[..., chunk.span]).double() * chunk.keys[chunk.group]
            chunk.scatter(result[..., chunk.span], self._project(chunk, rows))
        return result

    @staticmethod
    def _project(chunk: RowGroups, rows: Tensor) -> Tensor:
        """`x V_Sᵀ` by normal equations, refined against `A⊥ V = A V`."""
        keys = chunk.keys[chunk.group]
        context = rows @ chunk.values
        solution = torch.zeros_like(context)
        projected = torch.zeros_like(rows)
        for _ in range(1 + _REFINEMENTS):
            solution = solution + chunk.solve(context - projected @ chunk.values)
            projected = (solution @ chunk.values.mT) * keys
        free = chunk.per_row(chunk.whitening.rank) == keys.sum(-1)
        return torch.where(free[..., None], rows, projected)

    def groups(self) -> Iterator[RowGroups]:
        """Visit the groups of rows with equal support, in chunks of bounded memory.

        Yields:
            Chunks that together cover every row with a non-empty support exactly once.
        """
        batch, heads = self.values.shape[:2]
        masks = self.support.keys.shape[1]
        for example in range(batch):
            for index in range(masks):
                chosen = slice(index, index + 1) if masks > 1 else slice(0, heads)
                values = self.values[example, chosen]
                for rows, group, span, keys, gram in self._chunks(example, index, values):
                    seen = values[:, span]
                    whitening = self._factor(seen, keys, gram)
                    yield RowGroups(example, chosen, rows, group, span, keys, seen, whitening)

    def _factor(self, values: Tensor, keys: Tensor, gram: Tensor) -> Whitening:
        heads, groups, width = gram.shape[:3]
        whitening = factor_values(
            values[:, None].expand(-1, groups, -1, -1), gram, keys[None], self.rtol
        )
        return Whitening(
            whitening.factor.reshape(heads, groups, width, width),
            whitening.rank.reshape(heads, groups),
            whitening.orthonormal.reshape(heads, groups),
        )

    def _chunks(
        self, example: int, index: int, values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, slice, Tensor, Tensor]]:
        """Yield `(rows, group, span, keys, gram)` for one example and one mask."""
        real = self.support.keys[example, index]
        if self.support.rows is not None:
            distinct, group = torch.unique(
                self.support.rows[example, index], dim=0, return_inverse=True
            )
            for members, chosen in _batches(
                group, distinct.any(-1), self._groups_per_chunk(values)
            ):
                keys = distinct[chosen]
                yield *members, slice(None), keys, _grams(values, keys)
            return
        assert self.support.first is not None and self.support.last is not None
        bounds = torch.stack([
            self.support.first[example, index],
            self.support.last[example, index],
        ])
        distinct, group = torch.unique(bounds, dim=1, return_inverse=True)
        # neighbouring intervals differ by a key at each end: g of them by 2g keys in all
        heads, _, width = values.shape
        size = min(self._groups_per_chunk(values), isqrt(_CHUNK_BYTES // (16 * heads * width)) + 1)
        for members, chosen in _interval_batches(distinct, group, size):
            first, last = distinct[:, chosen]
            span = slice(int(first.amin()), int(last.amax()))
            position = torch.arange(span.start, span.stop, device=real.device)
            inside = (position >= first[:, None]) & (position < last[:, None]) & real[span]
            yield *members, span, inside, _grams(values[:, span], inside)

    def _groups_per_chunk(self, values: Tensor) -> int:
        heads, keys, width = values.shape
        return max(1, _CHUNK_BYTES // (8 * (heads * width * width + keys)))


def _batches(
    group: Tensor, wanted: Tensor, size: int
) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Cut the wanted groups into chunks; yield `(rows, local group)` and the chunk's groups."""
    for chosen in wanted.nonzero()[:, 0].split(size):
        yield _members(group, chosen), chosen


def _interval_batches(
    distinct: Tensor, group: Tensor, size: int
) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Cut sorted intervals into chunks whose members all overlap in one common core."""
    bounds = distinct.T.tolist()
    start = 0
    while start < len(bounds):
        first, last = bounds[start]
        if first >= last:
            start += 1
            continue
        stop, core = start + 1, last
        while stop < len(bounds) and stop - start < size and bounds[stop][0] < core:
            if bounds[stop][1] <= bounds[stop][0]:
                break
            core = min(core, bounds[stop][1])
            if bounds[stop][0] >= core:
                break
            stop += 1
        chosen = torch.arange(start, stop, device=group.device)
        yield _members(group, chosen), chosen
        start = stop


def _members(group: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that belong to the chosen groups, and the position of their group in `chosen`."""
    position = torch.full((int(group.max()) + 1,), -1, device=group.device)
    position[chosen] = torch.arange(len(chosen), device=group.device)
    local = position[group]
    rows = (local >= 0).nonzero()[:, 0]
    return rows, local[rows]


def _grams(values: Tensor, keys: Tensor) -> Tensor:
    """Gram matrices of a chunk's supports: `[h, k, E]`, `[g, k]` to `[h, g, E, E]`."""
    # the keys that all have once, then what each has of the others: sums only add up
    common = keys.all(0)
    core, around = values[:, common], keys.any(0) & ~common
    values, keys = values[:, around], keys[:, around]
    selected = values.mT.contiguous()[:, None] * keys[:, None]  # all of a head in one product
    own = (selected.flatten(1, 2) @ values).unflatten(1, (len(keys), -1))
    return (core.mT @ core)[:, None] + own
