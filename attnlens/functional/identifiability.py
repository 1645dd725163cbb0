"""Identifiability: can another attention matrix give the same head output?

Two families of alternatives are counted. Among all row-stochastic matrices, A' gives the output of
A exactly when the rows of A' − A lie in the left null space of [T, 1]. Among the matrices that a
head of query width R can produce, A' = softmax(Q'K'ᵀ·s), the logits must also have rank at most R
modulo a constant per row; the second family is a part of the first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.errors import InputError, NonFiniteError

_EPS = torch.finfo(torch.float32).eps
# Singular values come from a float64 Gram matrix, which holds their squares.
_SMALLEST_RTOL = 1e-7


def simplex_dimension(
    tokens: int | Tensor, rank_with_ones: int | Tensor, *, queries: int | Tensor | None = None
) -> Tensor:
    """Count the dimensions of the row-stochastic matrices A' with A'T = AT.

    Each of the ``queries`` rows may move in the left null space of [T, 1], for A > 0.

    Args:
        tokens: Number of keys n that a row may attend to.
        rank_with_ones: rank([T, 1]), generically min(n, D + 1).
        queries: Number of rows; n unless given.

    Returns:
        ``queries · (n − rank([T, 1]))`` as an int64 tensor, at least 0.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1.
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

    Logits modulo a constant per row are the matrices with ``queries`` rows and n − 1 columns whose
    rank is at most r = min(R, n − 1, queries): a variety of dimension r·(queries + n − 1 − r). The
    output of a row imposes min(D, n − 1) conditions. At a generic point the conditions are
    independent while there are dimensions left, so the difference is the dimension of the family.
    For as many queries as keys and R < n it is 2nR − R² − R − n·min(D, n − 1), and for R = D = d it
    is d·(n − 1 − d): positive exactly when n > d + 1. For D ≥ 2R it is 0 at every n.

    Zero means that A is isolated among its alternatives: nothing near A gives the same output. It
    is unique if :func:`simplex_dimension` is zero too; otherwise the count cannot exclude another
    isolated solution far away.

    Args:
        tokens: Number of keys n.
        query_width: Width R of queries and keys.
        value_width: D, or rank([T, 1]) − 1 where the values are known.
        queries: Number of rows; n unless given.

    Returns:
        The generic dimension as an int64 tensor, at least 0.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1, whose
        argument covers the row-stochastic family only.
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
        query_width: Width R of queries and keys.
        value_width: Width D of the values.

    Returns:
        n* such that :func:`softmax_dimension` is positive exactly for n > n*: D + 1 when R ≥ D,
        ⌊R(R + 1) / (2R − D)⌋ when R < D < 2R, None (no such length) when D ≥ 2R.
    """
    if value_width >= 2 * query_width:
        return None
    if query_width >= value_width:
        return value_width + 1
    return query_width * (query_width + 1) // (2 * query_width - value_width)


@dataclass(frozen=True)
class Identifiability:
    """Ranks and dimensions that decide whether attention can be read off a head's output.

    ``tokens``, ``rank``, ``nullity``, ``simplex_nullity``, ``condition`` and ``rtol`` are [B, H]
    when all rows see the same keys, and [B, H, Q] under a mask that varies by row.

    Attributes:
        tokens: Number n of keys attended to.
        rank: Numerical rank of T.
        nullity: n − rank(T), the dimension of the left null space of T.
        simplex_nullity: n − rank([T, 1]), the freedom of one row that sums to one.
        condition: Largest over smallest kept singular value of T, ≥ 1.
        simplex_dimension: Dimension of the row-stochastic alternatives, [B, H].
        softmax_dimension: Generic dimension of the alternatives that a head of this width can
            produce, [B, H]; None under a mask that varies by row, where no count is known.
        query_width: Width of queries and keys.
        value_width: Head dimension D.
        rtol: Singular values up to ``rtol`` times the largest counted as zero.
    """

    tokens: Tensor
    rank: Tensor
    nullity: Tensor
    simplex_nullity: Tensor
    condition: Tensor
    simplex_dimension: Tensor
    softmax_dimension: Tensor | None
    query_width: int
    value_width: int
    rtol: Tensor

    @property
    def identifiable_simplex(self) -> Tensor:
        """True where no other row-stochastic matrix gives the output, bool [B, H]."""
        return self.simplex_dimension == 0

    @property
    def identifiable_softmax(self) -> Tensor | None:
        """True where no head nearby gives the output, bool [B, H]; None if not known."""
        return None if self.softmax_dimension is None else self.softmax_dimension == 0

    def verdict(self, example: int, head: int) -> str:
        """Say in words whether one head's attention is identifiable, and why.

        Args:
            example: Index into B.
            head: Index into H.

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
) -> Identifiability:
    """Decide per example and head whether the output determines the attention.

    Only the widths of queries and keys matter, not their entries: the softmax count is generic.
    With as many queries as keys, a row counts only if its own token is attended to by some row, so
    padding is left out on both sides.

    Args:
        query: Queries, [B, H, Q, R].
        key: Keys, [B, H, K, R], grouped-query heads repeated.
        value: Values as multiplied by the attention, [B, H, K, D].
        mask: Boolean, True = may attend, broadcastable to [B, H, Q, K].
        projection: Output projection per head, [H, D, M]; None if unknown or of full rank.
        rtol: Relative tolerance of the numerical rank, in [1e-7, 1); by default
            max(n, D) · eps(float32).

    Returns:
        Ranks, dimensions and verdicts.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1. The threshold
        for row-stochastic matrices is n > D + 1, one more than stated there.
    """
    check_heads(query, key, value)
    groups, rows = visibility(mask, query, key)
    moments = value_moments(output_values(value, groups, projection), groups, rtol)
    tokens, rank, rank_with_ones = moments.tokens, moments.rank, moments.rank_with_ones
    per_row = {
        "tokens": tokens,
        "rank": rank,
        "nullity": tokens - rank,
        "simplex_nullity": tokens - rank_with_ones,
        "condition": moments.condition,
        "rtol": moments.rtol,
    }
    dimension = simplex_dimension(tokens, rank_with_ones, queries=1)
    softmax = None
    if groups.shape[-2] == 1:
        per_row = {name: entry.squeeze(-1) for name, entry in per_row.items()}
        contrasts = rank_with_ones.squeeze(-1) - 1
        softmax = softmax_dimension(
            per_row["tokens"], query.shape[-1], contrasts, queries=rows.sum(-1)
        )
    return Identifiability(
        **per_row,
        simplex_dimension=(dimension * rows).sum(-1),
        softmax_dimension=softmax,
        query_width=query.shape[-1],
        value_width=value.shape[-1],
    )


