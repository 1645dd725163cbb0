"""attnlens: the part of attention that can influence the output.

from attnlens import Lens

with Lens(model) as lens:
    model(**batch)
print(lens.summary())
"""

from typing import TYPE_CHECKING, Any

from attnlens.capture import Capture
from attnlens.corpus import scan
from attnlens.drift import compare
from attnlens.errors import (
    AttnLensError,
    AttnLensWarning,
    CaptureError,
    InputError,
    MemoryBoundError,
    NonFiniteError,
    UnsupportedAttentionError,
)
from attnlens.heads import (
    load_pruned,
    mask_heads,
    prune_heads,
    pruning_curve,
    save_pruned,
)
from attnlens.identify import (
    identifiability,
    realisability_rank,
    simplex_witness,
    softmax_witness,
)
from attnlens.lens import Lens, record
from attnlens.observers import (
    EffectiveAttention,
    HeadImportance,
    HeadStatistics,
    HiddenTokenAttribution,
    LabelAttention,
    MapTraining,
    Observer,
    Recording,
    TokenIdentifiability,
    TokenSaliency,
)
from attnlens.report.page import Report, report
from attnlens.storage import load, save
from attnlens.training import monitor
from attnlens.verdict import Verdict, check

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
    "HiddenTokenAttribution",
    "TokenSaliency",
    "TokenIdentifiability",
    "MapTraining",
    "Recording",
    # identifiability of one attention call
    "identifiability",
    "simplex_witness",
    "softmax_witness",
    "realisability_rank",
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
