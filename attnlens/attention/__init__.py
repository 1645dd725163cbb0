"""What is said of attention head by head: statistics, maps, labels, importance, recordings."""

from attnlens.attention.distributions import MinimalDistribution, MinimalDistributionResult
from attnlens.attention.importance import HeadImportance, HeadImportanceResult
from attnlens.attention.labels import LabelAttention, LabelAttentionResult
from attnlens.attention.layer_health import LayerHealth, LayerHealthResult
from attnlens.attention.layer_statistics import LayerStatistics, LayerStatisticsResult
from attnlens.attention.maps import AttentionMap, EffectiveAttention
from attnlens.attention.mixing import ResidualMixing, ResidualMixingResult
from attnlens.attention.norm_statistics import NormStatistics, NormStatisticsResult
from attnlens.attention.recording import Recording
from attnlens.attention.statistics import HeadHealthResult, HeadStatistics, HeadStatisticsResult

__all__ = [
    "AttentionMap",
    "EffectiveAttention",
    "HeadHealthResult",
    "HeadImportance",
    "HeadImportanceResult",
    "HeadStatistics",
    "HeadStatisticsResult",
    "LabelAttention",
    "LabelAttentionResult",
    "LayerHealth",
    "LayerHealthResult",
    "LayerStatistics",
    "LayerStatisticsResult",
    "MinimalDistribution",
    "MinimalDistributionResult",
    "NormStatistics",
    "NormStatisticsResult",
    "Recording",
    "ResidualMixing",
    "ResidualMixingResult",
]
