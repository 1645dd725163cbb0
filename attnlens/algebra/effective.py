"""Null-space effective attention: the part of attention that reaches the output.

Brunner et al., "On Identifiability in Transformers", ICLR 2020 (arXiv 1908.04211), section 3.
With `T = V H`, the rows of A may move in the left null space of T without changing `A T`;
effective attention `A⊥ = A − Proj_{LN(T)} A` is A with that freedom removed. Masks are part of
the definition: a row is projected inside the keys it may attend to.

No `n × n` singular matrix is built. `G = Σ v vᵀ` is accumulated in float64 and factored to W with
`W Wᵀ = G⁺`; `U = V W` has orthonormal columns and `A⊥ = (A U) Uᵀ`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.algebra.factors import METHODS, Method, ValueBasis, shared_factor
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.supports import Support, support_of
from attnlens.algebra.values import (
    reach_of,
    require_finite,
    require_finite_reach,
    require_squares,
    working_dtype,
)
from attnlens.errors import InputError
from attnlens.kernels.ranks import require_rtol
from attnlens.kernels.torch_gram import selected_rows


def value_basis(
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    simplex: bool = False,
    rtol: float | None = None,
    *,
    method: Method = "auto",
    causal: bool = False,
) -> ValueBasis | RowFactor:
    """Find an orthonormal basis of the column space of T, per example and head.

    Args:
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        mask: bool, `[B, K]` or broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection. It enters only where its
            rank is below D; otherwise `LN(V H) = LN(V)`.
        simplex: use `[T, 1]` instead of T, so that projected rows still sum to one.
        rtol: a singular value counts when it exceeds `rtol` times the largest, in `[1e-7, 1)`; by
            default `max(n, D) · eps(float32)`, n the number of real keys.
        method: `"auto"` (Cholesky, an orthogonal factorisation where needed), `"cholesky"` (an
            error where a head is rank-deficient), `"eigh"`, or `"svd"` (a singular value
            decomposition of the values themselves, as in the paper).
        causal: row `i` sees no key after `i`, in addition to the mask.

    Returns:
        A :class:`ValueBasis` where every row of an example has the same support, else a
        :class:`~attnlens.algebra.rowwise.RowFactor`.

    Raises:
        InputError: on a wrong shape, dtype, threshold or method.
        NonFiniteError: if a real value row holds NaN or Inf, or numbers whose squares overflow,
            naming example and head.

    References:
        Brunner et al., ICLR 2020, section 3.

    Examples:
        >>> value = torch.eye(3).repeat(2, 1)[None, None]  # six tokens, three of them distinct
        >>> value_basis(value).nullity
        tensor([[3]])
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
        simplex: keep the row sums (`LN(`[T, 1]`)` instead of `LN(T)`).
        rtol: relative threshold for the numerical rank, see :func:`value_basis`.
        method: see :func:`value_basis`.
        causal: row `i` sees no key after `i`, in addition to the mask.

    Returns:
        `[B, H, Q, K]` with `A⊥ T = A T`, zero outside the mask; float64 if an input is float64,
        else float32.

    Raises:
        InputError: on a wrong shape, dtype, threshold or method.
        NonFiniteError: if a real entry holds NaN or Inf, or values whose squares overflow, naming
            example and head.

    References:
        Brunner et al., ICLR 2020, section 3.

    Examples:
        >>> attention = torch.tensor([[[[0.5, 0.3, 0.2]]]])
        >>> value = torch.tensor([[[[1.0], [1.0], [0.0]]]])  # the first two values are equal
        >>> effective_attention(attention, value)
        tensor([[[[0.4000, 0.4000, 0.0000]]]])
    """
    batch, heads, keys, _ = _checked_value(value, projection, method)
    shape = attention.shape
    fits = attention.dim() == 4 and (shape[0], shape[1], shape[3]) == (batch, heads, keys)
    if not fits or not attention.is_floating_point():
        raise InputError(
            f"attention must be floating-point [B, H, Q, K] = [{batch}, {heads}, Q, {keys}] to go "
            f"with value {list(value.shape)}. Got {list(shape)}, {attention.dtype}."
        )
    require_finite(attention, "attention")
    working = torch.promote_types(working_dtype(attention), working_dtype(value))
    support = support_of(mask, batch, shape[2], keys, causal=causal, device=value.device)
    basis = _basis(value.to(working), support, projection, simplex, rtol, method)
    return basis.project(attention.to(working))


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
) -> ValueBasis | RowFactor:
    """Find the basis of checked values within a support."""
    heads = value.shape[1]
    require_rtol(rtol)
    if support.keys.shape[1] not in (1, heads):
        raise InputError(
            f"The mask must have one head or {heads}, to go with value {list(value.shape)}. "
            f"Got {support.keys.shape[1]}."
        )
    dtype, values = working_dtype(value), value
    reach = None if projection is None else require_finite_reach(reach_of(projection))
    if reach is not None and reach.factor is not None:
        values = value.double() @ reach.factor.to(value.device)
    require_squares(values, support.keys)
    if not support.shared:
        if method not in ("auto", "eigh"):
            raise InputError(
                f'A mask that differs by row is served by method="auto". Got method="{method}".'
            )
        values = selected_rows(values, support.keys, torch.float64)
        return RowFactor(values, support, heads, dtype, rtol, simplex)
    factor = shared_factor(values, support, rtol, method=method)
    return factor.basis(simplex=simplex).for_heads(heads, dtype)
