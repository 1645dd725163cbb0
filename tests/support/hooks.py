"""Count what a lens leaves behind, and modules to attach one to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlens import Capture, Observer
from attnlens.tap import dispatch as interface
from tests.conftest import PATCHED, PRISTINE

HOOK_TABLES = [
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
]


def hooks(model: nn.Module) -> int:
    """Number of hooks of any kind in a model."""
    return sum(len(getattr(module, table)) for module in model.modules() for table in HOOK_TABLES)


def patched() -> bool:
    """Whether transformers' dispatch is wrapped at the moment, or a listener is left."""
    attributes = vars(interface.AttentionInterface)
    wrapped = any(attributes.get(name, PRISTINE[name]) is not PRISTINE[name] for name in PATCHED)
    return wrapped or bool(interface._listeners)


def is_clean(model: nn.Module) -> bool:
    """Whether nothing of any lens is left."""
    return hooks(model) == 0 and not patched()


class Watcher(Observer):
    """Call a function with every capture; keep nothing."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def update(self, capture: Capture) -> None:
        self.look(capture)

    def compute(self) -> None:
        raise NotImplementedError

    reset = merge = state_dict = load_state_dict = compute  # type: ignore[assignment]


class Siamese(nn.Module):
    """One encoder, called for each of two inputs."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
        left, right = (self.encoder(**inputs)[0][:, 0] for inputs in (first, second))
        return torch.cosine_similarity(left, right)
