"""What options can be, apart from the library, so that the shell need not wait for torch.

A test compares these with what they are of.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

Field = Literal[
    "examples",
    "skipped",
    "tokens",
    "rank",
    "nullity",
    "nullity_min",
    "nullity_max",
    "simplex_nullity",
    "condition",
    "attention_norm",
    "effective_norm",
    "effective_fraction",
    "correlation",
    "pooled_correlation",
    "entropy",
    "output_norm",
    "max_logit",
    "relative_entropy",
    "confidence",
    "received",
    "sink_first",
    "sink_mass",
    "effective_sink_mass",
    "sink_value_norm",
    "effective_rank",
    "stable_rank",
]
DriftField = Literal["effective_cosine", "raw_cosine", "effective_fraction_change"]
Score = Literal[
    "effective_norm", "effective_fraction", "output_norm", "attention_norm", "magnitude", "random"
]
Part = Literal["both", "heads", "tokens"]
Distance = Literal["cosine", "l2"]
Format = Literal["text", "jsonl", "csv", "tsv", "parquet", "dataset"]
OnError = Literal["skip", "raise"]


class Map(str, Enum):
    """Maps from hidden states back to tokens; the shell's lists hold no literals."""

    naive = "naive"
    linear = "linear"
    mlp = "mlp"


OBSERVERS = (
    "attribution",
    "effective-attention",
    "head-statistics",
    "hidden-token-attribution",
    "label-attention",
    "layer-health",
    "layer-statistics",
    "minimal-distribution",
    "norm-statistics",
    "residual-mixing",
    "token-identifiability",
)

# Defaults of `attnlens.corpus.settings.Settings`, of `PageContent` and of `identification.BRIEF`.
BATCH_SIZE, BATCH_TOKENS, CHUNK, CHECKPOINT_EVERY = 32, 1024, 256, 30.0
EXAMPLES, MAX_TOKENS, MEGABYTES = 12, 128, 10.0
EPOCHS, LEARNING_RATE, PATIENCE = 30, 3e-3, 5
