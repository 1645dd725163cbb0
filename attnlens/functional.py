"""The pure functions of all quantities, on plain tensors: no state, no model.

from attnlens import functional

functional.effective_attention(attention, value, mask)
"""

from attnlens.algebra.effective import effective_attention, value_basis
from attnlens.algebra.factors import ValueBasis
from attnlens.algebra.minimal_distribution import MinimalDistributions
from attnlens.algebra.rowwise import RowFactor
from attnlens.algebra.softmax import attention_weights
from attnlens.attention.answer_level import answer_attention
from attnlens.attention.gates import head_importance
from attnlens.attention.label_sums import LabelMeans
from attnlens.attention.layer_health import layer_health
from attnlens.attention.norms import mixing_ratio, rollout
from attnlens.attention.of_tensors import (
    head_health,
    head_statistics,
    label_attention,
    minimal_distribution,
    norm_statistics,
)
from attnlens.attribution.box_plots import box_statistics, share_histogram
from attnlens.attribution.jacobian import Attribution, attribution_norms, hidden_token_attribution
from attnlens.attribution.sketches import (
    contributions,
    jackknife_error,
    seed_tangents,
    source_probes,
)
from attnlens.attribution.tallies import (
    Tally,
    layer_profile,
    tally_distance,
    tally_labels,
    tally_not_main,
    tally_offset,
    tally_own,
)
from attnlens.attribution.tangents import pull_back, push_forward
from attnlens.attribution.token_gradients import TokenGradients, token_saliency
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
from attnlens.observer import label_members
from attnlens.recovery.map_training import train_maps
from attnlens.recovery.ridge_maps import NormalEquations, best_ridge_maps, normal_equations
from attnlens.recovery.token_maps import Maps, apply_map, identified, map_loss, recovery_rate

__all__ = [
    # effective attention
    "answer_attention",
    "attention_weights",
    "effective_attention",
    "head_health",
    "head_importance",
    "head_statistics",
    "label_attention",
    "layer_health",
    "minimal_distribution",
    "mixing_ratio",
    "norm_statistics",
    "rollout",
    "value_basis",
    # identifiability of one attention call
    "identifiability",
    "realisability_rank",
    "simplex_dimension",
    "simplex_witness",
    "softmax_dimension",
    "softmax_threshold",
    "softmax_witness",
    # attribution
    "attribution_norms",
    "box_statistics",
    "contributions",
    "hidden_token_attribution",
    "jackknife_error",
    "label_members",
    "layer_profile",
    "pull_back",
    "push_forward",
    "seed_tangents",
    "share_histogram",
    "source_probes",
    "tally_distance",
    "tally_labels",
    "tally_not_main",
    "tally_offset",
    "tally_own",
    "token_saliency",
    # recovery of tokens from hidden states
    "apply_map",
    "best_ridge_maps",
    "identified",
    "map_loss",
    "normal_equations",
    "recovery_rate",
    "train_maps",
    # what they return
    "Attribution",
    "Identifiability",
    "LabelMeans",
    "Maps",
    "MinimalDistributions",
    "NormalEquations",
    "RealisabilityRank",
    "RowFactor",
    "SimplexWitness",
    "SoftmaxWitness",
    "Tally",
    "TokenGradients",
    "ValueBasis",
]
