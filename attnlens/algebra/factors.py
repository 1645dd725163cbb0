"""Whitening factors of batched Gram matrices, with a numerical rank for each.

Everything here is float64 and batched over one leading dimension N (examples × heads, or groups
of rows). Cholesky serves the matrices that are provably well conditioned; the others, and only
they, are diagonalised.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT32_EPS = torch.finfo(torch.float32).eps


class Whitening(NamedTuple):
    """A factor `W` with `W Wᵀ = G⁺`, so that `V W` has orthonormal columns.

    Attributes:
        factor: `[N, E, R]` float64; columns beyond the rank are zero.
        rank: `[N]` int64.
        orthonormal: `[N]` bool; False where one more orthogonalisation pass is due.
    """

    factor: Tensor
    rank: Tensor
    orthonormal: Tensor


def default_rtol(tokens: int, width: int) -> float:
    """Relative threshold below which a singular value counts as zero.

    It is `max(n, D) · eps(float32)` whatever the storage type: bfloat16 values are exact numbers,
    and their own eps would erase every direction.

    Args:
        tokens: number of keys n.
        width: head dimension D.

    Returns:
        The threshold, relative to the largest singular value.
    """
    return max(tokens, width, 1) * FLOAT32_EPS


def provably_regular(gram: Tensor, rtol: float) -> Tensor:
    """Tell which Gram matrices have full numerical rank, without diagonalising any.

    Args:
        gram: `[..., E, E]` float64, symmetric positive semidefinite, finite.
        rtol: a singular value of V counts when it exceeds `rtol` times the largest.

    Returns:
        `[...]` bool; False means undecided, not deficient.
    """
    return _inverted(gram, rtol)[1]


def whiten(gram: Tensor, rtol: float) -> Whitening:
    """Factor Gram matrices `G = VᵀV`: Cholesky first, eigendecomposition where it is needed.

    Args:
        gram: `[N, E, E]` float64, symmetric positive semidefinite, finite.
        rtol: a singular value of V counts when it exceeds `rtol` times the largest.

    Returns:
        Factors with R = E.
    """
    inverse, regular = _inverted(gram, rtol)
    rank = torch.full_like(regular, gram.shape[-1], dtype=torch.int64)
    factor = inverse.mT
    doubtful = (~regular).nonzero()[:, 0]
    if doubtful.numel():
        factor = factor.contiguous()
        spectral = whiten_spectral(gram[doubtful], rtol)
        factor[doubtful], rank[doubtful] = spectral.factor, spectral.rank
    return Whitening(factor, rank, regular)


def _inverted(gram: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Inverse Cholesky factors, and where the rank is provably full."""
    # σ_max²/σ_min² ≤ tr(G) tr(G⁻¹): a bound that never calls a deficient matrix regular
    lower, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    bound = gram.diagonal(dim1=-2, dim2=-1).sum(-1) * inverse.square().sum((-2, -1))
    return inverse, (info == 0) & (bound * rtol * rtol < 1)


def whiten_spectral(gram: Tensor, rtol: float) -> Whitening:
    """Factor Gram matrices by symmetric eigendecomposition with rank truncation.

    Args:
        gram: `[N, E, E]` float64, symmetric positive semidefinite, finite.
        rtol: a singular value of V counts when it exceeds `rtol` times the largest.

    Returns:
        Factors with R = E, columns in order of falling singular value.
    """
    eigenvalues, vectors = torch.linalg.eigh(gram)
    sigma = eigenvalues.clamp(min=0).sqrt().flip(-1)
    kept = (sigma > rtol * sigma[:, :1]) & (sigma > 0)
    scale = torch.where(kept, 1 / sigma.where(kept, sigma.new_ones(())), 0.0)
    return Whitening(vectors.flip(-1) * scale[:, None], kept.sum(-1), torch.zeros_like(kept[:, 0]))


