"""Look at heads while a model is being trained."""

from attnlens.training.loops import Monitor, monitor
from attnlens.training.scalars import Keep

__all__ = ["Keep", "Monitor", "monitor"]
