"""Which tokens made each hidden state, and which the loss depends on."""

from attnlens.attribution.contributions import AttributionMatrices, HiddenTokenAttributionResult
from attnlens.attribution.hidden_tokens import HiddenTokenAttribution
from attnlens.attribution.saliency import PassSaliency, TokenSaliency, TokenSaliencyResult

__all__ = [
    "AttributionMatrices",
    "HiddenTokenAttribution",
    "HiddenTokenAttributionResult",
    "PassSaliency",
    "TokenSaliency",
    "TokenSaliencyResult",
]