@dataclass(frozen=True)
class ValueMoments:
    """Moments of the values in float64, per group of rows that see the same keys.

    Attributes:
        tokens: Number of visible keys, [B, H, G].
        mean: Mean visible value, [B, H, G, D].
        spectrum: Squared singular values of T in ascending order, [B, H, G, D].
        centred: Σ (v − mean)(v − mean)ᵀ, [B, H, G, D, D].
        rtol: Relative tolerance on singular values, [B, H, G].
    """

    tokens: Tensor
    mean: Tensor
    spectrum: Tensor
    centred: Tensor
    rtol: Tensor

    @property
    def cut(self) -> Tensor:
        """Squared singular value up to which a direction counts as zero, [B, H, G, 1].

        One absolute cut serves T and its centred version, so that rank(T) and rank([T, 1]) differ
        by at most one, and rounding in nearly equal values is not taken for rank.
        """
        return self.rtol[..., None] ** 2 * self.spectrum[..., -1:].clamp_min(0)

    @property
    def rank(self) -> Tensor:
        """Number of singular values of T above the cut, [B, H, G]."""
        return (self.spectrum > self.cut).sum(-1)

    @property
    def condition(self) -> Tensor:
        """Largest singular value of T over the smallest above the cut, [B, H, G]."""
        smallest = self.spectrum.masked_fill(self.spectrum <= self.cut, torch.inf).amin(-1)
        return (self.spectrum[..., -1] / smallest).clamp_min(1).sqrt()

    @property
    def rank_with_ones(self) -> Tensor:
        """Rank of [T, 1]: one for the ones column, and that of T without its mean, [B, H, G]."""
        contrasts = (torch.linalg.eigvalsh(self.centred) > self.cut).sum(-1)
        return torch.minimum(contrasts + 1, self.tokens)


def value_moments(values: Tensor, groups: Tensor, rtol: float | None) -> ValueMoments:
    """Gather the moments that decide ranks.

    Args:
        values: Values with hidden keys zeroed, float64 [B, H, K, D].
        groups: Visible keys of each group of rows, bool [B, H, G, K].
        rtol: Relative tolerance on singular values, or None for the default.

    Returns:
        Moments per group.

    Raises:
        InputError: If ``rtol`` is outside [1e-7, 1).
    """
    if rtol is not None and not _SMALLEST_RTOL <= rtol < 1:
        raise InputError(f"rtol must lie in [{_SMALLEST_RTOL:g}, 1), got {rtol}")
    weights = groups.to(values.dtype)
    tokens = groups.sum(-1)
    mean = (weights @ values) / tokens.clamp_min(1)[..., None]
    raw = torch.einsum("bhgk,bhkd,bhke->bhgde", weights, values, values)
    centred = raw - tokens[..., None, None] * mean[..., :, None] * mean[..., None, :]
    default = tokens.clamp_min(values.shape[-1]).to(values.dtype) * _EPS
    tolerance = default if rtol is None else torch.full_like(default, rtol)
    return ValueMoments(tokens, mean, torch.linalg.eigvalsh(raw), centred, tolerance)


