"""Which space the null spaces of a layer refer to, as sums that observers keep."""

from __future__ import annotations

from typing import Literal

import torch

from attnlens.capture import Capture
from attnlens.observer import SumObserver, Sums


def projection_known(capture: Capture) -> Sums:
    """Tell whether H is known, in a form that a :class:`~attnlens.observer.SumObserver` adds."""
    known = float(capture.output_projection is not None)
    return {"has_projection_min": torch.full((1,), known, dtype=torch.float64)}


def value_spaces(observer: SumObserver) -> tuple[Literal["T", "V"], ...]:
    """Return the space of each layer: `"V"` where H was unknown in any call, else `"T"`."""
    return tuple("T" if s["has_projection_min"] else "V" for s in observer.seen().values())
