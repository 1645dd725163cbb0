"""Streaming quantities over attention calls and layers, one per file."""

from attnlens.observers.attribution_results import (
    AttributionMatrices,
    HiddenTokenAttributionResult,
)
from attnlens.observers.base import GradientObserver, LayerObserver, Observer
from attnlens.observers.effective_attention import AttentionMap, EffectiveAttention
from attnlens.observers.head_importance import HeadImportance, HeadImportanceResult
from attnlens.observers.head_statistics import HeadStatistics, HeadStatisticsResult
from attnlens.observers.hidden_token_attribution import HiddenTokenAttribution
from attnlens.observers.label_attention import LabelAttention, LabelAttentionResult
from attnlens.observers.map_training import MapTraining
from attnlens.observers.recording import Recording
from attnlens.observers.token_identifiability import (
    TokenIdentifiability,
    TokenIdentifiabilityResult,
)
from attnlens.observers.token_saliency import (
    PassSaliency,
    TokenSaliency,
    TokenSaliencyResult,
)

__all__ = [
    "AttentionMap",
    "AttributionMatrices",
    "EffectiveAttention",
    "GradientObserver",
    "HeadImportance",
    "HeadImportanceResult",
    "HeadStatistics",
    "HeadStatisticsResult",
    "HiddenTokenAttribution",
    "HiddenTokenAttributionResult",
    "LabelAttention",
    "LabelAttentionResult",
    "LayerObserver",
    "MapTraining",
    "Observer",
    "PassSaliency",
    "Recording",
    "TokenIdentifiability",
    "TokenIdentifiabilityResult",
    "TokenSaliency",
    "TokenSaliencyResult",
]
