"""Every mask convention of transformers, brought to one.

| implementation | what arrives | what it means |
|---|---|---|
| sdpa | bool 4-D, True = attend; or None | None with `is_causal`: a causal mask without tensor |
| sdpa, eager | float 4-D, additive | 0 or a large negative number, or a position bias |
| eager | bool 4-D | *added* to the logits: it shifts them by one and masks nothing |
| flash | bool `[B, K]` or None | plus `is_causal`, `sliding_window`, `cu_seq_lens_*` |
| flex | `BlockMask` | its `mask_mod` on index grids is the mask |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnlens.algebra.softmax import EmptyRows
from attnlens.capture import Masking
from attnlens.tap.dispatch import InterfaceCall

# Additive values at or below this are masks, not biases: exp(-9999) is zero in every dtype.
MASKED = -9999.0


class Maskings:
    """The masks of one forward pass, each normalised once.

    Layers that were given the same mask share what is known of it.
    """

    def __init__(self) -> None:
        self._normalised: list[tuple[Any, Masking]] = []

    def of(self, call: InterfaceCall, query: Tensor, key: Tensor) -> Masking:
        """Find what restricts and shifts the logits of a call.

        Args:
            call: its mask, causal rule and position bias count.
            query: `[B, H, Q, D]`.
            key: `[B, Hkv, K, D]`.

        Returns:
            Mask, bias and causal rule in the common convention.
        """
        raw = call.arguments.get("attention_mask")
        masking = next((masking for mask, masking in self._normalised if mask is raw), None)
        if masking is None:
            resolved = {**call.arguments, "is_causal": call.is_causal}
            masking = normalise_mask(raw, call.implementation, query, key, resolved)
            if raw is not None:
                self._normalised.append((raw, masking))
        return _with_position_bias(masking, call.arguments.get("position_bias"))

    def forget(self) -> None:
        """Let go of every mask."""
        self._normalised.clear()


def normalise_mask(
    raw: Any, implementation: str, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]
) -> Masking:
    """Bring the mask of one attention call to the common convention.

    Args:
        raw: the `attention_mask` argument as the attention function received it.
        implementation: `"eager"`, `"sdpa"`, `"flex_attention"`, or a flash implementation.
        query: `[B, H, Q, D]`.
        key: `[B, Hkv, K, D]`.
        kwargs: keyword arguments of the call, with `is_causal` already resolved.

    Returns:
        The masking; its bias is the additive part of the mask, without any position bias.
    """
    causal = bool(kwargs.get("is_causal"))
    if "flash" in implementation:
        return Masking(_flash_mask(raw, query, key, kwargs), causal=causal)
    if raw is None:
        return Masking(causal=causal and query.shape[-2] > 1 and implementation == "sdpa")
    if not isinstance(raw, Tensor):
        return Masking(_block_mask(raw, query, key))
    raw = raw[..., : key.shape[-2]]
    if raw.is_floating_point():
        return _additive(raw)
    if implementation == "eager":
        return Masking(bias=raw.to(query.dtype))
    return Masking(raw if raw.dtype == torch.bool else raw != 0)


def _with_position_bias(masking: Masking, position_bias: Tensor | None) -> Masking:
    """Add a per-head position bias to a masking, sharing what is known of its mask."""
    if position_bias is None:
        return masking
    extra = _additive(position_bias)
    biases = [bias for bias in (masking.bias, extra.bias) if bias is not None]
    bias = sum(biases[1:], biases[0]) if biases else None
    if extra.mask is not None:
        mask = extra.mask if masking.mask is None else extra.mask & masking.mask
        return Masking(mask, bias, masking.causal, "uniform")
    # The finite fill value of such masks leaves empty rows uniform.
    empty: EmptyRows = "zero" if masking.mask is None else "uniform"
    return Masking(masking.mask, bias, masking.causal, empty, masking._supports)


def _additive(raw: Tensor) -> Masking:
    """Split an additive mask into a boolean mask and a finite bias."""
    keep = raw > MASKED
    bias = raw.masked_fill(~keep, 0)
    return Masking(
        None if bool(keep.all()) else keep,
        bias if bool(bias.any()) else None,
        empty_rows="uniform",
    )


def _block_mask(raw: Any, query: Tensor, key: Tensor) -> Tensor:
    """Evaluate a flex attention block mask on index grids."""
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    grid = [torch.arange(size, device=query.device) for size in sizes]
    example, head, row, column = (
        index.view([-1 if axis == position else 1 for axis in range(4)])
        for position, index in enumerate(grid)
    )
    mask: Tensor = raw.mask_mod(example, head, row, column)
    return mask.expand(*mask.shape[:2], *sizes[2:])


def _flash_mask(
    raw: Tensor | None, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Build what a flash kernel does with its keyword arguments."""
    row = torch.arange(query.shape[-2], device=query.device)[:, None]
    column = torch.arange(key.shape[-2], device=query.device)
    mask = None if raw is None else raw[:, None, None].bool()
    window = kwargs.get("sliding_window")
    if window is not None:
        # A window of w keeps w − 1 tokens to the left, and to the right unless causal.
        mask = _both(mask, (row - column).abs() < window)
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is not None:
        other = kwargs.get("cu_seq_lens_k", bounds)
        segment = torch.searchsorted(bounds.contiguous(), row[:, 0].contiguous(), right=True)
        mask = _both(
            mask,
            segment[:, None] == torch.searchsorted(other.contiguous(), column, right=True),
        )
    return mask


def _both(mask: Tensor | None, rule: Tensor) -> Tensor:
    """A mask `[B, 1, 1, K]`, or none, together with a rule `[Q, K]`."""
    return rule[None, None] if mask is None else mask & rule
