"""The column space of the values where all rows of an example share their keys.

One factor `W Wᵀ = (VᵀV)⁺` per example and head, from the kernels, decides the rank; everything
else follows from it: the rank with a constant column, the spectrum, an orthonormal basis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attnlens.algebra.supports import Support
from attnlens.algebra.values import repeated
from attnlens.errors import InputError
from attnlens.kernels import Backend, gram_factor
from attnlens.kernels.ranks import counts, provably_full, rank_threshold
from attnlens.kernels.returned import GramFactor
from attnlens.kernels.torch_gram import (
    SAFE_BOUND,
    blocks_of_rows,
    moments,
    orthogonal_basis,
    real_rows,
    reorthogonalise,
    selected_rows,
    whiten,
    whiten_orthogonal,
    whiten_spectral,
)

Method = Literal["auto", "cholesky", "eigh", "svd"]
METHODS = ("auto", "cholesky", "eigh", "svd")
# Squared condition number from which the basis of float64 values comes from an orthogonal
# factorisation: that of a Gram matrix would lose a hundredth of the bar of 1e-12.
_ORTHOGONAL = 1e4
# Up to this squared sine, the difference from one is computed from the vector that is left.
NEARLY_INSIDE = 1e-6


@dataclass(frozen=True)
class ValueBasis:
    """An orthonormal basis of the column space of T for every example and head.

    Attributes:
        basis: `[B, H, K, R]` in the working precision; zero at masked keys and beyond the rank.
        whitening: `[B, H, E, R]` float64 W with `basis = values W`; with `simplex` the values have
            a last column of ones, E = D + 1, else E = D.
        squares: `[B, H, D]` float64, squared singular values of the values, ascending; with
            `simplex` of the values less their mean.
        rank: `[B, H]` int64, the numerical rank of the values, or of `[T, 1]`.
        tokens: `[B, H]` int64, the number n of real keys.
        threshold: `[B, H]` float64, the relative threshold that decided the rank.
        simplex: whether the constant column was included, so that projection keeps row sums.
    """

    basis: Tensor
    whitening: Tensor
    squares: Tensor
    rank: Tensor
    tokens: Tensor
    threshold: Tensor
    simplex: bool

    @property
    def nullity(self) -> Tensor:
        """Dimension `n − rank` of the left null space, `[B, H]` int64."""
        return self.tokens - self.rank

    @property
    def singular_values(self) -> Tensor:
        """Singular values that count, descending, `[B, H, D]` float64, zero beyond the rank."""
        return kept_spectrum(self.squares, self.rank - int(self.simplex))

    @property
    def condition(self) -> Tensor:
        """Ratio of the largest to the smallest singular value that counts, `[B, H]` float64, ≥ 1.

        NaN where none does.
        """
        return condition(self.squares, self.rank - int(self.simplex))

    def for_heads(self, heads: int, dtype: torch.dtype) -> ValueBasis:
        """Repeat the basis for grouped heads, in a working precision."""
        return ValueBasis(
            repeated(self.basis.to(dtype), heads),
            repeated(self.whitening, heads),
            repeated(self.squares, heads),
            repeated(self.rank, heads),
            repeated(self.tokens, heads),
            repeated(self.threshold, heads),
            self.simplex,
        )

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
            `A⊥ = C Uᵀ`, `[B, H, Q, K]`, zero at masked keys; A itself where nothing is null.
        """
        return self.coordinates(attention) @ self.basis.mT


