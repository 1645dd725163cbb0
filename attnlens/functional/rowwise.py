"""Projectors for masks that differ from row to row: causal, sliding-window, packed, arbitrary.

Rows with equal support form a group, and every group has its own projector
`P = V_S (V_Sᵀ V_S)⁺ V_Sᵀ`. Groups are visited in chunks; inside a chunk of intervals the Gram
matrices come from running sums of `v vᵀ` that only ever add, so nothing cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnlens.functional.factor import Whitening, factor_values
from attnlens.functional.support import Support

_CHUNK_BYTES = 16 << 20
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
        keys: `[g, K]` bool, the support of each group.
        values: `[h, K, E]` float64.
        whitening: factors `[h, g, E, E]`, ranks `[h, g]`.
    """

    example: int
    heads: slice
    rows: Tensor
    group: Tensor
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
            rows = chunk.take(attention).double() * chunk.keys[chunk.group]
            chunk.scatter(result, self._project(chunk, rows))
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
                for rows, group, keys, gram in self._chunks(example, index, values):
                    yield RowGroups(
                        example, chosen, rows, group, keys, values, self._factor(values, keys, gram)
                    )

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
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield `(rows, group, keys, gram)` for one example and one mask."""
        real = self.support.keys[example, index]
        if self.support.rows is not None:
            distinct, group = torch.unique(
                self.support.rows[example, index], dim=0, return_inverse=True
            )
            for members, chosen in _batches(
                group, distinct.any(-1), self._groups_per_chunk(values)
            ):
                keys = distinct[chosen]
                yield *members, keys, _masked_grams(values, keys)
            return
        assert self.support.first is not None and self.support.last is not None
        bounds = torch.stack([
            self.support.first[example, index],
            self.support.last[example, index],
        ])
        distinct, group = torch.unique(bounds, dim=1, return_inverse=True)
        position = torch.arange(real.shape[0], device=real.device)
        for members, chosen in _interval_batches(distinct, group, self._groups_per_chunk(values)):
            first, last = distinct[:, chosen]
            inside = (position >= first[:, None]) & (position < last[:, None]) & real
            yield *members, inside, _interval_grams(values, first, last)

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


def _masked_grams(values: Tensor, keys: Tensor) -> Tensor:
    """Gram matrices of arbitrary supports: `[h, K, E]`, `[g, K]` to `[h, g, E, E]`."""
    selected = values[:, None] * keys[:, :, None]
    return selected.mT @ values[:, None]


def _interval_grams(values: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Gram matrices of overlapping intervals: `[h, K, E]`, `[g]`, `[g]` to `[h, g, E, E]`."""
    # every interval is a left part, the common core and a right part; the parts only add up
    begin, left_end = first.amin(), first.amax()
    right_begin, end = last.amin(), last.amax()
    core = values[:, left_end:right_begin]
    left = _running_outer(values[:, begin:left_end].flip(1))  # suffix sums
    right = _running_outer(values[:, right_begin:end])
    common = (core.mT @ core)[:, None]
    return common + left[:, left_end - first] + right[:, last - right_begin]


def _running_outer(values: Tensor) -> Tensor:
    """Sums of `v vᵀ` over the first 0, 1, … rows: `[h, m, E]` to `[h, m + 1, E, E]`."""
    outer = values[..., :, None] * values[..., None, :]
    return torch.nn.functional.pad(outer.cumsum(1), (0, 0, 0, 0, 1, 0))
