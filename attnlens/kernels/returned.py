"""What the kernels return: plain records of tensors, the same from every backend."""

from typing import NamedTuple

from torch import Tensor


class GramFactor(NamedTuple):
    """Whitening factor of the Gram matrix `G = VᵀV` of every head.

    `value @ whitening` has orthonormal columns that span the column space of V, so `W Wᵀ = G⁺`.
    All are NaN, and the rank means nothing, where values at real keys are not finite.

    Attributes:
        whitening: `[B, H, D, D]` float64; columns beyond the rank are zero.
        rank: `[B, H]` int64, the number of singular values above the threshold.
        bound: `[B, H]` float64, at least the squared condition number of V where its rank was
            proven to be full (the number of keys, or D), else Inf.
        gram: `[B, H, D, D]` float64.
        total: `[B, H, D]` float64, `Vᵀ1`.
    """

    whitening: Tensor
    rank: Tensor
    bound: Tensor
    gram: Tensor
    total: Tensor


class GramSVD(NamedTuple):
    """Singular values and right singular vectors of the values of every head.

    Attributes:
        singular_values: float64 `[B, H, D]`, descending.
        right_vectors: float64 `[B, H, D, D]`, the vectors in its columns.
    """

    singular_values: Tensor
    right_vectors: Tensor


class RowStatistics(NamedTuple):
    """Statistics of every row p of the attention matrix; rows that see no key are 0.

    Attributes:
        logsumexp: `[B, H, Q]` of the masked, scaled logits; -inf where no key is seen.
        centred: `[B, H, Q]`, `Σ (p − 1/n)²` over the n keys that the row sees, in `[0, 1)`.
        entropy: `[B, H, Q]` in nats, `−Σ p log p`, in `[0, log K]`.
        maximum: `[B, H, Q]`, the largest p, in `(0, 1]`.
        size: `[B, H, Q]`, n.
        coordinates: `[B, H, Q, R]`, `Σ_j p_j u_j`, or None when no basis was given.
    """

    logsumexp: Tensor
    centred: Tensor
    entropy: Tensor
    maximum: Tensor
    size: Tensor
    coordinates: Tensor | None


class EffectiveReduction(NamedTuple):
    """Reductions of the effective attention A⊥ = C Uᵀ over its active rows.

    Attributes:
        absolute_column_sums: `[B, H, K]`, Σ_q |A⊥_qk|.
        label_sums: `[B, H, labels]`, the sum of A⊥ over all rows and the keys of a label.
        top_values: `[B, H, top_k]`, the entries of largest magnitude, with their sign.
        top_queries: int64 `[B, H, top_k]`, their rows.
        top_keys: int64 `[B, H, top_k]`, their columns.
        maps: `[B, H, Q, K]`, A⊥ itself; inactive rows are zero.

    Every attribute but the first is None unless asked for.
    """

    absolute_column_sums: Tensor
    label_sums: Tensor | None
    top_values: Tensor | None
    top_queries: Tensor | None
    top_keys: Tensor | None
    maps: Tensor | None
