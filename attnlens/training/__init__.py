"""Look at heads while a model is being trained."""

from typing import TYPE_CHECKING, Any

from attnlens.training.alarms import Alarm
from attnlens.training.loops import Monitor, monitor
from attnlens.training.scalars import Keep

if TYPE_CHECKING:
    from attnlens.training.lightning_callback import LightningCallback

__all__ = ["Alarm", "Keep", "LightningCallback", "Monitor", "monitor"]


def __getattr__(name: str) -> Any:
    """Import on first use what needs Lightning."""
    if name == "LightningCallback":
        from attnlens.training.lightning_callback import LightningCallback

        return LightningCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
