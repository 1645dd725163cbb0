"""Factors for masks that differ from row to row: causal, sliding-window, packed, arbitrary.

Rows with equal support form a group, and every group has its own projector
`P = V_S (V_Sᵀ V_S)⁺ V_Sᵀ`. Groups are visited in chunks; inside a chunk the Gram matrices add up
the keys that all have in common and those that each has besides, so nothing cancels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.algebra.factors import NEARLY_INSIDE, simplex_ranks
from attnlens.algebra.supports import Support
from attnlens.kernels.ranks import rank_threshold
from attnlens.kernels.torch_gram import Whitening, whiten, whiten_short, whiten_spectral

_CHUNK_BYTES = 8 << 20
_KEPT_BYTES = 256 << 20
_REFINEMENTS = 2
_ROWS_PER_GROUP = 4


class Centred(NamedTuple):
    """The values of groups of rows about their mean.

    Attributes:
        values: `[h, k, D]` values less a vector that all groups share.
        mean: `[h, n, D]` mean of these in each group.
        factor: `[h, n, D, D]` that makes the values of a group less their mean orthonormal.
    """

    values: Tensor
    mean: Tensor
    factor: Tensor


@dataclass(frozen=True, eq=False)
class RowGroups:
    """A chunk of groups of query rows, for one example and one set of heads that share masks.

    The h value heads of a chunk serve g query heads each.

    Attributes:
        example: batch index.
        heads: slice of value heads.
        shared: g, query heads that share a value head.
        rows: `[r]` int64, the query rows of all groups of the chunk.
        group: `[r]` int64, the group of each row.
        span: the k keys that the chunk is about; no row of it may attend to others.
        keys: `[n, k]` bool, the support of each of the n groups.
        values: `[h, k, D]` float64.
        gram: `[h, n, D, D]` float64, the Gram matrix of each group.
        threshold: `[n]` float64.
        whitening: factors `[h, n, D, D]`, ranks and bounds `[h, n]`.
    """

    example: int
    heads: slice
    shared: int
    rows: Tensor
    group: Tensor
    span: slice
    keys: Tensor
    values: Tensor
    gram: Tensor
    threshold: Tensor
    whitening: Whitening

    @cached_property
    def sizes(self) -> Tensor:
        """Number of keys of each group, `[n]` int64."""
        return self.keys.sum(-1)

    @cached_property
    def total(self) -> Tensor:
        """Sum of the values of each group, `[h, n, D]`."""
        return self.keys.to(self.values.dtype) @ self.values

    @cached_property
    def ones(self) -> Tensor:
        """`G⁺ V_Sᵀ1` of each group, `[h, n, D]`."""
        factor = self.whitening.factor
        return torch.einsum("hnd,hnde,hnfe->hnf", self.total, factor, factor)

    @cached_property
    def outside(self) -> Tensor:
        """Squared sine of the angle of 1 to the column space of each group, `[h, n]`."""
        size = self.sizes.clamp(min=1).double()
        outside: Tensor = 1 - torch.linalg.vecdot(self.total, self.ones) / size
        small = (outside < NEARLY_INSIDE) & (self.whitening.rank < self.sizes)
        if bool(small.any()):
            rest = (1 - self.ones @ self.values.mT) * self.keys
            outside = torch.where(small, rest.square().sum(-1) / size, outside)
        return outside

    @cached_property
    def simplex_rank(self) -> Tensor:
        """Numerical rank of `[T, 1]` of each group, `[h, n]` int64."""
        shape = self.whitening.rank.shape
        return simplex_ranks(
            self.gram,
            self.total,
            self.sizes.expand(shape),
            self.whitening.rank,
            self.whitening.factor,
            self.ones,
            self.outside,
            self.threshold.expand(shape),
        )

    @cached_property
    def centred(self) -> Centred:
        """The values of each group about their mean, and a factor of them."""
        about = self.values - self.values.mean(1, keepdim=True)  # so that little cancels
        size = self.sizes.clamp(min=1).to(about.dtype)
        mean = (self.keys.to(about.dtype) @ about) / size[:, None]
        gram = _grams(about, self.keys)
        gram = gram - size[:, None, None] * mean[..., :, None] * mean[..., None, :]
        squares, axes = (part.flip(-1) for part in torch.linalg.eigh(gram))
        order = torch.arange(squares.shape[-1], device=squares.device)
        kept = order < self.simplex_rank[..., None] - 1
        scale = torch.where(kept, torch.where(kept, squares, 1.0).rsqrt(), 0.0)
        return Centred(about, mean, axes * scale[..., None, :])

    def simplex_basis(self) -> Tensor:
        """Return an orthonormal basis of `[T, 1]` of each group, `[h, n, k, D + 1]`."""
        about, mean, factor = self.centred
        size = self.sizes.clamp(min=1).to(about.dtype)
        constant = size.rsqrt()[:, None, None].expand(*factor.shape[:2], about.shape[1], 1)
        along = (about[:, None] - mean[..., None, :]) @ factor
        return torch.cat([constant, along], -1) * self.keys[..., None]

    def scatter(self, target: Tensor, source: Tensor) -> None:
        """Write per-row results into a tensor over all rows.

        Args:
            target: `[B, H, Q, ...]`, changed in place; H counts query heads.
            source: `[h, g or 1, r, ...]`.
        """
        self.of_heads(target)[:, :, self.rows] = source.to(target.dtype)

    def take(self, source: Tensor) -> Tensor:
        """Pick this chunk's rows, `[B, H, Q, ...]` to `[h, g, r, ...]`."""
        return self.of_heads(source)[:, :, self.rows]

    def of_heads(self, source: Tensor) -> Tensor:
        """Pick this chunk's heads, `[B, H, ...]` to `[h, g, ...]`."""
        heads: Tensor = source.unflatten(1, (-1, self.shared))[self.example, self.heads]
        return heads

    def per_row(self, grouped: Tensor) -> Tensor:
        """Repeat a per-group quantity for its rows, `[h, n, ...]` to `[h, 1, r, ...]`."""
        return grouped[:, None, self.group]

    def solve(self, rows: Tensor) -> Tensor:
        """Solve `G x = o` for every row, so that `a⊥_i = x_i V_Sᵀ`.

        Args:
            rows: `[h, g, r, D]` float64 outputs `o_i = a_i V`.

        Returns:
            `x`, `[h, g, r, D]`.
        """
        factor = self.whitening.factor
        return self._apply(self._apply(rows, factor), factor.mT)

    def refined(self, rows: Tensor) -> Tensor:
        """Solve as :meth:`solve` does, once more where the rank of a group was not proven.

        Args:
            rows: `[h, g, r, D]` float64, in the row space of the values of each group.

        Returns:
            `[h, g, r, D]`.
        """
        solution = self.solve(rows)
        doubtful = self.whitening.bound.isinf() & (self.whitening.rank < self.sizes)
        some = doubtful.any(0)[self.group].nonzero()[:, 0]
        if not len(some):
            return solution
        part, values = replace(self, group=self.group[some]), self.values[:, None]
        effective = (solution[:, :, some] @ values.mT) * self.keys[part.group]
        solution[:, :, some] += part.solve(rows[:, :, some] - effective @ values)
        return solution

    def _apply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Multiply every row `[h, g, r, X]` by its group's matrix, `[h, n, X, Y]`."""
        groups = matrices.shape[1]
        if rows.shape[2] <= _ROWS_PER_GROUP * groups:
            return torch.einsum("hgrx,hrxy->hgry", rows, matrices[:, self.group])
        result = rows.new_empty(*rows.shape[:3], matrices.shape[-1])
        for index in range(groups):  # few groups of many rows: no matrix is repeated
            members = self.group == index
            result[:, :, members] = rows[:, :, members] @ matrices[:, None, index]
        return result


