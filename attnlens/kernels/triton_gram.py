"""Gram matrices of the values, whitened or diagonalised on the chip: the Triton kernels.

One program holds one head: its Gram matrix is a single tile of float64 registers, at most
128 × 128, and everything is done in place on that tile. Float64 costs less here than it looks
(the sums run on tensor cores where the card has them for float64); a float32 Gram matrix would
misjudge ranks and need a second orthogonalisation pass for every head, not for a few.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlens.kernels import torch_gram
from attnlens.kernels.returned import GramFactor, GramSVD
from attnlens.kernels.triton_jacobi import descending_place, jacobi

EPSILON64 = tl.constexpr(torch.finfo(torch.float64).eps)
SAFE_BOUND = tl.constexpr(torch_gram.SAFE_BOUND)

# Cyclic Jacobi converges quadratically: 6 to 12 sweeps for up to 128 columns.
MOST_SWEEPS = 24


def gram_factor(value: Tensor, keys: Tensor, threshold: Tensor) -> GramFactor:
    """Return the factors of one kernel launch; see `attnlens.kernels.gram_factor`."""
    batch, heads, _, dim = value.shape
    gram, whitening = value.new_empty((2, batch, heads, dim, dim), dtype=torch.float64)
    total = value.new_empty((batch, heads, dim), dtype=torch.float64)
    bound = value.new_empty((batch, heads), dtype=torch.float64)
    rank = value.new_empty((batch, heads), dtype=torch.int64)
    threshold = threshold.expand(batch, heads).contiguous()
    _launch(value, keys, whitening, total, gram, rank, bound, threshold)
    return GramFactor(whitening, rank, bound, gram, total)


def gram_svd(value: Tensor, keys: Tensor) -> GramSVD:
    """Return the singular pairs of one kernel launch; see `attnlens.kernels.gram_svd`."""
    batch, heads, _, dim = value.shape
    values = value.new_empty((batch, heads, dim), dtype=torch.float64)
    vectors = value.new_empty((batch, heads, dim, dim), dtype=torch.float64)
    _launch(value, keys, vectors, values)
    return GramSVD(values, vectors)


def _launch(value: Tensor, keys: Tensor, matrix: Tensor, vector: Tensor, *factor: Tensor) -> None:
    """Run the kernel on every head; without the outputs of a factor it finds singular pairs."""
    batch, heads, tokens, dim = value.shape
    keys = keys.expand(value.shape[:3]).view(torch.uint8)
    # 32 float64 elements of the tile per thread at most
    block = max(16, triton.next_power_of_2(dim))
    gram_kernel[(batch * heads,)](
        value,
        keys,
        matrix,
        vector,
        *(factor or [vector] * 4),  # absent tensors are passed as any tensor
        *value.stride(),
        *keys.stride(),
        heads,
        tokens,
        SPECTRUM=not factor,
        DIM=dim,
        BLOCK=block,
        BLOCK_TOKENS=32,
        SWEEPS=MOST_SWEEPS,
        num_warps={16: 2, 32: 4, 64: 8}.get(block, 16),
    )


@triton.jit
def gram_kernel(
    value,
    keys,
    matrix_out,
    vector_out,
    gram_out,
    rank_out,
    bound_out,
    threshold,
    value_batch,
    value_head,
    value_token,
    value_dim,
    keys_batch,
    keys_head,
    keys_token,
    heads,
    tokens,
    SPECTRUM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SWEEPS: tl.constexpr,
):
    """Gram matrix of one head, and its right singular vectors and values (SPECTRUM).

    Or its whitening factor and the sum of the values, with rank and condition bound.
    """
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    value += batch * value_batch + head * value_head
    keys += batch * keys_batch + head * keys_head
    gram, total = stream_gram(
        value,
        keys,
        None,
        value_token,
        value_dim,
        keys_token,
        tokens,
        DIM,
        False,
        BLOCK,
        BLOCK_TOKENS,
    )
    index = tl.arange(0, BLOCK)
    row, column = index[:, None], index[None, :]
    inside = (row < DIM) & (column < DIM)
    tile = program * DIM * DIM + row * DIM
    trace = tl.sum(tl.sum(tl.where(row == column, gram, 0.0), axis=1), axis=0)
    spoilt = trace - trace  # NaN if a value is not finite
    if SPECTRUM:
        # As large as the rounding errors in G: the null space then has eigenvectors too.
        shift = tl.where(trace > 0.0, trace * (DIM * EPSILON64), 1.0)
        eigenvalue, vectors = jacobi(gram, shift, 0.0 * trace, DIM, BLOCK, SWEEPS)
        place = descending_place(eigenvalue, BLOCK)
        tl.store(
            vector_out + program * DIM + place,
            tl.sqrt(tl.maximum(eigenvalue, 0.0)) + spoilt,
            mask=index < DIM,
        )
        tl.store(
            matrix_out + tile + place[None, :],
            vectors + spoilt,
            mask=inside,
        )
    else:
        tl.store(gram_out + tile + column, gram, mask=inside)
        tl.store(vector_out + program * DIM + index, total, mask=index < DIM)

        tolerance = tl.load(threshold + program)
        cutoff = tolerance * tolerance  # of λ / λ_1

        whitening, rank = eliminate(gram, cutoff, DIM, BLOCK)
        # ‖V‖_F ‖W‖_F bounds σ_1 / σ_E from above: below 1 / rtol the rank is full by definition.
        bound = trace * tl.sum(tl.sum(whitening * whitening, axis=1), axis=0)
        certain = (bound < SAFE_BOUND) & (bound * cutoff < 1.0)
        if (rank == DIM) & certain:
            tl.store(matrix_out + tile + column, whitening + spoilt, mask=inside)
        else:
            bound = tl.full((), float("inf"), tl.float64)
            noise = trace * (DIM * EPSILON64)  # of the entries of G
            eigenvalue, vectors = jacobi(gram, 0.0 * trace, noise, DIM, BLOCK, SWEEPS)
            largest = tl.maximum(tl.max(eigenvalue, axis=0), 0.0)
            kept = eigenvalue > largest * cutoff
            rank = tl.sum(kept.to(tl.int32), axis=0)
            scale = tl.where(kept, 1.0 / tl.sqrt(tl.where(kept, eigenvalue, 1.0)), 0.0)
            whitening = vectors * scale[None, :]
            # A second pass over the values: eps · cond² in UᵀU becomes eps · cond.
            gram, _ = stream_gram(
                value,
                keys,
                whitening,
                value_token,
                value_dim,
                keys_token,
                tokens,
                DIM,
                True,
                BLOCK,
                BLOCK_TOKENS,
            )
            unused = tl.where((row == column) & (kept[None, :] == 0), 1.0, 0.0)
            correction, _ = eliminate(gram + unused, 0.0 * trace, DIM, BLOCK)
            # Through memory: two tiles of 128 × 128 float64 do not fit in shared memory together.
            tl.store(matrix_out + tile + column, whitening, mask=inside)
            tl.debug_barrier()
            place = descending_place(eigenvalue, BLOCK)
            for start in range(0, DIM, BLOCK_TOKENS):
                part = start + tl.arange(0, BLOCK_TOKENS)[:, None]
                rows = matrix_out + program * DIM * DIM + part * DIM
                within = (part < DIM) & (column < DIM)
                product = tl.dot(tl.load(rows + column, mask=within, other=0.0), correction)
                tl.debug_barrier()
                tl.store(rows + place[None, :], product + spoilt, mask=within)
        tl.store(rank_out + program, rank.to(tl.int64))
        tl.store(bound_out + program, bound + spoilt)


@triton.jit
def stream_gram(
    value,
    keys,
    whitening,
    value_token,
    value_dim,
    keys_token,
    tokens,
    DIM: tl.constexpr,
    WHITEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Return Σ v vᵀ and Σ v over the real keys of one head.

    With WHITEN the rows are those of the basis.
    """
    dims = tl.arange(0, BLOCK)
    gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, tokens, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        real = tl.load(keys + token * keys_token, mask=token < tokens, other=0) != 0
        rows = tl.load(
            value + token[:, None] * value_token + dims[None, :] * value_dim,
            mask=real[:, None] & (dims < DIM)[None, :],
            other=0.0,
        ).to(tl.float64)
        if WHITEN:
            rows = tl.dot(rows, whitening, out_dtype=tl.float64)
        total += tl.sum(rows, axis=0)
        gram += tl.dot(tl.trans(rows), rows, out_dtype=tl.float64)
    return gram, total


