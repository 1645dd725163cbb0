"""Statistics of attention rows in one streaming pass: the Triton kernel."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlens.kernels.backend import interpreting
from attnlens.kernels.returned import RowStatistics
from attnlens.kernels.torch_rows import MASKED, Rows

# With 8 warps these spill no registers to speak of on Hopper, in any precision, up to D = R = 128.
BLOCK_Q, BLOCK_K = 64, 32

# Logits below this are masked.
HIDDEN = tl.constexpr(MASKED / 2)


def row_statistics(rows: Rows) -> RowStatistics:
    """Return the statistics of one kernel launch; see `attnlens.kernels.row_statistics`."""
    query, key, basis, mask, bias, causal, scaling = rows
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    rank = 0 if basis is None else basis.shape[3]
    statistics = query.new_empty((5, batch, heads, queries), dtype=torch.float32)
    coordinates = query.new_empty((batch, heads, queries, rank), dtype=torch.float32)
    shape = (batch, heads, queries, keys)
    # Absent tensors are passed as any tensor; the flags keep them from being read.
    mask_bytes = query if mask is None else mask.view(torch.uint8).expand(shape)
    bias_view = query if bias is None else bias.expand(shape)
    basis_view = key if basis is None else basis

    grid = (batch * heads, triton.cdiv(queries, BLOCK_Q))
    row_statistics_kernel[grid](
        query=query,
        key=key,
        basis=basis_view,
        mask=mask_bytes,
        bias=bias_view,
        statistics=statistics,
        coordinates=coordinates,
        **_strides("query", "head token dim", query),
        **_strides("key", "head token dim", key),
        **_strides("basis", "head token dim", basis_view),
        **_strides("mask", "head query key", mask_bytes),
        **_strides("bias", "head query key", bias_view),
        statistics_stride=batch * heads * queries,
        heads=heads,
        key_group=heads // key.shape[1],
        basis_group=heads // basis_view.shape[1],
        queries=queries,
        keys=keys,
        scaling=scaling,
        DIM=dim,
        RANK=rank,
        HAS_MASK=mask is not None,
        HAS_BIAS=bias is not None,
        CAUSAL=causal,
        NATIVE=_native_dot(query, key),
        BLOCK_D=_block(dim),
        BLOCK_R=_block(rank),
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        num_warps=8,
        num_stages=2,
    )
    return RowStatistics._make([*statistics, None if basis is None else coordinates])


def _strides(name: str, axes: str, tensor: Tensor) -> dict[str, int]:
    """Return a tensor's strides as keyword arguments ``{name}_batch``, ``{name}_{axis}``."""
    return {
        f"{name}_{axis}": stride
        for axis, stride in zip(("batch", *axes.split()), tensor.stride(), strict=True)
    }


def _block(width: int) -> int:
    """Return the columns of a tile: a power of two, 16 at least, as ``tl.dot`` needs."""
    return max(16, int(triton.next_power_of_2(width)))


def _native_dot(query: Tensor, key: Tensor) -> bool:
    """Return whether Q Kᵀ may multiply 16-bit inputs as they are: exact products, float32 sums."""
    if query.dtype != key.dtype or query.dtype not in {torch.float16, torch.bfloat16}:
        return False
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    return query.dtype == torch.float16 or not interpreting()