@dataclass(frozen=True, eq=False)
class RowFactor:
    """The factors of a mask that differs by row, computed in chunks when asked for.

    Attributes:
        values: `[B, Hv, K, D]` float64 values, zero outside the real keys.
        support: the keys of every row.
        heads: H, the number of query heads, a multiple of Hv.
        dtype: working precision of maps.
        rtol: relative threshold for the rank, or None for `max(n, D) · eps(float32)`.
        simplex: whether projection keeps the row sums.
    """

    values: Tensor
    support: Support
    heads: int
    dtype: torch.dtype
    rtol: float | None = None
    simplex: bool = False

    @property
    def tokens(self) -> Tensor:
        """Number of keys each row may attend to, `[B, H, Q]` int64."""
        batch = self.values.shape[0]
        return self.support.sizes.expand(batch, self.heads, self.support.queries)

    @cached_property
    def rank(self) -> Tensor:
        """Numerical rank of T, or of `[T, 1]`, in the keys of each row, `[B, H, Q]` int64."""
        rank = torch.zeros_like(self.tokens)
        for chunk in self.groups():
            found = chunk.simplex_rank if self.simplex else chunk.whitening.rank
            chunk.scatter(rank, chunk.per_row(found))
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
            seen = chunk.keys[chunk.group]
            rows = chunk.take(attention[..., chunk.span]).double() * seen
            if self.simplex:
                projected, rank = self._project_simplex(chunk, rows, seen)
            else:
                projected, rank = self._project(chunk, rows, seen), chunk.whitening.rank
            free = chunk.per_row(rank == chunk.sizes)
            kept = torch.where(free[..., None], rows, projected)
            chunk.scatter(result[..., chunk.span], kept)
        return result

    def groups(self) -> Iterator[RowGroups]:
        """Visit the groups of rows with equal support, in chunks of bounded memory.

        Yields:
            Chunks that together cover every row with a non-empty support exactly once.
        """
        if self._chunks is not None:
            yield from self._chunks
        else:
            yield from self._visited()

    @cached_property
    def _chunks(self) -> list[RowGroups] | None:
        """All chunks, kept for the next who asks, where they are small."""
        batch, heads, _, width = self.values.shape
        rows = batch * heads * self.support.queries
        return list(self._visited()) if 16 * rows * width**2 <= _KEPT_BYTES else None

    def _visited(self) -> Iterator[RowGroups]:
        batch, heads = self.values.shape[:2]
        masks = self.support.keys.shape[1]
        for example in range(batch):
            for index in range(masks):
                chosen = slice(index, index + 1) if masks > 1 else slice(0, heads)
                values = self.values[example, chosen]
                for rows, group, span, keys in self._chunked(example, index, values):
                    seen = values[:, span]
                    gram = _grams(seen, keys)
                    threshold = rank_threshold(keys.sum(-1), seen.shape[-1], self.rtol)
                    yield RowGroups(
                        example,
                        chosen,
                        self.heads // heads,
                        rows,
                        group,
                        span,
                        keys,
                        seen,
                        gram,
                        threshold,
                        _whitened(seen, keys, gram, threshold),
                    )

    @staticmethod
    def _project(chunk: RowGroups, rows: Tensor, seen: Tensor) -> Tensor:
        """`x V_Sᵀ` by normal equations, refined against `A⊥ V = A V`."""
        values = chunk.values[:, None]
        context = rows @ values
        solution = torch.zeros_like(context)
        projected = torch.zeros_like(rows)
        for _ in range(1 + _REFINEMENTS):
            solution = solution + chunk.solve(context - projected @ values)
            projected = (solution @ values.mT) * seen
        return projected

    @staticmethod
    def _project_simplex(chunk: RowGroups, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The same within `[T, 1]`: the mean of a row, and what lies along the centred values."""
        about, mean, factor = chunk.centred
        centred = replace(chunk, whitening=chunk.whitening._replace(factor=factor))
        values, middle = about[:, None], chunk.per_row(mean)
        projected = (rows.sum(-1) / chunk.sizes[chunk.group])[..., None] * seen
        solution = torch.zeros(*rows.shape[:3], about.shape[-1], dtype=rows.dtype)
        solution = solution.to(rows.device)
        constant = projected
        for _ in range(1 + _REFINEMENTS):
            rest = rows - projected
            left = rest @ values - rest.sum(-1, keepdim=True) * middle
            solution = solution + centred.solve(left)
            along = solution @ values.mT - (solution * middle).sum(-1, keepdim=True)
            projected = constant + along * seen
        return projected, chunk.simplex_rank

    def _chunked(
        self, example: int, index: int, values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, slice, Tensor]]:
        """Yield `(rows, group, span, keys)` for one example and one mask."""
        real = self.support.keys[example, index]
        if self.support.rows is not None:
            distinct, group = torch.unique(
                self.support.rows[example, index], dim=0, return_inverse=True
            )
            for chosen in distinct.any(-1).nonzero()[:, 0].split(self._groups_per_chunk(values)):
                yield *_members(group, chosen), slice(None), distinct[chosen]
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
        for chosen in _interval_batches(distinct, size):
            first, last = distinct[:, chosen]
            span = slice(int(first.amin()), int(last.amax()))
            position = torch.arange(span.start, span.stop, device=real.device)
            inside = (position >= first[:, None]) & (position < last[:, None]) & real[span]
            yield *_members(group, chosen), span, inside

    def _groups_per_chunk(self, values: Tensor) -> int:
        heads, keys, width = values.shape
        return max(1, _CHUNK_BYTES // (8 * (heads * width * width + keys)))


def _whitened(values: Tensor, keys: Tensor, gram: Tensor, threshold: Tensor) -> Whitening:
    """Factor every group by the smaller Gram matrix that serves it.

    Args:
        values: `[h, k, D]` float64.
        keys: `[n, k]` bool.
        gram: `[h, n, D, D]`.
        threshold: `[n]`.

    Returns:
        Factors `[h, n, D, D]`, ranks and bounds `[h, n]`.
    """
    heads, groups, width, _ = gram.shape
    factor = torch.zeros_like(gram)
    rank = torch.zeros(heads, groups, dtype=torch.int64, device=gram.device)
    bound = torch.zeros(heads, groups, dtype=torch.float64, device=gram.device)
    sizes = keys.sum(-1)
    for short in (True, False):
        chosen = ((sizes <= width) == short).nonzero()[:, 0]
        if not len(chosen):
            continue
        flat = threshold[chosen].repeat(heads)
        if short:
            count = int(sizes[chosen].max())
            order = keys[chosen].to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
            order = order[:, :count]
            real = keys[chosen].gather(-1, order)
            rows = values[:, order] * real[..., None]
            found = whiten_short(rows.flatten(0, 1), real.repeat(heads, 1), flat)
        else:
            count = width
            found = whiten(gram[:, chosen].flatten(0, 1), flat)
        parts = (part.unflatten(0, (heads, -1)) for part in found)
        factor[:, chosen, :, :count], rank[:, chosen], bound[:, chosen] = parts
    doubtful = bound.isinf()
    if bool(doubtful.any()):
        found = whiten_spectral(gram[doubtful], threshold.expand(heads, -1)[doubtful])
        factor[doubtful], rank[doubtful] = found.factor, found.rank
    return Whitening(factor, rank, bound)


def _interval_batches(distinct: Tensor, size: int) -> Iterator[Tensor]:
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
        yield torch.arange(start, stop, device=distinct.device)
        start = stop


def _members(group: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that belong to the chosen groups, and the position of their group in `chosen`."""
    position = torch.full((int(group.max()) + 1,), -1, device=group.device)
    position[chosen] = torch.arange(len(chosen), device=group.device)
    local = position[group]
    rows = (local >= 0).nonzero()[:, 0]
    return rows, local[rows]


def _grams(values: Tensor, keys: Tensor) -> Tensor:
    """Gram matrices of a chunk's supports: `[h, k, D]`, `[n, k]` to `[h, n, D, D]`."""
    # the keys that all have once, then what each has of the others: sums only add up
    common = keys.all(0)
    core, around = values[:, common], keys.any(0) & ~common
    values, keys = values[:, around], keys[:, around]
    selected = values.mT.contiguous()[:, None] * keys[:, None]  # all of a head in one product
    own: Tensor = (selected.flatten(1, 2) @ values).unflatten(1, (len(keys), -1))
    return (core.mT @ core)[:, None] + own
