"""Health of the residual stream: tokens that become one, and entries that outgrow all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnlens.algebra.values import working_dtype
from attnlens.attention.example_means import MeanObserver, example_sums
from attnlens.capture import LayerCapture
from attnlens.errors import InputError
from attnlens.observer import LayerObserver
from attnlens.results import LayeredResult, LayerKey
from attnlens.saving import storable

_LARGE, _MASSIVE = 100, 1000  # medians


@storable()
@dataclass(frozen=True, repr=False)
class LayerHealthResult(LayeredResult):
    """Averages over examples of what leaves every layer, real tokens only; float64 on the CPU.

    Attributes:
        layers: `(stack, layer)` of each row.
        examples: number of examples that counted, `[L]`.
        skipped: number of examples left out because a hidden state held NaN or Inf, `[L]`.
        collapse: `‖X − 1x̄ᵀ‖_F / ‖X‖_F` in `[0, 1]`, `[L]`: 0 where all tokens are one.
        massive: largest `|x|` over the median `|x|` of an example, `[L]`.
        large_entries: number of entries above 100 medians in an example, `[L]`.
        massive_entries: number of entries above 1000 medians, `[L]`.
        massive_share: share of the examples in which each of the M dimensions holds an entry above
            100 medians, `[L, M]`.
    """

    layers: tuple[LayerKey, ...]
    examples: Tensor
    skipped: Tensor
    collapse: Tensor
    massive: Tensor
    large_entries: Tensor
    massive_entries: Tensor
    massive_share: Tensor

    axes: ClassVar = {"layer": "layers"}
    apart: ClassVar = frozenset({"massive_share"})
    shown = ("collapse", "massive")
    meanings: ClassVar = {
        **LayeredResult.meanings,
        "collapse": "how far tokens differ from their mean: at 0 all are one vector",
        "massive": "the largest entry of the hidden states over the median one",
        "large_entries": "entries above a hundred medians, per example",
        "massive_entries": "entries above a thousand medians, per example",
    }


class LayerHealth(LayerObserver, MeanObserver[LayerHealthResult]):
    """Rank collapse and massive activations of what leaves every layer, streamed over examples.

    Args:
        layers: layer indices to look at; None looks at all.

    References:
        Dong et al., "Attention Is Not All You Need", ICML 2021 (collapse); Sun et al., "Massive
        Activations in Large Language Models", COLM 2024.

    Examples:
        >>> observer = LayerHealth(layers=[0])
        >>> with Lens(model, observer), torch.no_grad():
        ...     output = model(**batch)
        >>> len(observer.compute().layers)
        1
    """

    result = LayerHealthResult

    def update_layer(self, layer: LayerCapture) -> None:
        """Take one layer call into account.

        Args:
            layer: the call.
        """
        if layer.chosen and (self.layers is None or layer.layer in self.layers):
            hidden, mask = layer.output, layer.mask
            finite = torch.where(mask[..., None], hidden, 0.0).isfinite().flatten(1).all(-1)
            sums = example_sums(layer_health(hidden, mask), mask.any(-1), finite)
            self.add((layer.stack, layer.layer), sums)


@torch.no_grad()
def layer_health(hidden: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Compute what `LayerHealth` averages, for every example.

    Args:
        hidden: X, `[B, K, M]`.
        mask: `[B, K]` bool, the real tokens; None means all.

    Returns:
        `collapse`, `massive`, `large_entries` and `massive_entries`, `[B]` float64, and
        `massive_share`, `[B, M]`, 1 where a dimension holds an entry above 100 medians. NaN for
        examples without a token, and `massive` where the median is zero.

    Raises:
        InputError: on a wrong shape or type.

    References:
        Dong et al., ICML 2021, section 2; Sun et al., COLM 2024, section 2.

    Examples:
        >>> hidden = torch.tensor([[[1.0, 1.0, 300.0], [1.0, -1.0, -1.0]]])
        >>> layer_health(hidden)["massive"], layer_health(hidden)["massive_share"]
        (tensor([300.], dtype=torch.float64), tensor([[0., 0., 1.]], dtype=torch.float64))
    """
    if hidden.dim() != 3 or not hidden.is_floating_point():
        raise InputError(
            f"hidden must be floating-point [B, K, M]. Got {hidden.dtype} {list(hidden.shape)}."
        )
    if mask is None:
        mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if mask.shape != hidden.shape[:2] or mask.dtype != torch.bool:
        raise InputError(
            f"mask must be bool [B, K] = {list(hidden.shape[:2])}. Got {mask.dtype} "
            f"{list(mask.shape)}."
        )
    real = mask[..., None]
    rows = torch.where(real, hidden, 0.0).to(working_dtype(hidden))
    count = mask.sum(-1).double()
    mean = (rows.sum(-2, dtype=torch.float64) / count[..., None]).to(rows.dtype)
    apart = torch.where(real, rows - mean[:, None], 0.0)
    size = rows.abs()
    median = torch.where(real, size, torch.nan).flatten(1).nanmedian(-1).values
    large, massive = (size > factor * median[:, None, None] for factor in (_LARGE, _MASSIVE))
    fields = {
        "collapse": (apart.flatten(1).norm(dim=-1) / rows.flatten(1).norm(dim=-1)).double(),
        "massive": torch.where(median > 0, size.amax((-2, -1)).double() / median, torch.nan),
        "large_entries": large.sum((-2, -1)).double(),
        "massive_entries": massive.sum((-2, -1)).double(),
        "massive_share": large.any(-2).double(),
    }
    some = count > 0
    return {
        name: torch.where(some.view(-1, *[1] * (field.dim() - 1)), field, torch.nan)
        for name, field in fields.items()
    }