@triton.jit
def row_statistics_kernel(
    query,
    key,
    basis,
    mask,
    bias,
    statistics,
    coordinates,
    query_batch,
    query_head,
    query_token,
    query_dim,
    key_batch,
    key_head,
    key_token,
    key_dim,
    basis_batch,
    basis_head,
    basis_token,
    basis_dim,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    bias_batch,
    bias_head,
    bias_query,
    bias_key,
    statistics_stride,
    heads,
    key_group,
    basis_group,
    queries,
    keys,
    scaling,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Online softmax over the keys for BLOCK_Q rows of one head.

    Beside the running maximum m and Σ e, with e = exp(s − m), it carries Σ (e − mean e)²,
    Σ e (s − m) and Σ e u; each is rescaled when m grows.
    """
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real_row = row < queries
    dims, ranks = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // key_group) * key_head
    basis += batch * basis_batch + (head // basis_group) * basis_head
    mask += batch * mask_batch + head * mask_head
    bias += batch * bias_batch + head * bias_head

    rows = tl.load(
        query + row[:, None].to(tl.int64) * query_token + dims[None, :] * query_dim,
        mask=real_row[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    if not NATIVE:
        rows = rows.to(tl.float32)
    maximum = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    size = tl.zeros((BLOCK_Q,), tl.float32)
    centred = tl.zeros((BLOCK_Q,), tl.float32)
    moment = tl.zeros((BLOCK_Q,), tl.float32)
    context = tl.zeros((BLOCK_Q, BLOCK_R), tl.float32)

    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(1) + 1) * BLOCK_Q)
    for start in range(0, end, BLOCK_K):
        token = start + tl.arange(0, BLOCK_K)
        real_token = token < keys
        columns = tl.load(
            key + token[:, None].to(tl.int64) * key_token + dims[None, :] * key_dim,
            mask=real_token[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        if not NATIVE:
            columns = columns.to(tl.float32)
        score = tl.dot(rows, tl.trans(columns), input_precision="tf32x3") * scaling
        seen = real_row[:, None] & real_token[None, :]
        if HAS_BIAS:
            score += tl.load(
                bias + row[:, None].to(tl.int64) * bias_query + token[None, :] * bias_key,
                mask=seen,
                other=0.0,
            ).to(tl.float32)
        if HAS_MASK:
            seen &= (
                tl.load(
                    mask + row[:, None].to(tl.int64) * mask_query + token[None, :] * mask_key,
                    mask=seen,
                    other=0,
                )
                != 0
            )
        if CAUSAL:
            seen &= token[None, :] <= row[:, None]
        seen &= (score > HIDDEN) | (score != score)
        score = tl.where(seen, score, float("-inf"))

        larger = tl.maximum(maximum, tl.max(score, axis=1))
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        step = tl.where(maximum == float("-inf"), 0.0, maximum - pivot)
        decay = tl.where(maximum == float("-inf"), 0.0, tl.exp(step))
        weight = tl.exp(score - pivot[:, None])
        moment = decay * (moment + step * total)
        moment += tl.sum(weight * tl.where(seen, score - pivot[:, None], 0.0), axis=1)
        total *= decay
        # about the mean, so that nearly uniform rows keep their differences
        own_size = tl.sum(seen.to(tl.float32), axis=1)
        own_total = tl.sum(weight, axis=1)
        own_mean = own_total / tl.maximum(own_size, 1.0)
        spread = tl.where(seen, weight - own_mean[:, None], 0.0)
        apart = total * own_size - own_total * size
        apart = apart * apart / tl.maximum(size * own_size * (size + own_size), 1.0)
        centred = centred * decay * decay + tl.sum(spread * spread, axis=1) + apart
        total += own_total
        size += own_size
        maximum = larger
        if RANK > 0:
            vectors = tl.load(
                basis + token[:, None].to(tl.int64) * basis_token + ranks[None, :] * basis_dim,
                mask=real_token[:, None] & (ranks < RANK)[None, :],
                other=0.0,
            ).to(tl.float32)
            used = tl.max(seen.to(tl.int32), axis=0)  # an unseen key's basis may hold anything
            vectors = tl.where(used[:, None] > 0, vectors, 0.0)
            context = context * decay[:, None] + tl.dot(weight, vectors, input_precision="tf32x3")

    empty = total <= 0.0
    divisor = tl.where(empty, 1.0, total)
    log_total = tl.log(divisor)
    out = statistics + program * queries + row
    tl.store(out, tl.where(empty, float("-inf"), maximum + log_total), mask=real_row)
    out += statistics_stride
    tl.store(out, centred / (divisor * divisor), mask=real_row)
    out += statistics_stride
    tl.store(out, tl.maximum(log_total - moment / divisor, 0.0), mask=real_row)
    out += statistics_stride
    tl.store(out, tl.where(empty, 0.0, 1.0 / divisor), mask=real_row)
    out += statistics_stride
    tl.store(out, size, mask=real_row)
    if RANK > 0:
        tl.store(
            coordinates + (program * queries + row)[:, None] * RANK + ranks[None, :],
            context / divisor[:, None],
            mask=real_row[:, None] & (ranks < RANK)[None, :],
        )
