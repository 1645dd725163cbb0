"""What the kernels return: plain records of tensors, the same from every backend."""

from typing import NamedTuple

from torch import Tensor


class GramFactor(NamedTuple):
    """Whitening factor of the Gram matrix G = VᵀV of every head.

    ``value @ whitening`` has orthonormal columns that span the column space of V, so
    W Wᵀ = G⁺. E is the head dimension D, plus one when the ones column was added.

    Attributes:
        whitening: float64 ``[B, H, E, E]``; columns beyond the rank are zero.
        rank: int64 ``[B, H]``, the number of singular values above ``rtol · σ_1``.
        sigma_max: float64 ``[B, H]``, the largest singular value of V, 0 for an empty head; or
            None if the extremes were not asked for.
        sigma_min: float64 ``[B, H]``, the smallest one kept, 0 for an empty head; or None.
        gram: float64 ``[B, H, E, E]``.
        rtol: float64 ``[B, H]``, the relative tolerance that decided the rank.
    """

    whitening: Tensor
    rank: Tensor
    sigma_max: Tensor | None
    sigma_min: Tensor | None
    gram: Tensor
    rtol: Tensor


class GramSVD(NamedTuple):
    """Singular values and right singular vectors of the values of every head.

    Attributes:
        singular_values: float64 ``[B, H, D]``, descending.
        right_vectors: float64 ``[B, H, D, D]``, the vectors in its columns.
    """

    singular_values: Tensor
    right_vectors: Tensor


class RowStatistics(NamedTuple):
    """Statistics of every row p of the attention matrix; rows that see no key are 0.

    Attributes:
        logsumexp: ``[B, H, Q]`` of the masked, scaled logits; -inf where no key is seen.
        square_sum: ``[B, H, Q]``, Σ p², in (0, 1].
        entropy: ``[B, H, Q]`` in nats, −Σ p log p, in [0, log K].
        maximum: ``[B, H, Q]``, the largest p, in (0, 1].
        coordinates: ``[B, H, Q, R]``, Σ_j p_j u_j, or None when no basis was given.
    """

    logsumexp: Tensor
    square_sum: Tensor
    entropy: Tensor
    maximum: Tensor
    coordinates: Tensor | None


class EffectiveReduction(NamedTuple):
    """Reductions of the effective attention A⊥ = C Uᵀ over its active rows.

    Attributes:
        absolute_column_sums: ``[B, H, K]``, Σ_q |A⊥_qk|.
        label_sums: ``[B, H, labels]``, the sum of A⊥ over all rows and the keys of a label.
        top_values: ``[B, H, top_k]``, the entries of largest magnitude, with their sign.
        top_queries: int64 ``[B, H, top_k]``, their rows.
        top_keys: int64 ``[B, H, top_k]``, their columns.
        maps: ``[B, H, Q, K]``, A⊥ itself; inactive rows are zero.

    Every attribute but the first is None unless asked for.
    """

    absolute_column_sums: Tensor
    label_sums: Tensor | None
    top_values: Tensor | None
    top_queries: Tensor | None
    top_keys: Tensor | None
    maps: Tensor | None
