"""What torch's own attention module, `nn.MultiheadAttention`, hides from a function mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnlens.tap.shared import SharedSetting, ThreadDepth, replaced

_HAS_TORCH_FUNCTION = torch.overrides.has_torch_function
_open = ThreadDepth()


def _has_torch_function(tensors: Any) -> bool:
    return not _open and bool(_HAS_TORCH_FUNCTION(tensors))


_answering = SharedSetting(lambda: replaced(F, "has_torch_function", _has_torch_function))


@contextmanager
def open_body() -> Iterator[None]:
    """Let `F.multi_head_attention_forward` run its body under a mode instead of handing over.

    The function asks a module-level `has_torch_function` whether to hand its call to the mode;
    for the duration, and in this thread only, the answer is no.
    """
    with _answering.held(), _open.entered():
        yield


def fusable_layers(model: nn.Module) -> dict[str, nn.TransformerEncoderLayer]:
    """List torch's own encoder layers, which have a fused kernel for evaluation, by name."""
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, nn.TransformerEncoderLayer)}


def may_fuse(layer: nn.TransformerEncoderLayer) -> bool:
    """Tell whether one of torch's encoder layers may run its fused kernel now.

    The kernel hides its attention. torch avoids it where a hook or a function mode exists, which
    changes the output: in padded rows it is no longer zero.

    Args:
        layer: about to be called.

    Returns:
        True if the kernel runs unless a hook or a mode is there.
    """
    attention = layer.self_attn
    gradient = torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters())
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not layer.training
        and not gradient
        and bool(attention.batch_first)
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and bool(layer.activation_relu_or_gelu)
        and layer.norm1.eps == layer.norm2.eps
        and attention.num_heads % 2 == 0
        and not torch.is_autocast_enabled()
    )


def takes_fused_path(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell whether `nn.MultiheadAttention` may run torch's fused inference kernel.

    That kernel hides its attention, and a function mode would make torch avoid it, which changes
    the last bits of the output.

    Args:
        module: the module that is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        True if the kernel may run for this call.
    """
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    same = given.get("query") is given.get("key") is given.get("value")
    gradient = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not module.training
        and not gradient
        and same
        and bool(module.batch_first)
        and module.num_heads % 2 == 0
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
        and not torch.is_autocast_enabled()
    )
