"""Eigenvalues and eigenvectors of a symmetric tile on the chip."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def jacobi(gram, shift, least, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SWEEPS: tl.constexpr):
    """Return eigenvalues (−1 for padding) and eigenvectors of G by one-sided Jacobi rotations.

    The columns of the Cholesky factor of G + shift are rotated in disjoint pairs until all are
    orthogonal; each is then an eigenvector times the root of its eigenvalue. Pivoting leaves the
    columns so nearly orthogonal that half the sweeps do. Columns whose pivot is not above
    `least` are zero, eigenvectors included.
    """
    index = tl.arange(0, BLOCK)
    row, column = index[:, None], index[None, :]
    columns = cholesky(gram + tl.where((row == column) & (row < WIDTH), shift, 0.0), least, BLOCK)
    sweep = 0
    cosine = tl.full((), 1.0, tl.float64)  # the largest between two columns, squared
    while (sweep < SWEEPS) & (cosine > 1e-20):  # convergence is quadratic: the next were 1e-40
        cosine = tl.full((), 0.0, tl.float64)
        for turn in range(BLOCK - 1):
            columns, turned = rotate(columns, turn, BLOCK)
            cosine = tl.maximum(cosine, turned)
        sweep += 1
    square = tl.sum(columns * columns, axis=0)
    eigenvalue = tl.where(index < WIDTH, tl.maximum(square - shift, 0.0), -1.0)
    return eigenvalue, columns / tl.sqrt(tl.where(square > 0.0, square, 1.0))[None, :]


@triton.jit
def cholesky(gram, least, BLOCK: tl.constexpr):
    """Return columns c with G = Σ c cᵀ, each where its pivot was, the others zero."""
    index = tl.arange(0, BLOCK)
    row, column = index[:, None], index[None, :]
    waiting = index < BLOCK
    residual = tl.sum(tl.where(row == column, gram, 0.0), axis=0)
    pivot = tl.max(residual, axis=0)
    tile = gram
    while pivot > least:
        at = tl.argmax(tl.where(waiting, residual, -1.0), axis=0)
        root = tl.sqrt(pivot)
        down = tl.sum(tl.where(column == at, tile, 0.0), axis=1) / root
        down = tl.where(waiting, down, 0.0)
        across = tl.sum(tl.where(row == at, tile, 0.0), axis=0) / root
        waiting = waiting & (index != at)
        across = tl.where(waiting, across, 0.0)
        tile = tl.where(column == at, down[:, None], tile - down[:, None] * across[None, :])
        residual -= across * across
        pivot = tl.max(tl.where(waiting, residual, -1.0), axis=0)
    return tl.where(waiting[None, :], 0.0, tile)


@triton.jit
def rotate(columns, turn, BLOCK: tl.constexpr):
    """Return the columns, rotated against their partners, and the largest cosine² before.

    Partners meet as in a tournament: in the BLOCK − 1 turns of a sweep every pair meets once.
    """
    index = tl.arange(0, BLOCK)
    partner = (2 * turn + BLOCK - 1 - index) % (BLOCK - 1)
    partner = tl.where(partner == index, BLOCK - 1, partner)
    partner = tl.where(index == BLOCK - 1, turn, partner)
    other = tl.gather(columns, tl.broadcast_to(partner[None, :], (BLOCK, BLOCK)), axis=1)
    square = tl.sum(columns * columns, axis=0)
    other_square = tl.gather(square, partner, axis=0)
    inner = tl.sum(columns * other, axis=0)
    first = index < partner
    apart = inner * inner > 1e-32 * square * other_square  # not orthogonal to rounding yet
    difference = tl.where(first, other_square - square, square - other_square)
    zeta = difference / tl.where(apart, 2.0 * inner, 1.0)
    tangent = tl.where(zeta < 0.0, -1.0, 1.0) / (tl.abs(zeta) + tl.sqrt(1.0 + zeta * zeta))
    tangent = tl.where(apart, tangent, 0.0)
    cos = 1.0 / tl.sqrt(1.0 + tangent * tangent)
    sin = tl.where(first, -tangent, tangent) * cos
    cosine = tl.where(apart, inner * inner / tl.where(apart, square * other_square, 1.0), 0.0)
    return columns * cos[None, :] + other * sin[None, :], tl.max(cosine, axis=0)


@triton.jit
def descending_place(eigenvalue, BLOCK: tl.constexpr):
    """Return the place of each eigenvalue in descending order, ties by index."""
    index = tl.arange(0, BLOCK)
    ahead = eigenvalue[:, None] > eigenvalue[None, :]
    tied = eigenvalue[:, None] == eigenvalue[None, :]
    return tl.sum((ahead | (tied & (index[:, None] < index[None, :]))).to(tl.int32), axis=0)