def visibility(mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Split a mask into the keys that rows see and the rows that count.

    Args:
        mask: Boolean, True = may attend, broadcastable to [B, H, Q, K]; None = all.
        query: Anything of shape [B, H, Q, ·].
        key: Anything of shape [B, H, K, ·].

    Returns:
        Visible keys, bool [B, H, G, K] with G = 1 if all rows that see anything see the same keys
        and G = Q otherwise; and the rows that count, bool [B, H, Q]: those that see anything and,
        if Q = K, whose own token is seen by some row.

    Raises:
        InputError: If the mask is not boolean or does not broadcast.
    """
    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=query.device)
    shape = (batch, heads, queries, keys)
    fits = mask.ndim == 4 and all(
        size in {1, wanted} for size, wanted in zip(mask.shape, shape, strict=True)
    )
    if mask.dtype != torch.bool or not fits:
        raise InputError(
            f"mask must be boolean, True = may attend, and broadcast to {list(shape)}, got "
            f"{mask.dtype} {list(mask.shape)}; a padding mask is [B, 1, 1, K]"
        )
    mask = mask.to(query.device)
    seen, sees = mask.any(-2, keepdim=True), mask.any(-1, keepdim=True)
    groups = seen if bool(((mask == seen) | ~sees).all()) else mask
    rows = sees.squeeze(-1).expand(batch, heads, queries)
    if queries == keys:
        rows = rows & seen.squeeze(-2)
    return groups.expand(batch, heads, -1, keys), rows


def output_values(value: Tensor, groups: Tensor, projection: Tensor | None) -> Tensor:
    """Return values with the left null space of T = V·projection, at most D wide.

    Args:
        value: Values, [B, H, K, D].
        groups: Visible keys, bool [B, H, G, K].
        projection: Output projection per head, [H, D, M], or None.

    Returns:
        Float64 [B, H, K, D], hidden keys zeroed: V itself for heads whose projection has rank D,
        V·C with C·Cᵀ = projection·projectionᵀ for the others.

    Raises:
        InputError: If the projection does not match the heads.
    """
    hidden = ~groups.any(-2)[..., None]
    values = value.double().masked_fill(hidden, 0.0)
    check_finite(value=values)
    if projection is None:
        return values
    heads, width = value.shape[1], value.shape[-1]
    if projection.ndim != 3 or projection.shape[:2] != (heads, width):
        raise InputError(
            f"projection must be [H, D, M] with H = {heads}, D = {width}, "
            f"got {list(projection.shape)}"
        )
    matrix = projection.to(values)
    squares, axes = torch.linalg.eigh(matrix @ matrix.mT)
    kept = squares > (max(matrix.shape[1:]) * _EPS) ** 2 * squares[..., -1:]
    factor = axes * squares.masked_fill(~kept, 0.0).sqrt()[..., None, :]
    identity = torch.eye(width, dtype=values.dtype, device=values.device)
    return values @ torch.where(kept.all(-1)[:, None, None], identity, factor)


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse tensors that are not one attention call with repeated key and value heads.

    Args:
        query: Queries, [B, H, Q, R].
        key: Keys, [B, H, K, R].
        value: Values, [B, H, K, D].

    Raises:
        InputError: If the shapes do not fit together.
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
            "query, key and value must be [B, H, Q, R], [B, H, K, R] and [B, H, K, D], got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}; repeat grouped key and value heads first"
        )


def check_finite(**tensors: Tensor) -> None:
    """Refuse NaN and infinity, naming the argument, the example and the head.

    Args:
        **tensors: Tensors of shape [B, H, …] under their argument names.

    Raises:
        NonFiniteError: If an entry is NaN or infinite.
    """
    for name, tensor in tensors.items():
        wrong = ~torch.isfinite(tensor).flatten(2).all(-1)
        if wrong.any():
            example, head = wrong.nonzero()[0].tolist()
            raise NonFiniteError(
                f"{name} has NaN or infinite entries in example {example}, head {head}; "
                "mask the affected tokens or find where they arise"
            )