@triton.jit
def eliminate(gram, cutoff, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the whitening factor L⁻ᵀ and the rank by diagonally pivoted Cholesky, in place.

    A column waits until it is the pivot. Its rows hold the residual Gram matrix where the row
    waits too, and elsewhere the coefficients z of the residual vector v_j + Σ z_i v_i; the two
    parts never overlap, so one tile does. The pivot's coefficients over √pivot are its column
    of the whitening factor. Stops at a pivot not above the cutoff; the factor is then unfinished.
    """
    index = tl.arange(0, BLOCK)
    row, column = index[:, None], index[None, :]
    waiting = index < DIM
    residual = tl.sum(tl.where(row == column, gram, 0.0), axis=0)
    pivot = tl.max(residual, axis=0)
    least = pivot * cutoff
    rank = 0
    tile = gram
    while (rank < DIM) & (pivot > least):
        at = tl.argmax(tl.where(waiting, residual, -1.0), axis=0)
        waiting = waiting & (index != at)
        root = tl.sqrt(pivot)
        down = tl.sum(tl.where(column == at, tile, 0.0), axis=1) / root
        across = tl.sum(tl.where(row == at, tile, 0.0), axis=0) / root
        across = tl.where(waiting, across, 0.0)
        finished = tl.where(index == at, 1.0 / root, tl.where(waiting, 0.0, down))
        tile = tl.where(row == at, -across[None, :] / root, tile - down[:, None] * across[None, :])
        tile = tl.where(column == at, finished[:, None], tile)
        residual -= across * across
        pivot = tl.max(tl.where(waiting, residual, -1.0), axis=0)
        rank += 1
    return tile, rank
