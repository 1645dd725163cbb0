"""attnlens: the part of attention that can influence the output.

from attnlens import Lens

with Lens(model) as lens:
    model(**batch)
print(lens.summary())
"""

from typing import TYPE_CHECKING, Any

from attnlens.answering import EffectiveFor, effective_for
from attnlens.attention.distributions import MinimalDistribution
from attnlens.attention.importance import HeadImportance
from attnlens.attention.labels import LabelAttention
from attnlens.attention.layer_health import LayerHealth
from attnlens.attention.layer_statistics import LayerStatistics
from attnlens.attention.maps import EffectiveAttention
from attnlens.attention.mixing import ResidualMixing
from attnlens.attention.norm_statistics import NormStatistics
from attnlens.attention.recording import Recording
from attnlens.attention.statistics import HeadStatistics
from attnlens.attribution.hidden_tokens import HiddenTokenAttribution
from attnlens.attribution.saliency import TokenSaliency
from attnlens.capture import Capture
from attnlens.checking import Verdict, check
from attnlens.comparison import compare
from attnlens.corpus import scan
from attnlens.errors import (
    AttnLensError,
    AttnLensWarning,
    CaptureError,
    InputError,
    MemoryBoundError,
    NonFiniteError,
    UnsupportedAttentionError,
)
from attnlens.identifiability.of_captures import (
    identify,
    realisability_rank,
    simplex_witness,
    softmax_witness,
)
from attnlens.lens import Lens, record
from attnlens.observer import Observer
from attnlens.pruning.checkpoint import load_pruned, save_pruned
from attnlens.pruning.mask import mask_heads
from attnlens.pruning.removal import prune_heads
from attnlens.pruning.sweep import pruning_curve
from attnlens.recovery.map_training import MapTraining
from attnlens.recovery.token_identifiability import TokenIdentifiability
from attnlens.reporting.page import Report, report
from attnlens.saving import load, save
from attnlens.training import monitor

if TYPE_CHECKING:
    from attnlens.training.callback import LensCallback

__version__ = "0.1.0"

__all__ = [
    # looking
    "Lens",
    "record",
    "check",
    "Verdict",
    "Capture",
    # observers
    "Observer",
    "HeadStatistics",
    "HeadImportance",
    "EffectiveAttention",
    "LabelAttention",
    "LayerHealth",
    "LayerStatistics",
    "MinimalDistribution",
    "NormStatistics",
    "ResidualMixing",
    "HiddenTokenAttribution",
    "TokenSaliency",
    "TokenIdentifiability",
    "MapTraining",
    "Recording",
    # identifiability of one attention call
    "identify",
    "simplex_witness",
    "softmax_witness",
    "realisability_rank",
    # effective for what
    "effective_for",
    "EffectiveFor",
    # corpora
    "scan",
    # training
    "LensCallback",
    "monitor",
    "compare",
    # heads
    "mask_heads",
    "prune_heads",
    "save_pruned",
    "load_pruned",
    "pruning_curve",
    # showing and keeping
    "Report",
    "report",
    "save",
    "load",
    # errors
    "AttnLensError",
    "AttnLensWarning",
    "CaptureError",
    "InputError",
    "MemoryBoundError",
    "NonFiniteError",
    "UnsupportedAttentionError",
]


def __getattr__(name: str) -> Any:
    """Import on first use what needs the Trainer's dependencies."""
    if name == "LensCallback":
        from attnlens.training.callback import LensCallback

        return LensCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
