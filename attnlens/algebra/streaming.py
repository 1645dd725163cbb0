"""Attention rows without an attention matrix: their sums, and outputs recomputed from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlens.algebra.closed_forms import RowSums, row_sums
from attnlens.algebra.nullspace import ValueBasis, shared_basis
from attnlens.algebra.rowwise import RowwiseBasis
from attnlens.algebra.values import working_dtype
from attnlens.capture import Capture
from attnlens.kernels import gram_factor, resolve, row_statistics


def streamed_rows(capture: Capture) -> RowSums:
    """Sum every attention row without building the matrix.

    Args:
        capture: the call.

    Returns:
        The sums, each `[B, H, Q]` float64.
    """
    if capture.streams:
        return _stream_rows(capture)[0]
    return _joined(row_sums(attention) for _, attention in capture.attention_chunks())


def _stream_rows(capture: Capture, basis: Tensor | None = None) -> tuple[RowSums, Tensor]:
    """Row sums and coordinates in a basis from queries and keys, in one pass."""
    query, key, scaling = capture.query, capture.grouped_key, capture.scaling
    assert query is not None and key is not None and scaling is not None
    masking = capture.masking
    rows = row_statistics(
        query,
        key,
        basis,
        mask=masking.mask,
        bias=masking.bias,
        causal=masking.causal,
        scaling=scaling,
        backend=capture.backend,
    )
    total = torch.isfinite(rows.logsumexp).double()  # a row with keys sums to one
    sums = RowSums(total, rows.square_sum.double(), rows.entropy.double())
    return sums, total if rows.coordinates is None else rows.coordinates


class Recomputed(NamedTuple):
    """Attention outputs without the dropout and the rounding of the model's own.

    Attributes:
        context: O, `[B, H, Q, E]` float64, in the space of
            :meth:`~attnlens.Capture.prepared_values`.
        rows: sums of attention rows, or None.
        whitening: factor `[B, H, E, R]` float64 and rank `[B, H]` of those values, or None.
    """

    context: Tensor
    rows: RowSums | None
    whitening: tuple[Tensor, Tensor] | None = None


def recomputed_context(capture: Capture, sums: bool, rtol: float) -> Recomputed:
    """Recompute `O = A V` without the dropout and the rounding of the model's own.

    The basis U of the values is perfectly conditioned, so that float32 is enough for coordinates
    `C = A U`; the rest, `O = C (UᵀV)`, is small and done in float64.

    Args:
        capture: the call.
        sums: whether row sums are wanted too.
        rtol: relative threshold for the numerical rank.

    Returns:
        The outputs, with row sums if they are wanted, and with a factorisation of the values if
        all rows of an example see the same keys.
    """
    if not (capture.streams and capture.support.shared):
        return _blockwise(capture, sums)
    # examples that are not finite are left out later; a factorisation must not meet them
    values = torch.nan_to_num(capture.prepared_values(), 0.0, 0.0, 0.0)
    found = shared_basis(values, capture.support, rtol, like=capture.value)
    basis = found.basis
    rows = None
    if sums or capture.bias is not None:
        rows, coordinates = _stream_rows(capture, basis)
    else:
        query, key = (t.to(basis.dtype) for t in (capture.query, capture.key) if t is not None)
        coordinates = scaled_dot_product_attention(
            query,
            key,
            basis,
            attn_mask=capture.masking.mask,
            is_causal=capture.masking.causal,
            scale=capture.scaling,
        )
    context = coordinates.double() @ (basis.double().mT @ values)
    return Recomputed(context, rows if sums else None, (found.whitening, found.rank))


def streamed_product(capture: Capture, columns: Tensor) -> Tensor:
    """Multiply A, before dropout, by columns that all heads share, without building the matrix.

    Args:
        capture: the call.
        columns: `[B, K, N]`, zero at masked keys.

    Returns:
        `A M`, `[B, H, Q, N]` float32 or float64.
    """
    if not capture.streams:
        blocks = (a @ columns[:, None].to(a.dtype) for _, a in capture.attention_chunks())
        return torch.cat(list(blocks), -2)
    assert capture.query is not None and capture.key is not None
    dtype = working_dtype(capture.query)
    query, key = capture.query.to(dtype), capture.key.to(dtype)
    # fused kernels want values as wide as keys; others would write the matrix
    parts = columns.to(dtype)[:, None].split(query.shape[-1], -1)
    return torch.cat([_attend(capture, query, key, part) for part in parts], -1)


def _attend(capture: Capture, query: Tensor, key: Tensor, columns: Tensor) -> Tensor:
    """`A M` for M `[B, 1, K, N]` with N at most D, `[B, H, Q, N]`."""
    wide = torch.nn.functional.pad(columns, (0, query.shape[-1] - columns.shape[-1]))
    if capture.bias is not None:
        product = _stream_rows(capture, wide)[1]
    else:
        product = scaled_dot_product_attention(
            query,
            key,
            wide.expand(-1, key.shape[1], -1, -1),
            attn_mask=capture.masking.mask,
            is_causal=capture.masking.causal,
            scale=capture.scaling,
        )
    return product[..., : columns.shape[-1]]


def finite_basis(capture: Capture, rtol: float) -> tuple[ValueBasis | RowwiseBasis, Tensor]:
    """Find a basis of the values of a call, some of which may not be finite.

    Args:
        capture: the call.
        rtol: relative threshold for the numerical rank.

    Returns:
        The basis, with zeros in place of what is not finite, and which examples and heads are
        finite, `[B, H]`.
    """
    values = capture.prepared_values()
    finite = torch.isfinite(values).flatten(2).all(-1)
    values = torch.nan_to_num(values, 0.0, 0.0, 0.0)  # a factorisation must not meet them
    if capture.support.shared:
        return shared_basis(values, capture.support, rtol, like=capture.value), finite
    dtype = working_dtype(capture.value)
    return RowwiseBasis(values, capture.support, rtol, False, dtype), finite


def kernel_whitening(capture: Capture, rtol: float) -> tuple[Tensor, Tensor] | None:
    """Factor the values of a call by the fused kernel, where Triton serves it.

    The kernel never waits for the device; the factorisation of :mod:`attnlens.functional` does,
    to tell the heads that need more than Cholesky.

    Args:
        capture: the call.
        rtol: relative threshold for the numerical rank.

    Returns:
        The whitening factor `[B, Hv, D, D]` float64 and the rank `[B, Hv]`, or None where
        PyTorch serves the call.
    """
    value, support = capture.grouped_value, capture.support
    grouped = support.keys.shape[1] in (1, value.shape[1])
    if capture.value_factor is not None or not support.shared or not grouped:
        return None
    if resolve(capture.backend, value.device, dtype=value.dtype, width=value.shape[-1]) == "torch":
        return None
    found = gram_factor(value, support.keys, rtol=rtol, extremes=False, backend=capture.backend)
    return found.whitening.double(), found.rank.long()


def _blockwise(capture: Capture, sums: bool) -> Recomputed:
    """The same for any attention, from blocks of A."""
    values = capture.prepared_values()
    blocks, context = [], []
    for _, attention in capture.attention_chunks():
        if sums:
            blocks.append(row_sums(attention))
        context.append(attention.double() @ values)
    return Recomputed(torch.cat(context, -2), _joined(blocks) if sums else None)


def _joined(blocks: Iterable[RowSums]) -> RowSums:
    return RowSums(*(torch.cat(parts, -1) for parts in zip(*blocks, strict=True)))
