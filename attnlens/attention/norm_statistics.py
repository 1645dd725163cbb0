"""Per-head statistics of norm-weighted attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attnlens.algebra.problem import problem
from attnlens.attention.example_means import MeanObserver, example_sums
from attnlens.attention.norms import norm_fields
from attnlens.capture import Capture
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable


@storable()
@dataclass(frozen=True, repr=False)
class NormStatisticsResult(LayeredResult):
    """Averages over examples, per layer and head; `[L, H]` float64 on the CPU.

    Attributes:
        layers: `(stack, layer)` of each row.
        examples: number of examples that counted.
        skipped: number of examples left out because a tensor held NaN or Inf.
        value_norm: mean `‖T_j‖` of the real tokens, or `‖V_j‖` where H is not known.
        norm_weighted: mean over rows of `Σ_j p_ij ‖T_j‖`, what a head would write if nothing of
            it cancelled.
        cancellation: mean over rows of `‖Σ_j p_ij T_j‖ / Σ_j p_ij ‖T_j‖` in `[0, 1]`: 1 where all
            that is written points one way, near 0 where it cancels.
    """

    layers: tuple[LayerKey, ...]
    examples: Tensor
    skipped: Tensor
    value_norm: Tensor
    norm_weighted: Tensor
    cancellation: Tensor

    shown = ("cancellation", "norm_weighted", "value_norm")
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "value_norm": "length of what a token offers a head, ‖T‖",
        "norm_weighted": "what a head writes if nothing of it cancels, Σ p‖T‖",
        "cancellation": "the share of that which is left after cancelling: 1 is all of it",
    }


class NormStatistics(MeanObserver[NormStatisticsResult]):
    """Lengths of what heads write, and how much of it cancels, streamed over examples.

    No `[B, H, Q, K]` tensor is created. The maps are
    :meth:`attnlens.Capture.norm_weighted_attention`.

    Args:
        layers: layer indices to look at; None looks at all.

    References:
        Kobayashi et al., "Attention Is Not Only a Weight: Analyzing Transformers with Vector
        Norms", EMNLP 2020, section 3.

    Examples:
        >>> observer = NormStatistics(layers=[0])
        >>> with Lens(model, observer), torch.no_grad():
        ...     output = model(**batch)
        >>> len(observer.compute().layers)
        1
    """

    result = NormStatisticsResult

    def update(self, capture: Capture) -> None:
        """Add the examples of one attention call.

        Args:
            capture: the call.
        """
        posed = problem(capture)
        fields = norm_fields(posed)
        finite = posed.finite & fields["norm_weighted"].isfinite()
        sums = example_sums(fields, posed.active.any(-1), finite)
        self.add((capture.stack, capture.layer), sums)
