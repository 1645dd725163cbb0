"""Compiled models run their uncompiled code while a lens looks.

Hooks added after compilation are ignored by compiled code, silently. Inside a lens such a model
runs eagerly, without recompiling; outside it, the compiled code is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch._dynamo import eval_frame

from attnlens.tap.shared import SharedSetting


@contextmanager
def _force_eager() -> Iterator[None]:
    """Force the stance of the compiler; one that someone sets meanwhile stays."""
    stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        if eval_frame._stance is stance.stance:
            stance.__exit__(None, None, None)


_eager = SharedSetting(_force_eager)


def running_eagerly(model: nn.Module) -> AbstractContextManager[None]:
    """Make compiled code that holds a model run uncompiled for the duration of a block.

    Whether `torch.compile` was applied to the model, to a module inside it or to a function around
    it cannot be told from the model. Flex attention compiles its own kernel, which is the model's
    business: such a model is left alone unless a module of it was compiled.

    Returns:
        A context manager.
    """
    return nullcontext() if _uses_flex(model) and not _is_compiled(model) else _eager.held()


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _uses_flex(model: nn.Module) -> bool:
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(c, "_attn_implementation", None) == "flex_attention" for c in configs)
