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

from attnlens.algebra.chains import plan_rows
from attnlens.algebra.factors import NEARLY_INSIDE, simplex_ranks
from attnlens.algebra.rowchunks import RowChunk
from attnlens.algebra.supports import Support
from attnlens.algebra.updates import chained_rows
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
class RowGroups(RowChunk):
    """Groups of query rows with equal support, each with a factor of its own.

    Attributes:
        group: `[r]` int64, the group of each row.
        keys: `[n, k]` bool, the support of each of the n groups.
        gram: `[h, n, D, D]` float64, the Gram matrix of each group.
        threshold: `[n]` float64.
        whitening: factors `[h, n, D, D]`, ranks and bounds `[h, n]`.
    """

    group: Tensor
    keys: Tensor
    gram: Tensor
    threshold: Tensor
    whitening: Whitening

    @property
    def row_sizes(self) -> Tensor:
        """Number of keys of each row, `[r]` int64."""
        return self.sizes[self.group]

    @property
    def row_rank(self) -> Tensor:
        """Numerical rank of T in the keys of each row, `[h, r]` int64."""
        return self.whitening.rank[:, self.group]

    @property
    def row_simplex_rank(self) -> Tensor:
        """The same of `[T, 1]`."""
        return self.simplex_rank[:, self.group]

    @property
    def row_bound(self) -> Tensor:
        """At least the squared condition number, or Inf where the rank is not proven, `[h, r]`."""
        return self.whitening.bound[:, self.group]

    @property
    def row_total(self) -> Tensor:
        """Sum of the values of each row, `[h, r, D]`."""
        return self.total[:, self.group]

    @property
    def row_outside(self) -> Tensor:
        """Squared sine of the angle of 1 to the column space of each row, `[h, r]`."""
        return self.outside[:, self.group]

    def seen(self) -> Tensor:
        """Which keys of the span each row sees, `[r, k]` bool."""
        return self.keys[self.group]

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

    def per_row(self, grouped: Tensor) -> Tensor:
        """Repeat a per-group quantity for its rows, `[h, n, ...]` to `[h, 1, r, ...]`."""
        return grouped[:, None, self.group]

    def solve(self, rows: Tensor) -> Tensor:
        """Solve `G x = o` for every row, see the base class."""
        factor = self.whitening.factor
        return self._apply(self._apply(rows, factor), factor.mT)

    def forms(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sum effective rows and their squares, see the base class."""
        solution = self.refined(rows)
        along = torch.linalg.vecdot(self.per_row(self.total), solution)
        return along, torch.linalg.vecdot(rows, solution)

    def label_sums(self, rows: Tensor, members: Tensor) -> Tensor:
        """Sum effective rows over the keys of each label, see the base class."""
        weights = self.keys[..., None] * members  # [n, k, G]
        columns = self.values.mT[:, None] @ weights
        return self._apply(self.refined(rows), columns)

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
        for chunk in self.chunks():
            chunk.scatter(
                rank, (chunk.row_simplex_rank if self.simplex else chunk.row_rank)[:, None]
            )
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
        for chunk in (part for whole in self.chunks() for part in whole.pieces(_CHUNK_BYTES // 8)):
            seen = chunk.seen()
            rows = chunk.take(attention[..., chunk.span]).double() * seen
            rank = chunk.row_simplex_rank if self.simplex else chunk.row_rank
            free = rank == chunk.row_sizes
            projected = rows
            if bool(free.all()):
                pass
            elif not self.simplex:
                projected = _project(chunk, rows, seen)
            elif isinstance(chunk, RowGroups):
                projected = _project_simplex(chunk, rows, seen)
            else:
                projected = _with_constant(chunk, rows, seen)
            kept = torch.where(free[:, None, :, None], rows, projected)
            chunk.scatter(result[..., chunk.span], kept)
        return result

    def chunks(self) -> Iterator[RowChunk]:
        """Visit all rows that see a key, those together that share factors.

        Yields:
            Chunks of bounded memory. Of a row that occurs in several, the last one holds.
        """
        yield from self._chunks if self._chunks is not None else self._visited()

    def groups(self) -> Iterator[RowGroups]:
        """Visit the groups of rows with equal support, each factored on its own.

        Yields:
            Chunks that together cover every row with a non-empty support exactly once.
        """
        for example, index, heads, values in self._masks():
            yield from self._groups(example, index, heads, values)

    @cached_property
    def _chunks(self) -> list[RowChunk] | None:
        """All chunks, kept for the next who asks, where they are small."""
        batch, heads, _, width = self.values.shape
        rows = batch * heads * self.support.queries
        return list(self._visited()) if 16 * rows * width**2 <= _KEPT_BYTES else None

    def _masks(self) -> Iterator[tuple[int, int, slice, Tensor]]:
        """Yield every example and mask, the value heads that it concerns, and their values."""
        batch, heads = self.values.shape[:2]
        masks = self.support.keys.shape[1]
        for example in range(batch):
            for index in range(masks):
                some = slice(index, index + 1) if masks > 1 else slice(0, heads)
                yield example, index, some, self.values[example, some]

    def _visited(self) -> Iterator[RowChunk]:
        shared = self.heads // self.values.shape[1]
        for example, index, heads, values in self._masks():
            plan = plan_rows(self.support, example, index, values.shape[-1])
            left = self.support.active[example, index] & (self.support.sizes[example, index] > 0)
            left = left.repeat(len(values), 1)  # rows without a factor, [h, Q]
            for chunk in chained_rows(
                plan, self.support, example, index, heads, shared, values, self.rtol, self.dtype
            ):
                left[:, chunk.rows] = ~chunk.certain.flatten(1)
                yield chunk
            # heads that fail in many rows must not make the others repeat theirs
            count = left.sum(-1)
            many = count > len(plan.separate) + left.shape[-1] // 8
            for some in (~many, many):
                which = some.nonzero()[:, 0]
                rows = left[which].any(0).nonzero()[:, 0]
                if len(which) and len(rows):
                    own = heads if len(which) == len(values) else which + heads.start
                    yield from self._groups(example, index, own, values[which], rows)

    def _groups(
        self,
        example: int,
        index: int,
        heads: slice | Tensor,
        values: Tensor,
        rows: Tensor | None = None,
    ) -> Iterator[RowGroups]:
        """Factor some rows of one example and one mask; all by default."""
        if rows is None:
            rows = torch.arange(self.support.queries, device=values.device)
        for members, group, span, keys in self._chunked(example, index, values, rows):
            seen = values[:, span]
            gram = _grams(seen, keys)
            threshold = rank_threshold(keys.sum(-1), seen.shape[-1], self.rtol)
            yield RowGroups(
                example=example,
                heads=heads,
                shared=self.heads // self.values.shape[1],
                rows=rows[members],
                span=span,
                values=seen,
                group=group,
                keys=keys,
                gram=gram,
                threshold=threshold,
                whitening=_whitened(seen, keys, gram, threshold),
            )

    def _chunked(
        self, example: int, index: int, values: Tensor, rows: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, slice, Tensor]]:
        """Yield `(positions in rows, group, span, keys)` for one example and one mask."""
        real = self.support.keys[example, index]
        if self.support.rows is not None:
            distinct, group = torch.unique(
                self.support.rows[example, index, rows], dim=0, return_inverse=True
            )
            for chosen in distinct.any(-1).nonzero()[:, 0].split(self._groups_per_chunk(values)):
                yield *_members(group, chosen), slice(None), distinct[chosen]
            return
        assert self.support.first is not None and self.support.last is not None
        bounds = torch.stack([
            self.support.first[example, index, rows],
            self.support.last[example, index, rows],
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


def _project(chunk: RowChunk, rows: Tensor, seen: Tensor) -> Tensor:
    """`x V_Sᵀ` by normal equations, refined against `A⊥ V = A V`."""
    values = chunk.values[:, None]
    context = rows @ values
    solution = torch.zeros_like(context)
    projected = torch.zeros_like(rows)
    for _ in range(1 + _REFINEMENTS):
        solution = solution + chunk.solve(context - projected @ values)
        projected = (solution @ values.mT) * seen
    return projected


def _with_constant(chunk: RowChunk, rows: Tensor, seen: Tensor) -> Tensor:
    """The same within `[T, 1]`, where 1 is clearly outside: along what T leaves of it."""
    constant = seen.to(rows.dtype).expand(len(rows), 1, -1, -1)
    rest = constant - _project(chunk, constant, seen)
    along = (rows * rest).sum(-1, keepdim=True) / rest.square().sum(-1, keepdim=True)
    return _project(chunk, rows, seen) + along * rest


def _project_simplex(chunk: RowGroups, rows: Tensor, seen: Tensor) -> Tensor:
    """The same from values less their mean: the mean of a row, and what lies along these."""
    about, mean, factor = chunk.centred
    centred = replace(chunk, whitening=chunk.whitening._replace(factor=factor))
    values, middle = about[:, None], chunk.per_row(mean)
    projected = (rows.sum(-1) / chunk.row_sizes)[..., None] * seen
    solution = torch.zeros(*rows.shape[:3], about.shape[-1], dtype=rows.dtype)
    solution = solution.to(rows.device)
    constant = projected
    for _ in range(1 + _REFINEMENTS):
        rest = rows - projected
        left = rest @ values - rest.sum(-1, keepdim=True) * middle
        solution = solution + centred.solve(left)
        along = solution @ values.mT - (solution * middle).sum(-1, keepdim=True)
        projected = constant + along * seen
    return projected


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
