"""Streaming quantities over attention calls, one per file."""

from attnlens.observers.base import GradientObserver, Observer
from attnlens.observers.effective_attention import AttentionMap, EffectiveAttention
from attnlens.observers.head_importance import HeadImportance, HeadImportanceResult
from attnlens.observers.head_statistics import HeadStatistics, HeadStatisticsResult
from attnlens.observers.recording import Recording

__all__ = [
    "AttentionMap",
    "EffectiveAttention",
    "GradientObserver",
    "HeadImportance",
    "HeadImportanceResult",
    "HeadStatistics",
    "HeadStatisticsResult",
    "Observer",
    "Recording",
]