def whiten_short(values: Tensor, keys: Tensor, rtol: float) -> Whitening:
    """Factor examples with no more keys than dimensions through the key-by-key Gram matrix.

    For a regular `V Vᵀ` the pseudo-inverse itself is a whitening factor: `V V⁺ = I`, so the basis
    is the identity on the real keys and effective attention is attention.

    Args:
        values: `[N, n, E]` float64, `n ≤ E`, zero at masked keys.
        keys: `[N, n]` bool.
        rtol: a singular value of V counts when it exceeds `rtol` times the largest.

    Returns:
        Factors with R = n; `orthonormal` is False, and the factor unusable, where `V Vᵀ` is not
        safely regular.
    """
    gram = values @ values.mT
    padded = gram + torch.diag_embed((~keys).to(gram.dtype))
    lower, info = torch.linalg.cholesky_ex(padded)
    # not cholesky_inverse, which raises for the whole batch where one problem is singular
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    half = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    inverse = (half.mT @ half) * (keys[:, :, None] & keys[:, None]).to(gram.dtype)
    bound = gram.diagonal(dim1=-2, dim2=-1).sum(-1) * inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
    regular = (info == 0) & (bound * rtol * rtol < 1)
    return Whitening(values.mT @ inverse, keys.sum(-1), regular)


def reorthogonalise(basis: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a second Cholesky pass, which makes the columns orthonormal to working precision.

    Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44 (2015).

    Args:
        basis: `[N, K, R]` float64, nearly orthonormal columns, zero beyond the rank.
        factor: `[N, E, R]` float64, the factor that produced it.

    Returns:
        The basis and its factor after the pass.
    """
    gram = basis.mT @ basis
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    gram = gram + torch.diag_embed((diagonal == 0).to(gram.dtype))
    lower = torch.linalg.cholesky(gram)
    return (
        torch.linalg.solve_triangular(lower.mT, basis, upper=True, left=False),
        torch.linalg.solve_triangular(lower.mT, factor, upper=True, left=False),
    )


def factor_values(values: Tensor, gram: Tensor, keys: Tensor, rtol: float) -> Whitening:
    """Choose the smaller Gram matrix for every problem and factor each kind in one batched call.

    Args:
        values: `[..., K, E]`, finite at the keys; leading dimensions may be expanded.
        gram: `[..., E, E]` float64, `valuesᵀ values` over the keys of each problem.
        keys: `[..., K]` bool, the keys of each problem, leading dimensions broadcast; values
            elsewhere play no part.
        rtol: a singular value of V counts when it exceeds `rtol` times the largest.

    Returns:
        Factors over the flattened leading dimensions, R = E. A problem with at most E keys whose
        rows are independent has `rank` equal to its number of keys.
    """
    width = values.shape[-1]
    leading = gram.shape[:-2]
    few = keys.sum(-1) <= width
    flat_gram = gram.reshape(-1, width, width)
    if not bool(few.any()):
        return whiten(flat_gram, rtol)
    factor = torch.zeros_like(flat_gram)
    rank = torch.zeros(flat_gram.shape[0], dtype=torch.int64, device=gram.device)
    orthonormal = torch.zeros_like(rank, dtype=torch.bool)

    short = few.expand(leading).reshape(-1)
    position, real = (part.expand(*leading, -1) for part in _positions(keys & few[..., None]))
    taken = torch.take_along_dim(values, position[..., None], dim=-2)
    taken = taken.to(gram.dtype).masked_fill(~real[..., None], 0.0)
    taken, real = taken.flatten(end_dim=-3)[short], real.flatten(end_dim=-2)[short]
    result = whiten_short(taken, real, rtol)
    factor[short, :, : real.shape[-1]] = result.factor
    rank[short], orthonormal[short] = result.rank, result.orthonormal
    doubtful = short & ~orthonormal
    for chosen, solve in ((~short, whiten), (doubtful, whiten_spectral)):
        if chosen.any():
            result = solve(flat_gram[chosen], rtol)
            factor[chosen], rank[chosen] = result.factor, result.rank
            orthonormal[chosen] = result.orthonormal
    return Whitening(factor, rank, orthonormal)


def _positions(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the keys of each problem, first ones first, and which slots are taken."""
    # by nonzero: memory goes with the number of keys, where a sort takes `[..., K]` integers
    flat = keys.flatten(end_dim=-2)
    problem, position = flat.nonzero(as_tuple=True)
    sizes = flat.sum(-1)
    slot = torch.arange(len(problem), device=keys.device) - (sizes.cumsum(0) - sizes)[problem]
    first = torch.zeros((len(flat), int(sizes.max())), dtype=torch.int64, device=keys.device)
    taken = torch.zeros_like(first, dtype=torch.bool)
    first[problem, slot], taken[problem, slot] = position, True
    return first.unflatten(0, keys.shape[:-1]), taken.unflatten(0, keys.shape[:-1])
