"""Identifiability: can another attention matrix give the same head output?

Two families of alternatives are counted. Among all row-stochastic matrices, A' gives the output of
A exactly when the rows of A' − A lie in the left null space of `[T, 1]`. Among the matrices that a
head of query width R can produce, A' = softmax(Q'K'ᵀ·s), the logits must also have rank at most R
modulo a constant per row; the second family is a part of the first.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnlens.algebra.factors import SharedFactor, condition
from attnlens.algebra.problem import Problem, plain_problem
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.values import repeated
from attnlens.errors import InputError
from attnlens.kernels.ranks import rank_threshold
from attnlens.results import Result
from attnlens.saving import storable


def simplex_dimension(
    tokens: int | Tensor, rank_with_ones: int | Tensor, *, queries: int | Tensor | None = None
) -> Tensor:
    """Count the dimensions of the row-stochastic matrices A' with A'T = AT.

    Each of the `queries` rows may move in the left null space of `[T, 1]`, for A > 0.

    Args:
        tokens: number of keys n that a row may attend to.
        rank_with_ones: rank([T, 1]), generically min(n, D + 1).
        queries: number of rows; n unless given.

    Returns:
        `queries · (n − rank([T, 1]))` as an int64 tensor, at least 0.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1.

    Examples:
        >>> simplex_dimension(torch.tensor([33, 34, 40]), 33)  # D = 32: from 34 tokens on
        tensor([  0,  34, 280])
    """
    keys, rank = torch.as_tensor(tokens), torch.as_tensor(rank_with_ones)
    rows = keys if queries is None else torch.as_tensor(queries)
    return rows * (keys - rank).clamp_min(0)


def softmax_dimension(
    tokens: int | Tensor,
    query_width: int | Tensor,
    value_width: int | Tensor,
    *,
    queries: int | Tensor | None = None,
) -> Tensor:
    """Count the dimensions of the matrices softmax(Q'K'ᵀ·s) with the same head output as A.

    Logits modulo a constant per row are the matrices with `queries` rows and n − 1 columns whose
    rank is at most r = min(R, n − 1, queries): a variety of dimension r·(queries + n − 1 − r). The
    output of a row imposes min(D, n − 1) conditions. At a generic point the conditions are
    independent while there are dimensions left, so the difference is the dimension of the family.
    For as many queries as keys and R < n it is 2nR − R² − R − n·min(D, n − 1), and for R = D = d it
    is d·(n − 1 − d): positive exactly when n > d + 1. For D ≥ 2R it is 0 at every n.

    Zero means that A is isolated among its alternatives: nothing near A gives the same output. It
    is unique if :func:`simplex_dimension` is zero too; otherwise the count cannot exclude another
    isolated solution far away.

    Args:
        tokens: number of keys n.
        query_width: width R of queries and keys.
        value_width: D, or rank([T, 1]) − 1 where the values are known.
        queries: number of rows; n unless given.

    Returns:
        The generic dimension as an int64 tensor, at least 0.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1, whose
        argument covers the row-stochastic family only.

    Examples:
        >>> softmax_dimension(torch.tensor([33, 34, 40]), 32, 32)
        tensor([  0,  32, 224])
        >>> softmax_dimension(40, 32, 64)  # values twice as wide as queries
        tensor(0)
    """
    keys, width = torch.as_tensor(tokens), torch.as_tensor(query_width)
    rows = keys if queries is None else torch.as_tensor(queries)
    contrasts = (keys - 1).clamp_min(0)
    rank = torch.minimum(torch.minimum(width, contrasts), rows)
    realisable = rank * (rows + contrasts - rank)
    conditions = rows * torch.minimum(torch.as_tensor(value_width), contrasts)
    return (realisable - conditions).clamp_min(0)


def softmax_threshold(query_width: int, value_width: int) -> int | None:
    """Return the longest self-attention at which a generic head is identifiable as a softmax.

    Args:
        query_width: width R of queries and keys.
        value_width: width D of the values.

    Returns:
        n* such that :func:`softmax_dimension` is positive exactly for n > n*: D + 1 when R ≥ D,
        ⌊R(R + 1) / (2R − D)⌋ when R < D < 2R, None (no such length) when D ≥ 2R.

    Examples:
        >>> softmax_threshold(64, 64), softmax_threshold(32, 48), softmax_threshold(32, 64)
        (65, 66, None)
    """
    if value_width >= 2 * query_width:
        return None
    if query_width >= value_width:
        return value_width + 1
    return query_width * (query_width + 1) // (2 * query_width - value_width)


@storable()
@dataclass(frozen=True, repr=False)
class Identifiability(Result):
    """Ranks and dimensions that decide whether attention can be read off a head's output.

    `tokens`, `rank`, `nullity`, `simplex_nullity`, `condition` and `rtol` are `[B, H]` when all
    rows see the same keys, and `[B, H, Q]` under a mask that varies by row, where rows that do not
    count have no tokens.

    Attributes:
        tokens: number n of keys attended to.
        rank: numerical rank of T.
        nullity: n − rank(T), the dimension of the left null space of T.
        simplex_nullity: n − rank([T, 1]), the freedom of one row that sums to one.
        condition: largest over smallest kept singular value of T, ≥ 1.
        simplex_dimension: dimension of the row-stochastic alternatives, `[B, H]`.
        softmax_dimension: generic dimension of the alternatives that a head of this width can
            produce, `[B, H]`; None where no count is known: under a mask that varies by row, or if
            logits are not products of queries and keys.
        query_width: width of queries and keys, or None.
        value_width: head dimension D.
        rtol: singular values up to `rtol` times the largest counted as zero.
    """

    tokens: Tensor
    rank: Tensor
    nullity: Tensor
    simplex_nullity: Tensor
    condition: Tensor
    simplex_dimension: Tensor
    softmax_dimension: Tensor | None
    query_width: int | None
    value_width: int
    rtol: Tensor

    axes: ClassVar = {"example": "", "head": ""}

    @property
    def identifiable_simplex(self) -> Tensor:
        """True where no other row-stochastic matrix gives the output, bool `[B, H]`."""
        return self.simplex_dimension == 0

    @property
    def identifiable_softmax(self) -> Tensor | None:
        """True where no head nearby gives the output, bool `[B, H]`; None if not known."""
        return None if self.softmax_dimension is None else self.softmax_dimension == 0

    def verdict(self, example: int, head: int) -> str:
        """Say in words whether one head's attention is identifiable, and why.

        Args:
            example: index into B.
            head: index into H.

        Returns:
            Two or three sentences.
        """
        return f"{self._simplex_verdict(example, head)} {self._softmax_verdict(example, head)}"

    def _simplex_verdict(self, example: int, head: int) -> str:
        lengths = self.tokens[example, head]
        n = f"{int(lengths.max())} tokens" + (" at most per row" if lengths.ndim else "")
        dimension = int(self.simplex_dimension[example, head])
        rule = f"generically possible only for n > D + 1 = {self.value_width + 1}"
        if dimension == 0:
            return f"{n}: no other row-stochastic matrix gives this output ({rule})."
        return (
            f"{n}: not identifiable among row-stochastic matrices, where the alternatives form a "
            f"family of dimension {dimension} ({rule})."
        )

    def _softmax_verdict(self, example: int, head: int) -> str:
        if self.query_width is None:
            return "What a head can produce was not counted: its logits are no plain products."
        width = f"a head of query width {self.query_width}"
        if self.softmax_dimension is None:
            return f"What {width} can produce was not counted: the mask varies by row."
        if self.simplex_dimension[example, head] == 0:
            return f"Nor can {width} produce one."
        dimension = int(self.softmax_dimension[example, head])
        longest = softmax_threshold(self.query_width, self.value_width)
        rule = (
            f"D = {self.value_width} ≥ 2 · {self.query_width}: so at every length"
            if longest is None
            else f"generically so for n ≤ {longest}"
        )
        if dimension == 0:
            return f"Yet {width} can produce none of them near this one: identifiable ({rule})."
        return f"Of these, {width} can produce a family of dimension {dimension}."


@torch.no_grad()
def identifiability(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    rtol: float | None = None,
    cross: bool = False,
) -> Identifiability:
    """Decide per example and head whether the output determines the attention.

    Only the widths of queries and keys matter, not their entries: the softmax count is generic. A
    bias added to the logits changes nothing as long as it is held fixed. With as many queries as
    keys, a row counts only if its own token is attended to by some row, so padding is left out on
    both sides.

    Args:
        query: `[B, H, Q, R]`.
        key: `[B, H, K, R]`, grouped heads repeated.
        value: `[B, H, K, D]`, as multiplied by the attention.
        mask: bool, True = may attend, broadcastable to `[B, H, Q, K]`.
        projection: `[H, D, M]` output projection per head; None takes T = V.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
            `max(n, D) · eps(float32)`.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        Ranks, dimensions and verdicts.

    Raises:
        InputError: if shapes, types or the threshold do not fit.
        NonFiniteError: if a value that is attended to, or the projection, is not finite.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1. The threshold
        for row-stochastic matrices is n > D + 1, one more than stated there.

    Examples:
        >>> query = torch.zeros(1, 1, 4, 2)
        >>> value = torch.tensor([[[[0.0], [1.0], [2.0], [4.0]]]])  # n = 4 > D + 1 = 2
        >>> identifiability(query, query, value).simplex_nullity
        tensor([[2]])
    """
    check_heads(query, key, value)
    posed = plain_problem(
        value, query.shape[2], mask=mask, projection=projection, rtol=rtol, cross=cross
    )
    return identifiability_of(posed, query.shape[-1])


def identifiability_of(problem: Problem, query_width: int | None) -> Identifiability:
    """Decide as :func:`identifiability` does.

    Args:
        problem: the call; queries and keys are not needed.
        query_width: width R of queries and keys; None if logits are not products of such, and
            only row-stochastic alternatives are to be counted.

    Returns:
        Ranks, dimensions and verdicts.
    """
    factor, heads = problem.factor, problem.heads
    softmax = None
    if isinstance(factor, SharedFactor):
        tokens, rank, simplex_rank, threshold = (
            repeated(part, heads)
            for part in (factor.tokens, factor.rank, factor.simplex_rank, factor.threshold)
        )
        spread = problem.condition
        queries = problem.active.sum(-1)
        dimension = simplex_dimension(tokens, simplex_rank, queries=queries)
        if query_width is not None:
            contrasts = (simplex_rank - 1).clamp(min=0)
            softmax = softmax_dimension(tokens, query_width, contrasts, queries=queries)
    else:
        tokens, rank, simplex_rank, spread = _of_rows(problem, factor)
        threshold = rank_threshold(tokens, problem.values.shape[-1], problem.rtol)
        dimension = simplex_dimension(tokens, simplex_rank, queries=1).sum(-1)
    return Identifiability(
        tokens=tokens,
        rank=rank,
        nullity=tokens - rank,
        simplex_nullity=tokens - simplex_rank,
        condition=spread,
        simplex_dimension=dimension,
        softmax_dimension=softmax,
        query_width=query_width,
        value_width=problem.values.shape[-1],
        rtol=threshold,
    )


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse tensors that are not one attention call with repeated key and value heads.

    Args:
        query: `[B, H, Q, R]`.
        key: `[B, H, K, R]`.
        value: `[B, H, K, D]`.

    Raises:
        InputError: if the shapes do not fit together.
    """
    shapes = [list(tensor.shape) for tensor in (query, key, value)]
    fits = (
        all(len(shape) == 4 for shape in shapes)
        and shapes[0][:2] == shapes[1][:2] == shapes[2][:2]
        and shapes[1][2] == shapes[2][2]
        and shapes[0][3] == shapes[1][3]
    )
    if not fits:
        raise InputError(
            "query, key and value must be [B, H, Q, R], [B, H, K, R] and [B, H, K, D]; repeat "
            f"grouped key and value heads first. Got {shapes[0]}, {shapes[1]} and {shapes[2]}."
        )


def _of_rows(problem: Problem, factor: RowFactor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, rank of T and of `[T, 1]`, and condition of every row that counts, `[B, H, Q]`."""
    rank = torch.zeros_like(problem.sizes)
    simplex_rank, spread = torch.zeros_like(rank), torch.full(rank.shape, torch.nan).double()
    spread = spread.to(rank.device)
    for chunk in factor.groups():
        chunk.scatter(rank, chunk.per_row(chunk.whitening.rank))
        chunk.scatter(simplex_rank, chunk.per_row(chunk.simplex_rank))
        gram = chunk.gram[:, None]
        if problem.root is not None:
            root = problem.root.unflatten(0, (-1, chunk.shared))[chunk.heads][:, :, None]
            gram = root.mT @ gram @ root  # [h, g, n, D, D]
        ratio = condition(torch.linalg.eigvalsh(gram), chunk.whitening.rank[:, None])
        chunk.scatter(spread, ratio[:, :, chunk.group])
    return problem.sizes, rank, simplex_rank, spread
