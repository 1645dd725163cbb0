"""attnlens: the part of attention that can influence the output.

from attnlens import Lens

with Lens(model) as lens:
    model(**batch)
print(lens.summary())
"""

from typing import TYPE_CHECKING, Any

from attnlens.answering import effective_for
from attnlens.attention.importance import HeadImportance
from attnlens.attention.labels import LabelAttention
from attnlens.attention.maps import EffectiveAttention
from attnlens.attention.statistics import HeadStatistics
from attnlens.attribution.hidden_tokens import HiddenTokenAttribution
from attnlens.attribution.saliency import TokenSaliency
from attnlens.capture import Capture
from attnlens.checking import check
from attnlens.comparison import compare
from attnlens.corpus import scan
from attnlens.errors import AttnLensError
from attnlens.identifiability import identify
from attnlens.lens import Lens, record
from attnlens.observer import Observer
from attnlens.pruning.mask import mask_heads
from attnlens.pruning.removal import prune_heads
from attnlens.recovery.token_identifiability import TokenIdentifiability
from attnlens.reporting.page import report
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
    # identifiability of one attention call
    "identify",
    # effective for what
    "effective_for",
    # corpora
    "scan",
    # training
    "LensCallback",
    "monitor",
    "compare",
    # heads
    "mask_heads",
    "prune_heads",
    # showing and keeping
    "report",
    "save",
    "load",
    # errors
    "AttnLensError",
]


def __getattr__(name: str) -> Any:
    """Import on first use what needs the Trainer's dependencies."""
    if name == "LensCallback":
        from attnlens.training.callback import LensCallback

        return LensCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
