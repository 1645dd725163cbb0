"""Gram matrices of the values, whitened or diagonalised: the PyTorch twin."""

import torch
from torch import Tensor

from attnlens.errors import NonFiniteError
from attnlens.kernels.returned import GramFactor, GramSVD

# A bound of cond² below which one pass leaves UᵀU right to 1e-8.
SAFE_CONDITION = 1e8


def gram_factor(
    value: Tensor, keys: Tensor | None, *, ones: bool, rtol: float | None, extremes: bool
) -> GramFactor:
    """Return the whitened Gram matrix of every head; see ``attnlens.kernels.gram_factor``."""
    rows = _real_rows(value, keys, ones)  # [B, H, K, E]
    gram = rows.mT @ rows
    tolerance = _rank_tolerance(rows, keys, rtol)
    whitening, rank, squares, doubtful = _whiten(gram.flatten(0, 1), tolerance.flatten(), extremes)
    if value.dtype == torch.float64:
        whitening = _reorthogonalise(rows.flatten(0, 1), whitening)
    elif len(doubtful):
        whitening[doubtful] = _reorthogonalise(rows.flatten(0, 1)[doubtful], whitening[doubtful])
    whitening = whitening.view_as(gram)
    heads = gram.shape[:2]
    sigma_max, sigma_min = squares.sqrt().view(2, *heads) if extremes else (None, None)
    return GramFactor(whitening, rank.view(heads), sigma_max, sigma_min, gram, tolerance)


def gram_svd(value: Tensor, keys: Tensor | None) -> GramSVD:
    """Return the eigenpairs of the Gram matrix of every head; see ``attnlens.kernels.gram_svd``."""
    rows = _real_rows(value, keys, ones=False)
    gram = rows.mT @ rows
    _require_finite(gram)
    eigenvalues, vectors = torch.linalg.eigh(gram)
    return GramSVD(eigenvalues.clamp_min(0).sqrt().flip(-1), vectors.flip(-1))


def _real_rows(value: Tensor, keys: Tensor | None, ones: bool) -> Tensor:
    """Return the values in float64, rows at masked keys zeroed whatever they hold: [B, H, K, E]."""
    batch, heads, tokens, dim = value.shape
    rows = value.new_empty((batch, heads, tokens, dim + ones), dtype=torch.float64)
    rows[..., :dim] = value
    rows[..., dim:] = 1.0
    return rows if keys is None else rows.masked_fill_(~keys[..., None], 0.0)


def _rank_tolerance(rows: Tensor, keys: Tensor | None, rtol: float | None) -> Tensor:
    """Return the relative tolerance of every head, by default max(n, E) · eps(float32): [B, H]."""
    batch, heads, tokens, width = rows.shape
    if rtol is not None:
        return rows.new_full((batch, heads), rtol)
    if keys is None:
        return rows.new_full((batch, heads), max(tokens, width) * torch.finfo(torch.float32).eps)
    count = keys.sum(-1).expand(batch, heads).to(rows.dtype)
    return count.clamp_min(width) * torch.finfo(torch.float32).eps


def _whiten(gram: Tensor, rtol: Tensor, extremes: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return whitening factors [N, E, E], ranks [N], extreme σ² [2, N] and the doubtful heads.

    Cholesky where the rank is certainly full, an eigendecomposition of the other heads only.
    With W = L⁻ᵀ, ‖V‖_F ‖W‖_F is at least σ_1 / σ_E, so a head below 1 / rtol has full rank by
    the definition through singular values too.
    """
    width = gram.shape[-1]
    # σ > rtol · σ_1, but never below what float64 resolves in G.
    cutoff = rtol.square().clamp_min(width * torch.finfo(torch.float64).eps)
    factor, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(width, dtype=gram.dtype, device=gram.device).expand_as(gram)
    whitening = torch.linalg.solve_triangular(factor, identity, upper=False).mT.contiguous()
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    condition_bound = trace * whitening.square().sum((-2, -1))  # of cond²
    certain = (info == 0) & (condition_bound < SAFE_CONDITION) & (condition_bound * cutoff < 1.0)

    rank = torch.full_like(info, width, dtype=torch.int64)
    squares = gram.new_zeros((2, len(gram)))
    doubtful = (~certain).nonzero()[:, 0]
    if len(doubtful):
        whitening[doubtful], rank[doubtful], squares[:, doubtful] = _whiten_by_eigenvectors(
            gram[doubtful], cutoff[doubtful]
        )
    if extremes and len(doubtful) < len(gram):
        eigenvalues = torch.linalg.eigvalsh(gram[certain] if len(doubtful) else gram)
        squares[:, certain] = torch.stack([eigenvalues[:, -1], eigenvalues[:, 0]])
    return whitening, rank, squares, doubtful


def _whiten_by_eigenvectors(gram: Tensor, cutoff: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same from an eigendecomposition, which needs no full rank."""
    _require_finite(gram)
    eigenvalues, vectors = (part.flip(-1) for part in torch.linalg.eigh(gram))
    largest = eigenvalues[:, :1].clamp_min(0.0)
    kept = eigenvalues > largest * cutoff[:, None]
    whitening = vectors * torch.where(kept, eigenvalues.rsqrt(), 0.0)[:, None, :]
    smallest = torch.where(kept, eigenvalues, torch.inf).amin(-1)
    smallest = torch.where(kept.any(-1), smallest, 0.0)
    return whitening, kept.sum(-1), torch.stack([largest[:, 0], smallest])


def _reorthogonalise(rows: Tensor, whitening: Tensor) -> Tensor:
    """Return the factor after a second pass: eps · cond² in UᵀU becomes eps · cond."""
    basis = rows @ whitening
    gram = basis.mT @ basis
    unused = whitening.eq(0).all(-2)  # columns beyond the rank
    factor = torch.linalg.cholesky(gram + torch.diag_embed(unused.to(gram.dtype)))
    return torch.linalg.solve_triangular(factor.mT, whitening, upper=True, left=False)


def _require_finite(gram: Tensor) -> None:
    finite = gram.isfinite().flatten(-2).all(-1)
    if not finite.all():
        raise NonFiniteError(
            f"value holds NaN or Inf at real keys in {int((~finite).sum())} heads; "
            "mask those keys, or run the model in a precision that does not overflow"
        )
