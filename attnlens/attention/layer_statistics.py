"""How much of the attention of all heads together the output of a layer sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attnlens.algebra.null_space import null_space
from attnlens.algebra.problem import problem
from attnlens.attention.example_means import MeanObserver, example_sums
from attnlens.capture import Capture
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable


@storable()
@dataclass(frozen=True, repr=False)
class LayerStatisticsResult(LayeredResult):
    """Averages over examples, one number for each layer; `[L]` float64 on the CPU.

    Attributes:
        layers: `(stack, layer)` of each row.
        examples: number of examples that counted.
        skipped: number of examples left out because a tensor held NaN or Inf.
        layer_nullity: dimension in which the rows of all heads are free together,
            `Σ_h n − rank([T_1; …; T_H])`, the mean over rows.
        layer_fraction: `‖A⊥‖² / ‖A‖²` of all heads together, as the layer's output sees them.
        heads_fraction: the same as each head's own output sees it, `Σ_h ‖A⊥_h‖² / Σ_h ‖A_h‖²`; at
            least `layer_fraction`, and equal to it where `W_O` has full row rank.
    """

    layers: tuple[LayerKey, ...]
    examples: Tensor
    skipped: Tensor
    layer_nullity: Tensor
    layer_fraction: Tensor
    heads_fraction: Tensor

    axes: ClassVar = {"layer": "layers"}
    shown = ("layer_fraction", "heads_fraction")
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "layer_nullity": "dimension in which all heads can change together without any effect",
        "layer_fraction": "the share of a layer's attention that its output can see",
        "heads_fraction": "the share of it that the outputs of single heads can see",
    }


class LayerStatistics(MeanObserver[LayerStatisticsResult]):
    """Effective attention of all heads together, streamed over examples.

    Args:
        layers: layer indices to look at; None looks at all.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3, whose
        definition for one head is applied to the heads side by side.

    Examples:
        >>> observer = LayerStatistics(layers=[0])
        >>> with Lens(model, observer), torch.no_grad():
        ...     output = model(**batch)
        >>> len(observer.compute().layers)
        1
    """

    result = LayerStatisticsResult

    def update(self, capture: Capture) -> None:
        """Add the examples of one attention call.

        Args:
            capture: the call; its output projection must be known.
        """
        posed = problem(capture)
        separate = capture.known_projection.separates_heads
        space, sums = null_space(posed, with_rows=True)
        assert sums is not None
        finite = ((space.finite > 0) | ~posed.active.any(-1)).all(-1)
        square, rows = sums.square.sum(-1), capture.support.active.any(1).sum(-1)
        nullity, effective = space.nullity.sum(-1), space.effective_square.sum(-1)
        by_heads = (effective / square).clamp(max=1)
        if not separate:
            level = capture.layer_level()
            nullity, effective = level.nullity.sum(-1) / rows, level.square.sum(-1)
        fields = {
            "layer_nullity": nullity,
            "layer_fraction": (effective / square).clamp(max=1),
            "heads_fraction": by_heads,
        }
        self.add((capture.stack, capture.layer), example_sums(fields, rows > 0, finite))
