"""The pure functions of all quantities, on plain tensors: no state, no model.

from attnlens import functional

functional.effective_attention(attention, value, mask)
"""

from attnlens.algebra.effective import effective_attention, value_basis
from attnlens.algebra.factors import ValueBasis
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.softmax import attention_weights
from attnlens.attention.gates import head_importance
from attnlens.attention.label_sums import LabelMeans
from attnlens.attention.of_tensors import head_statistics, label_attention
from attnlens.identifiability.dimensions import (
    Identifiability,
    identifiability,
    simplex_dimension,
    softmax_dimension,
    softmax_threshold,
)
from attnlens.identifiability.witnesses import (
    RealisabilityRank,
    SimplexWitness,
    SoftmaxWitness,
    realisability_rank,
    simplex_witness,
    softmax_witness,
)

__all__ = [
    # effective attention
    "attention_weights",
    "effective_attention",
    "head_importance",
    "head_statistics",
    "label_attention",
    "value_basis",
    # identifiability of one attention call
    "identifiability",
    "realisability_rank",
    "simplex_dimension",
    "simplex_witness",
    "softmax_dimension",
    "softmax_threshold",
    "softmax_witness",
    # what they return
    "Identifiability",
    "LabelMeans",
    "RealisabilityRank",
    "RowFactor",
    "SimplexWitness",
    "SoftmaxWitness",
    "ValueBasis",
]
