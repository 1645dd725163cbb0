"""Null-space effective attention: the part of attention that reaches the output.

Brunner et al., "On Identifiability in Transformers", ICLR 2020 (arXiv 1908.04211), section 3.
With `T = V H`, the rows of A may move in the left null space of T without changing `A T`;
effective attention `A⊥ = A − Proj_{LN(T)} A` is A with that freedom removed. Masks are part of
the definition: a row is projected inside the keys it may attend to.

No `n × n` singular matrix is built. `G = Σ v vᵀ` is accumulated in float64 and factored to W with
`W Wᵀ = G⁺`; `U = V W` has orthonormal columns and `A⊥ = (A U) Uᵀ`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnlens.algebra.factors import (
    Whitening,
    default_rtol,
    factor_values,
    reorthogonalise,
    whiten_spectral,
)
from attnlens.algebra.rowwise import RowwiseBasis
from attnlens.algebra.supports import Support, support_of
from attnlens.algebra.values import deficiency_factor, prepare_values, require_finite, working_dtype
from attnlens.errors import InputError

Method = Literal["auto", "cholesky", "eigh", "svd"]
METHODS = ("auto", "cholesky", "eigh", "svd")


@dataclass(frozen=True)
class ValueBasis:
    """An orthonormal basis of the column space of T for every example and head.

    Attributes:
        basis: `[B, H, K, R]` in the working precision; zero at masked keys and beyond the rank.
        whitening: `[B, H, E, R]` float64 W with `basis = values W`; E is D, or D + 1 when simplex.
        gram: `[B, H, E, E]` float64 Gram matrix of the values.
        rank: `[B, H]` int64, the numerical rank of the values.
        tokens: `[B, H]` int64, the number n of real keys.
        rtol: the relative threshold that decided the rank.
        simplex: whether the constant column was included, so that projection keeps row sums.
    """

    basis: Tensor
    whitening: Tensor
    gram: Tensor
    rank: Tensor
    tokens: Tensor
    rtol: float
    simplex: bool

    @property
    def nullity(self) -> Tensor:
        """Dimension `n − rank` of the left null space, `[B, H]` int64."""
        return self.tokens - self.rank

    @property
    def singular_values(self) -> Tensor:
        """Singular values of the values, descending, `[B, H, E]` float64, zero beyond the rank."""
        sigma = torch.linalg.eigvalsh(self.gram).clamp(min=0).sqrt().flip(-1)
        kept = torch.arange(sigma.shape[-1], device=sigma.device) < self.rank[..., None]
        return sigma * kept

    @property
    def condition(self) -> Tensor:
        """Ratio of the largest to the smallest kept singular value, `[B, H]` float64, ≥ 1.

        NaN where the rank is zero.
        """
        sigma = self.singular_values
        last = (self.rank - 1).clamp(min=0)[..., None]
        return sigma[..., 0] / sigma.gather(-1, last)[..., 0]

    def coordinates(self, attention: Tensor) -> Tensor:
        """Express attention rows in the basis.

        Args:
            attention: `[B, H, Q, K]`.

        Returns:
            `C = A U`, `[B, H, Q, R]`; `‖C‖_F = ‖A⊥‖_F`.
        """
        return attention.to(self.basis.dtype) @ self.basis

    def project(self, attention: Tensor) -> Tensor:
        """Remove what the output cannot see from attention rows.

        Args:
            attention: `[B, H, Q, K]`.

        Returns:
            `A⊥ = C Uᵀ`, `[B, H, Q, K]`, zero at masked keys.
        """
        return self.coordinates(attention) @ self.basis.mT


def value_basis(
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    simplex: bool = False,
    rtol: float | None = None,
    *,
    method: Method = "auto",
    causal: bool = False,
) -> ValueBasis | RowwiseBasis:
    """Find an orthonormal basis of the column space of T, per example and head.

    Args:
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        mask: bool, `[B, K]` or broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection. It enters only where its
            rank is below D; otherwise `LN(V H) = LN(V)`.
        simplex: use `[T, 1]` instead of T, so that projected rows still sum to one.
        rtol: a singular value counts when it exceeds `rtol` times the largest; by default
            `max(n, D) · eps(float32)`.
        method: `"auto"` (Cholesky, eigendecomposition where needed), `"cholesky"` (an error
            where a head is rank-deficient), `"eigh"`, or `"svd"` (a thin singular value
            decomposition of the values themselves, as in the paper).
        causal: row `i` sees no key after `i`, in addition to the mask.

    Returns:
        A :class:`ValueBasis` where every row of an example has the same support, else a
        :class:`~attnlens.algebra.rowwise.RowwiseBasis`.

    Raises:
        InputError: on a wrong shape, dtype or method.
        NonFiniteError: if a real value row holds NaN or Inf, naming example and head.

    References:
        Brunner et al., ICLR 2020, section 3.
    """
    batch, _, keys, _ = _checked_value(value, projection, method)
    queries = keys
    if mask is not None and mask.dim() >= 2 and mask.shape != (batch, keys):
        queries = mask.shape[-2] if mask.shape[-2] > 1 else keys
    support = support_of(mask, batch, queries, keys, causal=causal, device=value.device)
    return _basis(value, support, projection, simplex, rtol, method)


def effective_attention(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    simplex: bool = False,
    rtol: float | None = None,
    *,
    method: Method = "auto",
    causal: bool = False,
) -> Tensor:
    """Project attention onto what the output can see: `A⊥ = A − Proj_{LN(T)} A`.

    Args:
        attention: `[B, H, Q, K]` attention probabilities before dropout.
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        mask: bool, `[B, K]` or broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection, see :func:`value_basis`.
        simplex: keep the row sums (`LN([T, 1])` instead of `LN(T)`).
        rtol: relative threshold for the numerical rank, see :func:`value_basis`.
        method: see :func:`value_basis`.
        causal: row `i` sees no key after `i`, in addition to the mask.

    Returns:
        `[B, H, Q, K]` with `A⊥ T = A T`, zero outside the mask; float64 if an input is float64,
        else float32.

    Raises:
        InputError: on a wrong shape, dtype or method.
        NonFiniteError: if a real entry holds NaN or Inf, naming example and head.

    References:
        Brunner et al., ICLR 2020, section 3.
    """
    batch, heads, keys, _ = _checked_value(value, projection, method)
    shape = attention.shape
    fits = attention.dim() == 4 and (shape[0], shape[1], shape[3]) == (batch, heads, keys)
    if not fits or not attention.is_floating_point():
        raise InputError(
            f"attention must be floating-point [B, H, Q, K] = [{batch}, {heads}, Q, {keys}] to go "
            f"with value {list(value.shape)}. Got {list(shape)}, {attention.dtype}."
        )
    require_finite(attention, "attention", None)
    working = torch.promote_types(working_dtype(attention), working_dtype(value))
    support = support_of(mask, batch, shape[2], keys, causal=causal, device=value.device)
    basis = _basis(value.to(working), support, projection, simplex, rtol, method)
    return basis.project(attention.to(working))


def shared_basis(
    values: Tensor,
    support: Support,
    rtol: float,
    *,
    like: Tensor,
    method: Method = "auto",
    simplex: bool = False,
) -> ValueBasis:
    """Factor prepared values whose support is the same in every row of an example.

    Args:
        values: `[B, H, K, E]` float64 from :func:`prepare_values`.
        support: a shared support.
        rtol: relative threshold for the numerical rank.
        like: tensor whose precision the basis should have.
        method: see :func:`value_basis`.
        simplex: whether `values` has the constant column.

    Returns:
        The basis, with R = min(K, E).

    Raises:
        InputError: if `method="cholesky"` meets a rank-deficient head.
    """
    batch, heads, tokens, width = values.shape
    keys = support.keys.expand(batch, heads, tokens)
    gram = values.mT @ values
    flat = values.reshape(-1, tokens, width)
    if method == "svd":
        basis, whitening = _singular_basis(flat, rtol)
        basis = basis * keys.reshape(-1, tokens, 1)  # exact zeros where masked
    elif method == "eigh":
        whitening = whiten_spectral(gram.reshape(-1, width, width), rtol)
        basis = flat @ whitening.factor
    else:
        whitening = factor_values(values, gram, keys, rtol)
        if method == "cholesky":
            _require_full_rank(whitening, keys.sum(-1).clamp(max=width))
        basis = flat @ whitening.factor
    basis, whitening = _polish(basis, whitening, like.dtype == torch.float64)
    columns = min(tokens, width)
    return ValueBasis(
        basis[..., :columns].reshape(batch, heads, tokens, columns).to(working_dtype(like)),
        whitening.factor[..., :columns].reshape(batch, heads, width, columns),
        gram,
        whitening.rank.reshape(batch, heads),
        keys.sum(-1),
        rtol,
        simplex,
    )


def _checked_value(
    value: Tensor, projection: Tensor | None, method: str
) -> tuple[int, int, int, int]:
    if value.dim() != 4 or not value.is_floating_point():
        raise InputError(
            f"value must be a floating-point tensor [B, H, K, D]. "
            f"Got {list(value.shape)}, {value.dtype}."
        )
    batch, heads, keys, width = value.shape
    if projection is not None and (projection.dim() != 3 or projection.shape[:2] != (heads, width)):
        raise InputError(
            f"projection must be [H, D, M] = [{heads}, {width}, M] to go with value "
            f"{list(value.shape)}. Got {list(projection.shape)}."
        )
    if method not in METHODS:
        raise InputError(f"method must be one of {', '.join(METHODS)}. Got {method!r}.")
    return batch, heads, keys, width


def _basis(
    value: Tensor,
    support: Support,
    projection: Tensor | None,
    simplex: bool,
    rtol: float | None,
    method: Method,
) -> ValueBasis | RowwiseBasis:
    """Find the basis of checked values within a support."""
    heads, keys, width = value.shape[1:]
    if support.keys.shape[1] not in (1, heads):
        raise InputError(
            f"The mask must have one head or {heads}, to go with value {list(value.shape)}. "
            f"Got {support.keys.shape[1]}."
        )
    require_finite(value, "value", support.keys[..., None])
    factor = None if projection is None else deficiency_factor(projection)
    values = prepare_values(value, support.keys, factor, simplex)
    rtol = default_rtol(keys, width) if rtol is None else rtol
    if support.shared:
        return shared_basis(values, support, rtol, method=method, simplex=simplex, like=value)
    if method not in ("auto", "eigh"):
        raise InputError(
            f'A mask that differs by row is served by method="auto". Got method="{method}".'
        )
    return RowwiseBasis(values, support, rtol, simplex, working_dtype(value))


def _singular_basis(values: Tensor, rtol: float) -> tuple[Tensor, Whitening]:
    """Thin SVD of `[N, K, E]`, padded to E columns."""
    left, sigma, right = torch.linalg.svd(values, full_matrices=False)
    kept = (sigma > rtol * sigma[:, :1]) & (sigma > 0)
    inverse = torch.where(kept, 1 / sigma.where(kept, sigma.new_ones(())), 0.0)
    missing = values.shape[-1] - sigma.shape[-1]
    basis = torch.nn.functional.pad(left * kept[:, None], (0, missing))
    factor = torch.nn.functional.pad(right.mT * inverse[:, None], (0, missing))
    return basis, Whitening(factor, kept.sum(-1), torch.ones_like(kept[:, 0]))


def _polish(basis: Tensor, whitening: Whitening, everywhere: bool) -> tuple[Tensor, Whitening]:
    """Orthogonalise once more the problems that need it, or all of them."""
    chosen = (~whitening.orthonormal | everywhere) & (whitening.rank > 0)
    if not bool(chosen.any()):
        return basis, whitening
    basis, factor = basis.clone(), whitening.factor.clone()
    basis[chosen], factor[chosen] = reorthogonalise(basis[chosen], factor[chosen])
    return basis, whitening._replace(factor=factor)


def _require_full_rank(whitening: Whitening, full: Tensor) -> None:
    deficient = (whitening.rank.reshape(full.shape) < full).nonzero()
    if deficient.numel():
        example, head = deficient[0].tolist()
        raise InputError(
            f'method="cholesky" needs full rank, but the values of batch index {example}, '
            f"head {head} have rank {int(whitening.rank.reshape(full.shape)[example, head])}. "
            f'Use method="auto".'
        )
