"""Mask heads, prune them, save what is left, and measure what they are worth."""

from attnlens.pruning.checkpoint import export_masked, is_pruned, load_pruned, save_pruned
from attnlens.pruning.curve import CurvePoint, PruningCurve
from attnlens.pruning.mask import mask_heads
from attnlens.pruning.plan import Plan
from attnlens.pruning.removal import Cost, PruningReport, prune_heads
from attnlens.pruning.scores import head_scores
from attnlens.pruning.sweep import pruning_curve

__all__ = [
    "Cost",
    "CurvePoint",
    "Plan",
    "PruningCurve",
    "PruningReport",
    "export_masked",
    "head_scores",
    "is_pruned",
    "load_pruned",
    "mask_heads",
    "prune_heads",
    "pruning_curve",
    "save_pruned",
]
