"""Mask heads, prune them, save what is left, and measure what they are worth."""

from attnlens.heads.curve import pruning_curve
from attnlens.heads.mask import mask_heads
from attnlens.heads.plan import HeadPlan
from attnlens.heads.prune import Cost, PruningReport, prune_heads
from attnlens.heads.result import CurvePoint, PruningCurve
from attnlens.heads.scores import head_scores
from attnlens.heads.storage import export_masked, load_pruned, save_pruned

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
