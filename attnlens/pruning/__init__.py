"""Mask heads, prune them, save what is left, and measure what they are worth."""

from attnlens.pruning.curve import pruning_curve
from attnlens.pruning.curve_result import CurvePoint, PruningCurve
from attnlens.pruning.mask import mask_heads
from attnlens.pruning.plan import HeadPlan
from attnlens.pruning.removal import Cost, PruningReport, prune_heads
from attnlens.pruning.scores import head_scores
from attnlens.pruning.storage import export_masked, load_pruned, save_pruned

__all__ = [
    "Cost",
    "CurvePoint",
    "HeadPlan",
    "PruningCurve",
    "PruningReport",
    "export_masked",
    "head_scores",
    "load_pruned",
    "mask_heads",
    "prune_heads",
    "pruning_curve",
    "save_pruned",
]
