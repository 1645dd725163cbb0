"""Streaming quantities over attention calls and layers, one per file."""

from attnlens.observers.base import LayerObserver, Observer
from attnlens.observers.effective_attention import AttentionMap, EffectiveAttention
from attnlens.observers.head_statistics import HeadStatistics, HeadStatisticsResult
from attnlens.observers.hidden_token_attribution import (
    AttributionMatrices,
    HiddenTokenAttribution,
    HiddenTokenAttributionResult,
)
from attnlens.observers.map_training import MapTraining
from attnlens.observers.recording import Recording
from attnlens.observers.token_identifiability import (
    TokenIdentifiability,
    TokenIdentifiabilityResult,
)
from attnlens.observers.token_saliency import TokenSaliency, TokenSaliencyResult

__all__ = [
    "AttentionMap",
    "AttributionMatrices",
    "EffectiveAttention",
    "HeadStatistics",
    "HeadStatisticsResult",
    "HiddenTokenAttribution",
    "HiddenTokenAttributionResult",
    "LayerObserver",
    "MapTraining",
    "Observer",
    "Recording",
    "TokenIdentifiability",
    "TokenIdentifiabilityResult",
    "TokenSaliency",
    "TokenSaliencyResult",
]
