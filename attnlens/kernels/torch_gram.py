"""Gram matrices of the values, whitened or diagonalised: the PyTorch twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.kernels.ranks import counts, provably_full
from attnlens.kernels.returned import GramFactor, GramSVD

# A bound of cond² below which one pass leaves UᵀU right to 1e-8.
SAFE_BOUND = 1e8
_BLOCK_ELEMENTS = 1 << 19


class Whitening(NamedTuple):
    """Factors W with `W Wᵀ = G⁺`, so that `V W` has orthonormal columns.

    Attributes:
        factor: `[N, E, R]` float64; columns beyond the rank are zero.
        rank: `[N]` int64.
        bound: `[N]` float64, at least the squared condition number of V where its rank was proven
            to be full, else Inf.
    """

    factor: Tensor
    rank: Tensor
    bound: Tensor


def gram_factor(value: Tensor, keys: Tensor, threshold: Tensor) -> GramFactor:
    """Return the whitened Gram matrix of every head; see `attnlens.kernels.gram_factor`."""
    gram, total = moments(value, keys)
    shape = gram.shape[:2]
    finite = gram.isfinite().flatten(2).all(-1).flatten()
    flat = gram.flatten(0, 1)
    spoilt = not bool(finite.all())
    if spoilt:  # a factorisation must not meet what is not finite
        flat = torch.where(finite[:, None, None], flat, 0.0)
    keys = keys.expand(value.shape[:3])
    found = _whitened(value, flat, keys, threshold.expand(shape).flatten(), finite)
    factor, bound = found.factor, found.bound
    if spoilt:
        factor = torch.where(finite[:, None, None], factor, torch.nan)
        bound = torch.where(finite, bound, torch.nan)
    return GramFactor(
        factor.unflatten(0, shape), found.rank.view(shape), bound.view(shape), gram, total
    )


def gram_svd(value: Tensor, keys: Tensor) -> GramSVD:
    """Return the eigenpairs of the Gram matrix of every head; see `attnlens.kernels.gram_svd`."""
    gram, _ = moments(value, keys)
    finite = gram.isfinite().flatten(2).all(-1)[..., None, None]
    eigenvalues, vectors = torch.linalg.eigh(torch.where(finite, gram, 0.0))
    eigenvalues = torch.where(finite[..., 0], eigenvalues, torch.nan)
    return GramSVD(
        eigenvalues.clamp_min(0).sqrt().flip(-1), torch.where(finite, vectors.flip(-1), torch.nan)
    )


def moments(value: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the real value rows and their outer products, without a float64 copy of them all.

    Args:
        value: `[B, H, K, D]`, in any layout and precision.
        keys: `[B, 1 or H, K]` bool; rows elsewhere may hold anything, NaN included.

    Returns:
        `Σ v vᵀ`, `[B, H, D, D]` float64, and `Σ v`, `[B, H, D]` float64.
    """
    batch, heads, _, width = value.shape
    gram = value.new_zeros((batch, heads, width, width), dtype=torch.float64)
    total = value.new_zeros((batch, heads, width), dtype=torch.float64)
    for some, rows in blocks_of_rows(value):
        block = selected_rows(value[some, :, rows], keys[some, :, rows], torch.float64)
        total[some] += block.sum(-2)
        block = block.flatten(0, 1)
        gram[some].flatten(0, 1).baddbmm_(block.mT, block)
    return gram, total


