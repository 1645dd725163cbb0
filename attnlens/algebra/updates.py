"""Factors of rows that differ by few keys from one row, the base of their chain.

With the factor `G = L Lᵀ` of the base, the rows `b_r` of B, the changed values times `L⁻ᵀ`, and
J with 1 for a key that enters and −1 for one that leaves, a row that has seen the first m changes
has `G_m = L (I + B_mᵀ J_m B_m) Lᵀ`, and by Woodbury

    G_m⁻¹ = L⁻ᵀ (I − B_mᵀ K_m⁻¹ B_m) L⁻¹,    K = J + B Bᵀ.

The factor of a leading block is the leading block of the factor, and so is its inverse: one
`F K Fᵀ = diag(d)` with unit lower triangular F serves every row. K is quasi-definite and needs no
pivots (Vanderbei, "Symmetric quasidefinite matrices", SIAM J. Optim. 5, 1995). So with
`[L⁻¹; F B L⁻¹]` and weights 1 and −1/d, all that is asked of a row is sums over its leading part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlens.algebra.chains import Chain, Plan, ShortChain
from attnlens.algebra.factors import NEARLY_INSIDE
from attnlens.algebra.rowchunks import RowChunk
from attnlens.algebra.supports import Support
from attnlens.kernels.ranks import provably_full, rank_threshold
from attnlens.kernels.torch_gram import SAFE_BOUND

_CHUNK_BYTES = 8 << 20
_EPS = torch.finfo(torch.float64).eps
# What rounding may do at most to the inverse Gram matrix of a row, relative to it.
_ROUNDING = {torch.float32: 1e-8, torch.float64: 1e-10}


@dataclass(frozen=True, eq=False)
class ChainRows(RowChunk):
    """Chains of rows: N of them, with s rows and m changes each.

    A shorter chain repeats its base, and has changes of zero. Where `certain` is False, nothing
    that is said of a row holds.

    Attributes:
        support: the mask.
        index: its index.
        spans: `[N, 2]`, the range of keys of each chain.
        keys: `[N, m]` int64, keys that change.
        changed: `[h, N, m, D]` float64, their values.
        steps: `[N, s, m]` float64, 1 or −1 where a row has a key more or less than its base.
        sizes: `[N, s]` int64, number of keys.
        factor: `[h, N, D + m, D]` float64, `[L⁻¹; F B L⁻¹]`.
        weight: `[h, N, D + m]` float64, 1 and −1/d.
        ones: `[h, N, D + m]` float64, what the constant vector adds along each row of the factor.
        total: `[h, N, D]` float64, sum of the values of the base.
        outside: `[h, N, s]` float64.
        bound: `[h, N, s]` float64, `tr(G) tr(G⁻¹)` of each row; zero where not certain.
        certain: `[h, N, s]` bool.
    """

    support: Support
    index: int
    spans: np.ndarray
    keys: Tensor
    changed: Tensor
    steps: Tensor
    sizes: Tensor
    factor: Tensor
    weight: Tensor
    ones: Tensor
    total: Tensor
    outside: Tensor
    bound: Tensor
    certain: Tensor

    @property
    def row_sizes(self) -> Tensor:
        """Number of keys of each row, `[r]` int64."""
        return self.sizes.flatten()

    @property
    def row_rank(self) -> Tensor:
        """D, `[h, r]` int64."""
        return torch.full_like(self.certain, self.values.shape[-1], dtype=torch.int64).flatten(1)

    @property
    def row_simplex_rank(self) -> Tensor:
        """D + 1, `[h, r]` int64."""
        return self.row_rank + 1

    @property
    def row_bound(self) -> Tensor:
        """At least the squared condition number, `[h, r]`."""
        return self.bound.flatten(1)

    @property
    def row_total(self) -> Tensor:
        """Sum of the values of each row, `[h, r, D]`."""
        return (self.steps @ self.changed + self.total[..., None, :]).flatten(1, 2)

    @property
    def row_outside(self) -> Tensor:
        """Squared sine of the angle of 1 to the column space of each row, `[h, r]`."""
        return self.outside.flatten(1)

    def seen(self) -> Tensor:
        """Which keys of the span each row sees, `[r, k]` bool."""
        return self.support.seen(self.example, self.index, self.rows, self.span)

    def solve(self, rows: Tensor) -> Tensor:
        """Solve `G x = o` for every row, see the base class."""
        image = self._image(rows).mul_(self.weight[..., None, :])
        return self._unfolded(image @ self.factor, rows.shape[1])

    def forms(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sum effective rows and their squares, see the base class."""
        image = self._image(rows)
        along = image @ self.ones[..., None]
        apart = image.square_() @ self.weight[..., None]
        along, apart = (self._unfolded(part, rows.shape[1])[..., 0] for part in (along, apart))
        return along, apart

    def label_sums(self, rows: Tensor, members: Tensor) -> Tensor:
        """Sum effective rows over the keys of each label, see the base class."""
        solution = self._folded(self.solve(rows))
        base = self.support.seen(self.example, self.index, self.rows[:: self.steps.shape[1]])
        weights = base[:, self.span, None] * members  # [N, k, G]
        columns = self.values.mT[:, None] @ weights
        moved = (solution @ self.changed.mT).unflatten(2, (rows.shape[1], -1))
        moved = moved.mul_(self.steps[:, None]).flatten(2, 3)
        kinds = members[self.keys - self.span.start]  # [N, m, G]
        return self._unfolded(solution @ columns + moved @ kinds, rows.shape[1])

    def pieces(self, elements: int) -> Iterator[ChainRows]:
        """Cut the chunk where dense rows of it would be too large, see the base class."""
        heads, chains, length = self.certain.shape
        step = max(1, elements // (heads * self.shared * length * self.values.shape[1]))
        for start in range(0, chains, step):
            yield self._part(slice(start, start + step))

    def near(self, some: Tensor) -> tuple[slice, Tensor]:
        """Return the keys around some of the rows, and their values."""
        chains = np.unique(some.cpu().numpy() // self.steps.shape[1])
        return self._around(self.spans[chains])

    def _around(self, spans: np.ndarray) -> tuple[slice, Tensor]:
        span = slice(int(spans[:, 0].min()), int(spans[:, 1].max()))
        first = self.span.start
        return span, self.values[:, span.start - first : span.stop - first]

    def _part(self, some: slice) -> ChainRows:
        span, values = self._around(self.spans[some])
        of_heads = (
            "changed", "factor", "weight", "ones", "total", "outside", "bound", "certain",
        )  # fmt: skip
        parts = {name: getattr(self, name)[:, some] for name in of_heads}
        parts |= {name: getattr(self, name)[some] for name in ("spans", "keys", "steps", "sizes")}
        rows = self.rows.view(self.sizes.shape)[some].flatten()
        return replace(self, rows=rows, span=span, values=values, **parts)

    def _image(self, rows: Tensor) -> Tensor:
        """Outputs along the rows of the factor that concern each, `[h, N, g·s, D + m]`."""
        image = self._folded(rows) @ self.factor.mT
        width = self.values.shape[-1]
        changes = image[..., width:].unflatten(2, (rows.shape[1], -1))
        changes.mul_(self.steps.ne(0)[:, None])
        return image

    def _folded(self, rows: Tensor) -> Tensor:
        """`[h, g, N·s, …]` to `[h, N, g·s, …]`."""
        folded: Tensor = rows.unflatten(2, self.sizes.shape).transpose(1, 2).flatten(2, 3)
        return folded

    def _unfolded(self, rows: Tensor, shared: int) -> Tensor:
        """`[h, N, g·s, …]` to `[h, g, N·s, …]`."""
        unfolded: Tensor = rows.unflatten(2, (shared, -1)).transpose(1, 2).flatten(2, 3)
        return unfolded


@dataclass(frozen=True, eq=False)
class ShortRows(RowChunk):
    """Rows whose keys have independent values where `certain`: all of A is effective.

    Attributes:
        support: the mask.
        index: its index.
        sizes: `[r]` int64, number of keys.
        certain: `[h, r]` bool.
    """

    support: Support
    index: int
    sizes: Tensor
    certain: Tensor

    @property
    def row_sizes(self) -> Tensor:
        """Number of keys of each row, `[r]` int64."""
        return self.sizes

    @property
    def row_rank(self) -> Tensor:
        """Number of keys of each row, `[h, r]` int64."""
        return self.sizes.expand(self.certain.shape)

    @property
    def row_simplex_rank(self) -> Tensor:
        """Number of keys of each row, `[h, r]` int64."""
        return self.row_rank

    @property
    def row_bound(self) -> Tensor:
        """Zero: nothing is solved for."""
        return torch.zeros_like(self.row_outside)

    @property
    def row_total(self) -> Tensor:
        """Sum of the values of each row, `[h, r, D]`."""
        return self.seen().double() @ self.values

    @property
    def row_outside(self) -> Tensor:
        """Zero: the values span all vectors, `[h, r]`."""
        return torch.zeros_like(self.certain, dtype=torch.float64)

    def seen(self) -> Tensor:
        """Which keys of the span each row sees, `[r, k]` bool."""
        return self.support.seen(self.example, self.index, self.rows, self.span)

    def solve(self, rows: Tensor) -> Tensor:
        """Nothing is solved for: effective rows are those of A."""
        return torch.zeros_like(rows)

    def forms(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Zero: the forms are those of A."""
        return torch.zeros_like(rows[..., 0]), torch.zeros_like(rows[..., 0])

    def label_sums(self, rows: Tensor, members: Tensor) -> Tensor:
        """Zero: the sums are those of A."""
        return rows.new_zeros(*rows.shape[:3], members.shape[-1])


def chained_rows(
    plan: Plan,
    support: Support,
    example: int,
    index: int,
    heads: slice,
    shared: int,
    values: Tensor,
    rtol: float | None,
    dtype: torch.dtype,
) -> Iterator[ChainRows | ShortRows]:
    """Factor the chains of one example and one mask.

    Args:
        plan: which rows form chains.
        support: the mask.
        example: batch index.
        index: index of the mask.
        heads: the value heads.
        shared: g, query heads that share a value head.
        values: `[h, K, D]` float64, zero at masked keys.
        rtol: relative threshold for the rank, or None for the default.
        dtype: working precision of maps.

    Yields:
        Chunks of rows of bounded memory.
    """
    common = (example, heads, shared)
    for some in _split(plan.short, values, shared):
        yield _short_rows(some, common, support, index, values, rtol)
    base: tuple[Tensor, Tensor] | None = None
    for chains in _split(plan.chains, values, shared):
        grams, totals = [], []
        for chain in chains:
            added = values[:, _range(chain.added, values.device)]
            gram, total = added.mT @ added, added.sum(1)
            if chain.continues and base is not None:
                gram, total = base[0] + gram, base[1] + total
            base = gram, total
            grams.append(gram)
            totals.append(total)
        moments = torch.stack(grams, 1), torch.stack(totals, 1)
        yield _chain_rows(chains, common, support, index, values, moments, rtol, dtype)


_AnyChain = TypeVar("_AnyChain", Chain, ShortChain)


def _split(chains: Sequence[_AnyChain], values: Tensor, shared: int) -> Iterator[list[_AnyChain]]:
    """Cut a list of chains into parts of bounded memory."""
    heads, _, width = values.shape
    rows = max((len(chain.rows) for chain in chains), default=1)
    size = max(1, _CHUNK_BYTES // (8 * heads * shared * rows * 2 * width))
    for start in range(0, len(chains), size):
        yield list(chains[start : start + size])


def _range(keys: np.ndarray, device: torch.device) -> slice | Tensor:
    """Ascending keys, as a slice where they follow one another."""
    if len(keys) and keys[-1] - keys[0] + 1 == len(keys) and (np.diff(keys) == 1).all():
        return slice(int(keys[0]), int(keys[-1]) + 1)
    return torch.from_numpy(keys).to(device)


def _padded(parts: list[np.ndarray], fill: list[int] | int, device: torch.device) -> Tensor:
    """Lists of different lengths as one tensor, filled up at their ends."""
    fills = [fill] * len(parts) if isinstance(fill, int) else fill
    length = max(map(len, parts))
    table = np.repeat(np.array(fills, dtype=np.int64)[:, None], length, 1)
    for line, part in zip(table, parts, strict=True):
        line[: len(part)] = part
    return torch.from_numpy(table).to(device)


def _chain_rows(
    chains: list[Chain],
    common: tuple[int, slice, int],
    support: Support,
    index: int,
    values: Tensor,
    moments: tuple[Tensor, Tensor],
    rtol: float | None,
    dtype: torch.dtype,
) -> ChainRows:
    """Factor a batch of chains, given Gram matrices and sums of their bases."""
    device, width = values.device, values.shape[-1]
    gram, total = moments
    rows = _padded([c.rows for c in chains], [int(c.rows[0]) for c in chains], device)
    sizes = _padded([c.sizes for c in chains], [int(c.sizes[0]) for c in chains], device)
    keys = _padded([c.keys for c in chains], [c.span[0] for c in chains], device)
    signs = _padded([c.signs for c in chains], 0, device).double()
    applied = _padded([c.applied for c in chains], 0, device)
    steps = (torch.arange(keys.shape[1], device=device) < applied[..., None]) * signs[:, None]
    changed = values[:, keys] * signs.ne(0)[..., None]

    lower, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(width, dtype=gram.dtype, device=device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    inverse = torch.where((info == 0)[..., None, None], inverse, 0.0)
    whitened = changed @ inverse.mT
    signature = torch.diag_embed(torch.where(signs == 0, 1.0, signs))
    lower, pivots = _eliminated((signature + whitened @ whitened.mT).flatten(0, 1))
    lower, pivots = (part.unflatten(0, whitened.shape[:2]) for part in (lower, pivots))
    sound = (pivots * signature.diagonal(dim1=-2, dim2=-1) > _EPS).to(torch.uint8)
    sound = sound.cummin(-1).values.bool()
    lower = torch.where(sound[..., None], lower, 0.0)
    inverted = torch.where(sound, 1 / pivots, 0.0)
    weight = torch.cat([torch.ones_like(total), -inverted], -1)
    factor = torch.cat([inverse, (lower @ whitened) @ inverse], -2)

    along = (inverse @ total[..., None])[..., 0]  # of the base
    rest = (signs.abs() - (whitened @ along[..., None])[..., 0])[..., None]
    rest = (lower @ rest)[..., 0]
    ones = torch.cat([along, rest * inverted], -1)

    def reached(start: Tensor, changes: Tensor) -> Tensor:
        """What holds after the changes of each row, `[h, N]` and `[h, N, m]` to `[h, N, s]`."""
        sums = torch.cat([start[..., None], changes], -1).cumsum(-1)
        return _picked(sums, applied)

    norms = factor.square().sum(-1) * weight
    start = norms[..., :width].sum(-1)
    backward = reached(start, norms[..., width:])
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    steps_of_trace = changed.square().sum(-1) * signs
    traces = reached(trace, steps_of_trace)
    largest = torch.cat([trace[..., None], trace[..., None] + steps_of_trace.cumsum(-1)], -1)
    worst = pad(pivots.abs(), (1, 0), value=1.0).clamp(max=1.0).cummin(-1).values
    rounding = _EPS * largest.cummax(-1).values * start[..., None] / worst
    size = sizes.double()
    outside = (
        reached(size[:, 0] - along.square().sum(-1), rest.square() * inverted).clamp(min=0) / size
    )
    threshold = rank_threshold(sizes, width, rtol)
    bound = traces * backward
    certain = (info == 0)[..., None] & _picked(pad(sound, (1, 0), value=True), applied)
    certain &= (bound < SAFE_BOUND) & (backward > 0) & (outside > NEARLY_INSIDE)
    certain &= _picked(rounding, applied) < _ROUNDING[dtype]
    certain &= provably_full(bound, threshold) & provably_full(bound / outside, threshold)
    spans = np.array([chain.span for chain in chains])
    span = slice(int(spans[:, 0].min()), int(spans[:, 1].max()))
    example, heads, shared = common
    return ChainRows(
        example=example,
        heads=heads,
        shared=shared,
        rows=rows.flatten(),
        span=span,
        values=values[:, span],
        support=support,
        index=index,
        spans=spans,
        keys=keys,
        changed=changed,
        steps=steps,
        sizes=sizes,
        factor=factor,
        weight=weight,
        ones=ones,
        total=total,
        outside=torch.where(certain, outside, 0.0),
        bound=torch.where(certain, bound, 0.0),
        certain=certain,
    )


def _picked(parts: Tensor, applied: Tensor) -> Tensor:
    """Entry of each row's number of changes, `[h, N, m + 1]` and `[N, s]` to `[h, N, s]`."""
    return parts.gather(-1, applied.expand(len(parts), -1, -1))


def _eliminated(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Factor `F K Fᵀ = diag(d)` without pivots, F unit lower triangular.

    Args:
        matrix: K, `[N, m, m]` float64, symmetric.

    Returns:
        F `[N, m, m]` and d `[N, m]`.
    """
    size = matrix.shape[-1]
    if size == 1:
        return torch.ones_like(matrix), matrix[..., 0]
    half = size // 2
    first, pivots = _eliminated(matrix[:, :half, :half])
    across = matrix[:, half:, :half] @ first.mT
    lower = across / pivots[:, None]
    second, others = _eliminated(matrix[:, half:, half:] - lower @ across.mT)
    result = torch.zeros_like(matrix)
    result[:, :half, :half], result[:, half:, half:] = first, second
    result[:, half:, :half] = -(second @ lower) @ first
    return result, torch.cat([pivots, others], -1)


def _short_rows(
    chains: list[ShortChain],
    common: tuple[int, slice, int],
    support: Support,
    index: int,
    values: Tensor,
    rtol: float | None,
) -> ShortRows:
    """Prove that the values of the keys of short rows are independent."""
    device = values.device
    rows = _padded([c.rows for c in chains], [int(c.rows[0]) for c in chains], device)
    sizes = _padded([c.sizes for c in chains], [int(c.sizes[0]) for c in chains], device)
    keys = _padded([c.keys for c in chains], -1, device)
    reach = _padded([c.reach for c in chains], [int(c.reach[0]) for c in chains], device)
    selected = values[:, keys.clamp(min=0)] * keys.ge(0)[..., None]
    gram = selected @ selected.mT + torch.diag_embed(keys.lt(0).double())
    lower, pivots = _eliminated(gram.flatten(0, 1))
    lower, pivots = (part.unflatten(0, gram.shape[:2]) for part in (lower, pivots))
    # of the first keys, which are at least those of a row: its smallest singular value is no less
    sound = (pivots > 0).to(torch.uint8).cummin(-1).values.bool()
    backward = torch.where(sound, lower.square().sum(-1) / pivots, torch.inf).cumsum(-1)
    trace = selected.square().sum(-1).cumsum(-1)
    bound = _picked(trace * backward, reach - 1)
    certain = (bound < SAFE_BOUND) & provably_full(
        bound, rank_threshold(sizes, values.shape[-1], rtol)
    )
    first = int(keys.masked_fill(keys < 0, values.shape[1]).amin())
    span = slice(first, int(keys.amax()) + 1)
    example, heads, shared = common
    return ShortRows(
        example=example,
        heads=heads,
        shared=shared,
        rows=rows.flatten(),
        span=span,
        values=values[:, span],
        support=support,
        index=index,
        sizes=sizes.flatten(),
        certain=certain.flatten(1),
    )
