"""How much of a token's new state comes from other tokens, with the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlens.algebra.norm_weights import own_attention
from attnlens.attention.example_means import MeanObserver, example_sums
from attnlens.attention.norms import mixing_ratio
from attnlens.capture import Capture, LayerCapture
from attnlens.kernels.torch_gram import selected_rows
from attnlens.observer import LayerObserver
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable


@storable()
@dataclass(frozen=True, repr=False)
class ResidualMixingResult(LayeredResult):
    """Averages over examples, one number for each layer; `[L]` float64 on the CPU.

    Attributes:
        layers: `(stack, layer)` of each row.
        examples: number of examples that counted.
        skipped: number of examples left out because a tensor held NaN or Inf.
        mixing_ratio: mean over real tokens of `‖mixed‖ / (‖mixed‖ + ‖stays‖)` in `[0, 1]`.
    """

    layers: tuple[LayerKey, ...]
    examples: Tensor
    skipped: Tensor
    mixing_ratio: Tensor

    axes: ClassVar = {"layer": "layers"}
    shown = ("mixing_ratio",)
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "mixing_ratio": "the part of a token's new state that attention brings from other tokens",
    }


class ResidualMixing(LayerObserver, MeanObserver[ResidualMixingResult]):
    """What attention mixes in from other tokens, against what stays of a token.

    `stays_i = x_i + Σ_h p^h_ii T^h_i` and `mixed_i = Σ_h (O^h_i H_h − p^h_ii T^h_i)`, with x what
    the residual stream holds before the layer, whether it normalises before or after attention.
    The bias of the output projection belongs to neither, and no LayerNorm is applied to the sum.
    Dropout is left out of both.

    Args:
        layers: layer indices to look at; None looks at all.

    References:
        Kobayashi et al., "Incorporating Residual and Normalization Layers into Analysis of Masked
        Language Models", EMNLP 2021, section 3 (their ATTN-RES).

    Examples:
        >>> observer = ResidualMixing(layers=[0])
        >>> with Lens(model, observer), torch.no_grad():
        ...     output = model(**batch)
        >>> len(observer.compute().layers)
        1
    """

    result = ResidualMixingResult

    def __init__(self, layers: Iterable[int] | None = None) -> None:
        super().__init__(layers)
        self._attended: list[tuple[str, Tensor, Tensor]] = []

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Forget attention calls whose layers did not complete.

        Args:
            inputs: the model's arguments by name.
        """
        self._attended = []

    def wants(self, capture: Capture) -> bool:
        """Tell whether a capture concerns this observer; in cross-attention no token is its own."""
        return capture.kind != "cross" and (self.layers is None or capture.layer in self.layers)

    def update(self, capture: Capture) -> None:
        """Keep what attention writes until its layer is complete.

        Args:
            capture: the call.

        Raises:
            CaptureError: where H is not known, with the reason.
        """
        projection = capture.known_projection.weight.double()
        own = own_attention(capture.rows)[..., None]
        kept = own * capture.value.double()
        outputs = capture.context.double()
        if not capture.exact_context:
            values = selected_rows(capture.value, capture.support.keys, torch.float32)
            outputs = capture.rows.context(values).double()
        parts = (kept, outputs - kept)
        kept, mixed = (torch.einsum("bhqd,hdm->bqm", part, projection) for part in parts)
        self._attended.append((capture.site, kept, mixed))

    def update_layer(self, layer: LayerCapture) -> None:
        """Take one layer call into account.

        Args:
            layer: the call.
        """
        inside = [call for call in self._attended if call[0].startswith(f"{layer.name}.")]
        self._attended = []
        for _, kept, mixed in inside:
            ratio = mixing_ratio(layer.hidden.double() + kept, mixed)  # [B, Q]
            real = layer.mask
            finite = torch.where(real, ratio, 0.0).isfinite().all(-1)
            mean = torch.where(real, ratio, 0.0).sum(-1) / real.sum(-1)
            sums = example_sums({"mixing_ratio": mean}, real.any(-1), finite)
            self.add((layer.stack, layer.layer), sums)

    def reset(self) -> None:
        """Forget everything seen."""
        super().reset()
        self._attended = []