def selected_rows(tensor: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy rows in one pass, with zeros in place of those that do not count.

    Args:
        tensor: `[..., N, D]`, in any layout.
        keep: bool, broadcastable to `[..., N]`; rows elsewhere may hold anything, NaN included.
        dtype: of the copy.

    Returns:
        `[..., N, D]`, contiguous.
    """
    copy = torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)
    left_out = (~keep.expand(copy.shape[:-1])).flatten().nonzero()[:, 0]
    if len(left_out):  # by row: a mask that is broadcast along them takes five times as long
        copy.flatten(0, -2).index_fill_(0, left_out, 0.0)
    return copy


def blocks_of_rows(tensor: Tensor) -> Iterator[tuple[slice, slice]]:
    """Split `[B, H, N, E]` into examples and rows that stay in the cache while they are used.

    Converting all rows at once costs as much as the sums over them.

    Yields:
        Slices of the examples and of the rows.
    """
    batch, heads, rows, width = tensor.shape
    size = rows if tensor.is_cuda else max(_BLOCK_ELEMENTS // max(heads * width, 1), 64)
    count = batch if tensor.is_cuda else max(size // max(rows, 1), 1)
    for first in range(0, batch, count):
        for start in range(0, rows, size):
            yield slice(first, first + count), slice(start, start + size)


def whiten(gram: Tensor, threshold: Tensor, trace: Tensor | None = None) -> Whitening:
    """Factor the Gram matrices that are safely regular; leave the others for another way.

    Args:
        gram: `[N, E, E]` float64, symmetric positive semidefinite, finite.
        threshold: `[N]` float64, see :func:`~attnlens.kernels.ranks.rank_threshold`.
        trace: `[N]`, at least the square to which the threshold is relative; by default tr(G).

    Returns:
        Factors with R = E, of no use where the bound is Inf.
    """
    lower, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1) if trace is None else trace
    bound = _proven(trace * inverse.square().sum((-2, -1)), info, threshold)
    return Whitening(inverse.mT, torch.full_like(bound, gram.shape[-1], dtype=torch.int64), bound)


def whiten_short(values: Tensor, real: Tensor, threshold: Tensor) -> Whitening:
    """Factor problems with no more keys than dimensions through their key-by-key Gram matrix.

    For a regular `V Vᵀ` the pseudo-inverse itself is a whitening factor: `V V⁺ = I`, so the basis
    is the identity on the real keys, and effective attention is attention.

    Args:
        values: `[N, n, E]` float64, `n ≤ E`, zero at slots without a key.
        real: `[N, n]` bool, the slots with a key.
        threshold: `[N]` float64.

    Returns:
        Factors with R = n, of no use where the bound is Inf.
    """
    half, bound, info = _short_half(values, real)
    bound = _proven(bound, info, threshold)
    return Whitening(values.mT @ (half.mT @ half), real.sum(-1), bound)


def independent(value: Tensor, keys: Tensor, threshold: Tensor) -> Tensor:
    """Prove that the values at real keys are linearly independent, head by head.

    It takes no factor of the values, only one Cholesky of their key-by-key Gram matrix.

    Args:
        value: `[B, H, K, D]`.
        keys: `[B, 1 or H, K]` bool, the real keys, at most D of them.
        threshold: `[B, H]` float64, see :func:`~attnlens.kernels.ranks.rank_threshold`.

    Returns:
        `[B, H]` bool. False where values are not finite, or the rank may be smaller.
    """
    shape, keys = value.shape[:2], keys.expand(value.shape[:3])
    count = int(keys.sum(-1).amax())
    proven = torch.zeros(shape, dtype=torch.bool, device=value.device)
    for some, _ in blocks_of_rows(value):
        block, own = value[some], keys[some]
        every = torch.arange(own[..., 0].numel(), device=value.device)
        rows, real = real_rows(block, own, every, count)
        _, bound, info = _short_half(rows, real)
        full = (info == 0) & provably_full(bound, threshold[some].flatten())
        proven[some] = full.view(own.shape[:2])
    return proven


def _short_half(values: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor `[N, n, n]` X with `XᵀX = (VVᵀ)⁻¹`, a bound of cond², and Cholesky's verdict."""
    gram = values @ values.mT
    padding = (~real).to(gram.dtype)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    gram.diagonal(dim1=-2, dim2=-1).add_(padding)
    lower, info = torch.linalg.cholesky_ex(gram)
    # not cholesky_inverse, which raises for the whole batch where one problem is singular
    identity = torch.diag_embed(1 - padding)
    half = torch.linalg.solve_triangular(lower, identity, upper=False)
    return half, trace * half.square().sum((-2, -1)), info


def whiten_spectral(gram: Tensor, threshold: Tensor) -> Whitening:
    """Factor Gram matrices of any rank by symmetric eigendecomposition.

    Args:
        gram: `[N, E, E]` float64, symmetric positive semidefinite, finite.
        threshold: `[N]` float64.

    Returns:
        Factors with R = E, columns in order of falling singular value, and infinite bounds.
    """
    eigenvalues, vectors = (part.flip(-1) for part in torch.linalg.eigh(gram))
    return _truncated(eigenvalues, vectors, threshold)


def whiten_orthogonal(values: Tensor, threshold: Tensor) -> Whitening:
    """Factor values of any rank without squaring their condition number.

    Args:
        values: `[N, K, E]` float64, finite, zero at masked keys.
        threshold: `[N]` float64.

    Returns:
        Factors with R = E, columns in order of falling singular value, and infinite bounds.
    """
    sigma, axes = _singular(torch.linalg.qr(values, mode="r").R)[1:]
    return _truncated(sigma.square(), axes, threshold)


def orthogonal_basis(values: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Find the leading left singular vectors of values, and the factor that gives them.

    Unlike `V W`, which is off by eps · cond, the basis spans the values to rounding.

    Args:
        values: `[N, K, E]` float64, finite, zero at masked keys.
        rank: `[N]` int64, how many to keep.

    Returns:
        `[N, K, E]` and `[N, E, E]` float64, zero beyond the rank.
    """
    rotation, triangle = torch.linalg.qr(values)
    left, sigma, axes = _singular(triangle)
    kept = (torch.arange(sigma.shape[-1], device=rank.device) < rank[:, None])[:, None]
    scale = torch.where(kept, 1 / torch.where(kept, sigma[:, None], 1.0), 0.0)
    return torch.where(kept, rotation @ left, 0.0), axes * scale


def _singular(triangle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular triplets of `[N, r, E]`, r ≤ E, padded to E of them: left, sigma, right."""
    left, sigma, axes = torch.linalg.svd(triangle)
    missing = triangle.shape[-1] - triangle.shape[-2]
    pad = torch.nn.functional.pad
    return pad(left, (0, missing)), pad(sigma, (0, missing)), axes.mT


def reorthogonalise(rows: Tensor, factor: Tensor) -> Tensor:
    """Refine factors by a second Cholesky pass: eps · cond² in UᵀU becomes eps · cond.

    Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44 (2015).

    Args:
        rows: `[N, K, E]` float64 values, zero at masked keys.
        factor: `[N, E, R]` float64, their whitening factors.

    Returns:
        `[N, E, R]`, so that `rows @ factor` has orthonormal columns to working precision.
    """
    basis = rows @ factor
    gram = basis.mT @ basis
    unused = factor.eq(0).all(-2)  # columns beyond the rank
    lower = torch.linalg.cholesky(gram + torch.diag_embed(unused.to(gram.dtype)))
    refined: Tensor = torch.linalg.solve_triangular(lower.mT, factor, upper=True, left=False)
    return refined


def _proven(bound: Tensor, info: Tensor, threshold: Tensor) -> Tensor:
    """The bounds that prove full rank and leave one pass precise; Inf elsewhere."""
    certain = (info == 0) & (bound < SAFE_BOUND) & provably_full(bound, threshold)
    return torch.where(certain, bound, torch.inf)


def _truncated(squares: Tensor, axes: Tensor, threshold: Tensor) -> Whitening:
    """Scale the axes that count to unit length, and drop the others."""
    kept = counts(squares, squares[:, :1], threshold[:, None])
    scale = torch.where(kept, torch.where(kept, squares, 1.0).rsqrt(), 0.0)
    bound = torch.full_like(squares[:, 0], torch.inf)
    return Whitening(axes * scale[:, None], kept.sum(-1), bound)


def _whitened(
    value: Tensor, gram: Tensor, keys: Tensor, threshold: Tensor, finite: Tensor
) -> Whitening:
    """Choose the smaller Gram matrix for every head, and an orthogonal way where neither serves.

    Args:
        value: `[B, H, K, E]`.
        gram: `[N, E, E]` over the flattened heads, finite.
        keys: `[B, H, K]` bool.
        threshold: `[N]`.
        finite: `[N]` bool; values elsewhere count as zero.

    Returns:
        Factors with R = E.
    """
    width = value.shape[-1]
    size = keys.sum(-1).flatten()
    few = size <= width
    short, long = few.nonzero()[:, 0], (~few).nonzero()[:, 0]
    if not len(short):
        found = whiten(gram, threshold)
    else:
        factor, rank, bound = torch.zeros_like(gram), torch.zeros_like(size), threshold.clone()
        factor[long], rank[long], bound[long] = whiten(gram[long], threshold[long])
        count = int(size[short].max())
        rows, real = real_rows(value, keys, short, count)
        rows = rows.masked_fill(~finite[short, None, None], 0.0)
        own = whiten_short(rows, real, threshold[short])
        factor[short] = torch.nn.functional.pad(own.factor, (0, width - count))
        rank[short], bound[short] = own.rank, own.bound
        found = Whitening(factor, rank, bound)
    wide = value.dtype == torch.float64
    doubtful = found.bound.isinf().nonzero()[:, 0]
    if not wide and not len(doubtful):
        return found
    factor, rank = found.factor.contiguous(), found.rank
    if len(doubtful):
        factor[doubtful], rank[doubtful], _ = whiten_orthogonal(
            _selected(value, keys, doubtful, finite), threshold[doubtful]
        )
    refined = torch.arange(len(factor), device=factor.device) if wide else doubtful
    rows = _selected(value, keys, refined, finite)
    factor[refined] = reorthogonalise(rows, factor[refined])
    return Whitening(factor, rank, found.bound)


def _selected(value: Tensor, keys: Tensor, heads: Tensor, finite: Tensor) -> Tensor:
    """Values of some flattened heads, `[N, K, E]` float64, zero at masked keys."""
    keep = keys.flatten(0, 1)[heads] & finite[heads, None]
    return selected_rows(value.flatten(0, 1)[heads][None], keep[None], torch.float64)[0]


def real_rows(value: Tensor, keys: Tensor, heads: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Gather the real rows of some flattened heads in float64, padded with zeros.

    Args:
        value: `[B, H, K, E]`.
        keys: `[B, H, K]` bool, the real keys.
        heads: `[N]` int64, indices of flattened heads.
        count: n, at least the number of real keys of each.

    Returns:
        `[N, n, E]` float64, and where they are real, `[N, n]` bool.
    """
    keys = keys.flatten(0, 1)[heads]
    order = keys.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    real = keys.gather(-1, order)
    rows = value.flatten(0, 1)[heads[:, None], order].double()
    return rows.masked_fill_(~real[..., None], 0.0), real
