"""attnlens: the part of attention that can influence the output.

from attnlens import Lens

with Lens(model) as lens:
    model(**batch)
print(lens.summary())
"""

from attnlens.capture import Capture
from attnlens.errors import (
    AttnLensError,
    AttnLensWarning,
    CaptureError,
    InputError,
    MemoryBoundError,
    NonFiniteError,
    UnsupportedAttentionError,
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
    HeadStatistics,
    HiddenTokenAttribution,
    MapTraining,
    Observer,
    Recording,
    TokenIdentifiability,
    TokenSaliency,
)

__version__ = "0.1.0"

__all__ = [
    # looking
    "Lens",
    "record",
    "Capture",
    # observers
    "Observer",
    "HeadStatistics",
    "EffectiveAttention",
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
    # errors
    "AttnLensError",
    "AttnLensWarning",
    "CaptureError",
    "InputError",
    "MemoryBoundError",
    "NonFiniteError",
    "UnsupportedAttentionError",
]