@dataclass(frozen=True, eq=False)
class SharedFactor:
    """Factors of values whose support is the same in every row of an example.

    Attributes:
        values: `[B, H, K, D]`; rows at masked keys may hold anything.
        support: a shared support.
        threshold: `[B, H]` float64, the relative threshold that decides ranks.
        whitening: `[B, H, D, D]` float64 W with `W Wᵀ = (VᵀV)⁺`.
        rank: `[B, H]` int64.
        bound: `[B, H]` float64, at least the squared condition number where the rank was proven
            to be full, else Inf.
        gram: `[B, H, D, D]` float64, `VᵀV`.
        total: `[B, H, D]` float64, `Vᵀ1`.
        finite: `[B, H]` bool; heads whose values at real keys are not finite, or too large to
            square, are treated as if these were zero.
    """

    values: Tensor
    support: Support
    threshold: Tensor
    whitening: Tensor
    rank: Tensor
    bound: Tensor
    gram: Tensor
    total: Tensor
    finite: Tensor

    @cached_property
    def tokens(self) -> Tensor:
        """Number n of real keys, `[B, H]` int64."""
        return self.support.tokens.expand(self.rank.shape)

    @property
    def free(self) -> Tensor:
        """Where nothing is null, `rank = n`, so that `A⊥ = A`; `[B, H]` bool."""
        return self.rank == self.tokens

    @cached_property
    def ones(self) -> Tensor:
        """`G⁺ Vᵀ1`, which takes an output to the sum of its effective row, `[B, H, D]`."""
        coordinates = torch.einsum("bhe,bhef->bhf", self.total, self.whitening)
        return torch.einsum("bhf,bhef->bhe", coordinates, self.whitening)

    @cached_property
    def outside(self) -> Tensor:
        """Squared sine of the angle of the constant vector to the column space, `[B, H]`."""
        size = self.tokens.clamp(min=1).double()
        outside: Tensor = 1 - torch.linalg.vecdot(self.total, self.ones) / size
        small = (outside < NEARLY_INSIDE) & ~self.free
        if bool(small.any()):
            example, head = small.nonzero(as_tuple=True)
            keys = self.support.keys.expand(*small.shape, -1)[example, head]
            rows = selected_rows(self.values[example, head], keys, torch.float64)
            rest = keys.double() - (rows @ self.ones[small][..., None])[..., 0]
            outside[small] = rest.square().sum(-1) / size[small]
        return outside

    @cached_property
    def simplex_rank(self) -> Tensor:
        """Numerical rank of `[T, 1]`, `[B, H]` int64: see :func:`simplex_ranks`."""
        return simplex_ranks(
            self.gram,
            self.total,
            self.tokens,
            self.rank,
            self.whitening,
            self.ones,
            self.outside,
            self.threshold,
        )

    def spectrum(self, root: Tensor | None, heads: int) -> Tensor:
        """Return the squared singular values of T, ascending.

        Args:
            root: `[H, D, D]` float64 X with `X Xᵀ = H Hᵀ`; None takes T = V.
            heads: H, a multiple of the number of value heads.

        Returns:
            `[B, H, D]` float64.
        """
        gram = self.gram
        if root is not None:
            gram = root.mT @ repeated(gram, heads) @ root
        squares = torch.linalg.eigvalsh(gram)
        doubtful = repeated(self.bound.isinf() & (self.rank > 0), squares.shape[1])
        if bool(doubtful.any()):  # a Gram matrix would square their condition number
            example, head = doubtful.nonzero(as_tuple=True)
            index = head * self.rank.shape[1] // squares.shape[1]
            keys = (self.support.keys & self.finite[..., None]).expand(-1, self.rank.shape[1], -1)
            rows = selected_rows(self.values[example, index], keys[example, index], torch.float64)
            triangle = torch.linalg.qr(rows, mode="r").R
            sigma = torch.linalg.svdvals(triangle if root is None else triangle @ root[head])
            missing = squares.shape[-1] - sigma.shape[-1]
            squares[example, head] = torch.nn.functional.pad(sigma.square().flip(-1), (missing, 0))
        return repeated(squares, heads)

    def basis(self, *, simplex: bool = False) -> ValueBasis:
        """Build the orthonormal basis that maps are projected on.

        Args:
            simplex: include the constant vector.

        Returns:
            The basis in float64, with R = min(K, D), or with `simplex` min(K, D + 1).
        """
        rows = selected_rows(self.values, self.support.keys & self._known, torch.float64)
        if simplex:
            basis, whitening, squares, rank = self._simplex_parts(rows)
        else:
            basis, whitening = self._orthonormal(rows, self.whitening, self.bound, self.rank)
            squares, rank = torch.linalg.eigvalsh(self.gram), self.rank
        free = rank == self.tokens
        if bool(free.any()):  # the identity on the real keys, so that A⊥ is A to the last bit
            keys = self.support.keys.expand(rows.shape[:3])
            slot = keys.cumsum(-1) - 1
            columns = torch.arange(basis.shape[-1], device=rows.device)
            identity = (slot[..., None] == columns) & keys[..., None]
            whole = whitening @ (basis.mT @ identity.to(basis.dtype))
            whitening = torch.where(free[..., None, None], whole, whitening)
            basis = torch.where(free[..., None, None], identity.to(basis.dtype), basis)
        size = min(basis.shape[-2:])
        return ValueBasis(
            basis[..., :size],
            whitening[..., :size],
            squares,
            rank,
            self.tokens,
            self.threshold,
            simplex,
        )

    @property
    def _known(self) -> Tensor:
        return self.finite[..., None]

    def _orthonormal(
        self, rows: Tensor, factor: Tensor, bound: Tensor, rank: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A basis `[B, H, K, D]` of rows with factors W, and these: orthonormal where W is not."""
        basis = rows @ factor
        limit = _ORTHOGONAL if self.values.dtype == torch.float64 else torch.inf
        doubtful = bound >= limit
        if bool(doubtful.any()):
            basis, factor = basis.clone(), factor.clone()
            basis[doubtful], factor[doubtful] = orthogonal_basis(rows[doubtful], rank[doubtful])
        return basis, factor

    def _simplex_parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Basis, whitening of `[V, 1]`, centred spectrum and rank of `[T, 1]`."""
        keys = self.support.keys[..., None]
        size = self.tokens.clamp(min=1).double()[..., None]
        mean = self.total / size
        centred = (rows - mean[..., None, :]) * keys
        gram = centred.mT @ centred
        squares = torch.linalg.eigvalsh(gram)
        rank = self.simplex_rank
        trace = self.gram.diagonal(dim1=-2, dim2=-1).sum(-1).flatten()
        factor, _, bound = whiten(gram.flatten(0, 1), self.threshold.flatten(), trace)
        along, factor = self._orthonormal(
            centred, factor.view_as(gram), bound.view_as(rank), (rank - 1).clamp(min=0)
        )
        constant = size.rsqrt() * (self.tokens > 0)[..., None]
        basis = torch.cat([constant[..., None, :] * keys, along], -1)
        shift = -(mean[..., None, :] @ factor)
        whitening = torch.cat(
            [
                torch.nn.functional.pad(factor, (1, 0)),
                torch.cat([constant[..., None, :], shift], -1),
            ],
            -2,
        )
        return basis, whitening, squares, rank


def shared_factor(
    values: Tensor,
    support: Support,
    rtol: float | None = None,
    *,
    method: Method = "auto",
    backend: Backend = "torch",
) -> SharedFactor:
    """Factor values whose support is the same in every row of an example.

    Args:
        values: `[B, H, K, D]`.
        support: a shared support.
        rtol: relative threshold for the numerical rank; by default `max(n, D) · eps(float32)`.
        method: see :func:`~attnlens.functional.value_basis`.
        backend: which kernel factors, for `method="auto"`.

    Returns:
        The factors.

    Raises:
        InputError: if `method="cholesky"` meets a rank-deficient head, or `rtol` is out of range.
    """
    shape, width = values.shape[:2], values.shape[-1]
    keys = support.keys.expand(*shape, -1)
    threshold = rank_threshold(support.tokens, width, rtol).expand(shape)
    if method in ("auto", "cholesky"):
        found = gram_factor(values, keys, threshold=threshold, backend=backend)
        if method == "cholesky":
            _require_full_rank(found.rank, keys.sum(-1).clamp(max=width))
        finite = ~found.bound.isnan()
        if not bool(finite.all()):
            kept = [torch.where(_like(finite, part), part, 0) for part in found]
            found = GramFactor(*kept)
        return SharedFactor(values, support, threshold, *found, finite=finite)
    gram, total = moments(values, keys)
    rows = selected_rows(values, keys, torch.float64).flatten(0, 1)
    flat = threshold.flatten()
    solved = (
        whiten_spectral(gram.flatten(0, 1), flat)
        if method == "eigh"
        else whiten_orthogonal(rows, flat)
    )
    factor = reorthogonalise(rows, solved.factor).view_as(gram)
    rank, bound = (part.view(shape) for part in solved[1:])
    finite = torch.ones_like(rank, dtype=torch.bool)
    return SharedFactor(values, support, threshold, factor, rank, bound, gram, total, finite)


def simplex_ranks(
    gram: Tensor,
    total: Tensor,
    tokens: Tensor,
    rank: Tensor,
    whitening: Tensor,
    ones: Tensor,
    outside: Tensor,
    threshold: Tensor,
) -> Tensor:
    """Decide the numerical rank of `[T, 1]`.

    It is one for the column of ones, and that of T less its mean, with the same absolute threshold
    as that of T. So it is `rank(T)` or `rank(T) + 1`, does not depend on the scale of the column,
    and does not take the rounding of nearly equal values for rank.

    Args:
        gram: `[..., D, D]` float64, `VᵀV`.
        total: `[..., D]` float64, `Vᵀ1`.
        tokens: `[...]`, number of keys n.
        rank: `[...]` int64, the rank of T.
        whitening: `[..., D, D]` float64 W with `W Wᵀ = (VᵀV)⁺`.
        ones: `[..., D]` float64, `(VᵀV)⁺ Vᵀ1`.
        outside: `[...]` float64, squared sine of the angle of 1 to the column space.
        threshold: `[...]` float64, relative to the largest singular value of T.

    Returns:
        `[...]` int64.
    """
    width, size = gram.shape[-1], tokens.clamp(min=1).double()
    # tr of the inverse of G − (Vᵀ1)(Vᵀ1)ᵀ / n, by Sherman and Morrison
    inverse = whitening.square().sum((-2, -1)) + ones.square().sum(-1) / (size * outside)
    bound = gram.diagonal(dim1=-2, dim2=-1).sum(-1) * inverse
    free = rank >= tokens
    certain = (rank == width) & (outside > 0) & provably_full(bound, threshold)
    result = torch.where(free, tokens, torch.full_like(tokens, width + 1))
    undecided = ~(free | certain) & gram.isfinite().flatten(-2).all(-1)
    if bool(undecided.any()):
        gram, total, size = gram[undecided], total[undecided], size[undecided]
        centred = gram - total[:, :, None] * total[:, None] / size[:, None, None]
        largest = torch.linalg.eigvalsh(gram)[:, -1:]
        contrasts = counts(torch.linalg.eigvalsh(centred), largest, threshold[undecided, None]).sum(
            -1
        )
        known = rank[undecided]  # of T: the two differ by one at most
        found = torch.minimum(torch.maximum(contrasts + 1, known), known + 1)
        result[undecided] = torch.minimum(found, tokens[undecided])
    return result


def kept_spectrum(squares: Tensor, rank: Tensor) -> Tensor:
    """Singular values in falling order, zero beyond the rank, from ascending squares."""
    sigma = squares.clamp(min=0).sqrt().flip(-1)
    return sigma * (torch.arange(sigma.shape[-1], device=sigma.device) < rank[..., None])


def condition_of_rows(values: Tensor, keys: Tensor, root: Tensor | None, heads: int) -> Tensor:
    """Return the condition number of T where its rows are independent, from `T Tᵀ`.

    Args:
        values: `[B, Hv, K, D]`.
        keys: `[B, 1 or Hv, K]` bool, the real keys, at most D of them.
        root: `[H, D, D]` float64 X with `X Xᵀ = H Hᵀ`; None takes T = V.
        heads: H, a multiple of Hv.

    Returns:
        `[B, H]` float64, ≥ 1; NaN without keys.
    """
    keys = keys.expand(values.shape[:3])
    count = int(keys.sum(-1).amax())
    ratios = values.new_full((len(values), heads), torch.nan, dtype=torch.float64)
    for some, _ in blocks_of_rows(values):
        own = keys[some]
        every = torch.arange(own[..., 0].numel(), device=values.device)
        rows, real = real_rows(values[some], own, every, count)
        rows = repeated(rows.unflatten(0, own.shape[:2]), heads)
        rows = rows if root is None else rows @ root
        squares = torch.linalg.eigvalsh(rows @ rows.mT)
        rank = repeated(real.sum(-1).view(own.shape[:2]), heads)
        found = condition(squares, rank)
        doubtful = ~(found.square() < SAFE_BOUND) & (rank > 0)
        if bool(doubtful.any()):  # a Gram matrix squares the condition number
            squares[doubtful] = torch.linalg.svdvals(rows[doubtful]).square().flip(-1)[:, -count:]
            found = condition(squares, rank)
        ratios[some] = found
    return ratios


def condition(squares: Tensor, rank: Tensor) -> Tensor:
    """Largest over smallest singular value that counts, from ascending squares; NaN for none."""
    sigma = squares.clamp(min=0).sqrt().flip(-1)
    last = (rank - 1).clamp(min=0)[..., None]
    ratio = sigma[..., 0] / sigma.gather(-1, last)[..., 0]
    return torch.where(rank > 0, ratio, torch.nan)


def _like(flags: Tensor, tensor: Tensor) -> Tensor:
    """Flags `[B, H]` with as many dimensions as a tensor `[B, H, …]`."""
    return flags[(...,) + (None,) * (tensor.dim() - flags.dim())]


def _require_full_rank(rank: Tensor, full: Tensor) -> None:
    deficient = (rank < full).nonzero()
    if deficient.numel():
        example, head = deficient[0].tolist()
        raise InputError(
            f'method="cholesky" needs full rank, but the values of batch index {example}, '
            f'head {head} have rank {int(rank[example, head])}. Use method="auto".'
        )
