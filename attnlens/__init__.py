"""attnlens: the part of attention that can influence the output.

from attnlens import Lens

with Lens(model) as lens:
    model(**batch)
print(lens.summary())
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attnlens.showing import DRAWERS

if TYPE_CHECKING:
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

# Where they are: each is imported on first use, so that a shell need not wait for torch.
_HOMES = {
    # looking
    "Lens": "lens",
    "record": "lens",
    "check": "checking",
    "Capture": "capture",
    # observers
    "Observer": "observer",
    "HeadStatistics": "attention.statistics",
    "HeadImportance": "attention.importance",
    "EffectiveAttention": "attention.maps",
    "LabelAttention": "attention.labels",
    "HiddenTokenAttribution": "attribution.hidden_tokens",
    "TokenSaliency": "attribution.saliency",
    "TokenIdentifiability": "recovery.token_identifiability",
    # identifiability of one attention call
    "identify": "identifiability",
    # effective for what
    "effective_for": "answering",
    # corpora
    "scan": "corpus",
    # training
    "LensCallback": "training.callback",
    "monitor": "training",
    "compare": "comparison",
    # heads
    "mask_heads": "pruning.mask",
    "prune_heads": "pruning.removal",
    # showing and keeping
    "report": "reporting.page",
    "save": "saving",
    "load": "saving",
    # errors
    "AttnLensError": "errors",
}


DRAWERS.append("attnlens.reporting.page")


def __getattr__(name: str) -> Any:
    """Import a public name, or a part such as `attnlens.functional`, on first use."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
