"""Captures that wait for W_O: the linear module whose input *is* the attention output.

Names do not tell (`dense`, `out_proj`, `o_proj`, `proj`, ...), the tensors do. A module is W_O
when it receives the context unchanged, in the context's own memory or value by value.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from attnlens.capture import Capture
from attnlens.tap.hooks import replaying, unobserved
from attnlens.tap.projection import ProjectionSource, linear_hooks

NOT_FOUND = (
    "no linear module received the context unchanged: something sits between the attention "
    "product and the output projection"
)

# By position of the product in an invocation; None is the one of all products, where they share it.
_Sources = dict[int | None, ProjectionSource]


class Waiting:
    """Deliver captures with their output projection, once it is known.

    The first captures of a site wait until their contexts arrive at a linear module, or until
    something else begins. Later ones are delivered at once.

    Args:
        model: the model that runs.
        deliver: called with each capture.
    """

    def __init__(self, model: nn.Module, deliver: Callable[[Capture], None]) -> None:
        self._model = model
        self._deliver = deliver
        self._by_site: dict[str, _Sources] = {}  # of sites whose projection is known
        self._captures: list[Capture] = []  # those that wait, all of one invocation
        self._sources: _Sources = {}  # of those that wait
        self._owners: dict[int, tuple[str, nn.Module]] | None = None

    def attach(self, stack: ExitStack) -> None:
        """Watch the linear modules of the model until the stack closes."""
        for remove in linear_hooks(self._model, self._received):
            stack.callback(remove)

    def add(self, capture: Capture, ordinal: int) -> None:
        """Deliver a capture, or let it wait.

        Args:
            capture: without output projection.
            ordinal: its position among those of its invocation.
        """
        sources = self._by_site.get(capture.site)
        if sources is not None:
            self._send(capture, sources, ordinal)
            return
        # A copy: a model may change its context in place, and then it is no longer `A V` that
        # W_O receives.
        self._captures.append(replace(capture, context=capture.context.clone()))

    def settle(self) -> None:
        """Deliver what waits, its projection found or not."""
        if not self._captures:
            return
        captures, sources = self._captures, self._sources
        self.clear()
        distinct = {sources.get(ordinal) for ordinal in range(len(captures))}
        shared = distinct.pop() if len(distinct) == 1 else None
        if shared is not None:
            sources[None] = shared
        self._by_site.setdefault(captures[0].site, sources)
        for ordinal, capture in enumerate(captures):
            self._send(capture, sources, ordinal)

    def received_by_weight(self, received: Tensor, weight: Tensor) -> None:
        """Hear of a linear function that no module call shows, as in `nn.MultiheadAttention`."""
        if not self._captures:
            return
        if self._owners is None:
            self._owners = _weight_owners(self._model)
        owner = self._owners.get(id(weight))
        if owner is not None:
            self._received(*owner, received)

    def clear(self) -> None:
        """Let go of what waits."""
        self._captures, self._sources = [], {}

    def forget(self) -> None:
        """Let go of everything, projections too."""
        self.clear()
        self._by_site.clear()
        self._owners = None

    def _received(self, name: str, module: nn.Module, received: Tensor) -> None:
        if not self._captures or replaying():
            return
        with unobserved():
            self._compare(name, module, received.detach())
        if len(self._sources) == len(self._captures):
            self.settle()

    def _compare(self, name: str, module: nn.Module, received: Tensor) -> None:
        """Compare the input of a linear module with the contexts that wait.

        Tokens may come in any order, so that sequence-major layouts, unfolded windows and the
        concatenation of packed sequences are recognised; features must be heads × width.
        """
        missing = [i for i in range(len(self._captures)) if i not in self._sources]
        groups = [[i] for i in missing] if len(missing) < 2 else [missing, *([i] for i in missing)]
        for group in groups:
            contexts = [self._captures[i].context for i in group]
            if _same_rows(received, contexts):
                _, heads, _, width = contexts[0].shape
                source = ProjectionSource(name, module, heads, width)
                self._sources.update(dict.fromkeys(group, source))
                return

    def _send(self, capture: Capture, sources: _Sources, ordinal: int) -> None:
        source = sources.get(None) or sources.get(ordinal)
        with unobserved(), torch.autocast(capture.context.device.type, enabled=False):
            output, reason = (None, NOT_FOUND) if source is None else source.read(capture.context)
            capture = replace(
                capture,
                output_projection=output,
                projection_reason=reason,
                receiver="" if source is None else source.name,
            )
            self._deliver(capture)


def _weight_owners(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Map the identity of each parameter to the name and module that have it as their weight."""
    owners: dict[int, tuple[str, nn.Module]] = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf != "weight":  # a weight by use only, as in XLNet, gets a module of its own
            owner, module = name, nn.Module()
            module.weight = parameter
        owners[id(parameter)] = (owner, module)
    return owners


def _same_rows(received: Tensor, contexts: list[Tensor]) -> bool:
    """Whether an input holds the token rows `[H·D]` of the contexts, all and only, in any order."""
    features = contexts[0].shape[1] * contexts[0].shape[3]
    if received.numel() != sum(context.numel() for context in contexts):
        return False
    if received.dtype != contexts[0].dtype or received.dim() < 2:
        return False
    if received.shape[-1] != features:
        if received.shape[1] != features:
            return False
        received = received.movedim(1, -1)  # channels first
    rows = torch.cat([c.transpose(1, 2).reshape(-1, features) for c in contexts])
    other = received.reshape(-1, features)
    return torch.equal(rows, other) or torch.equal(_sorted_rows(rows), _sorted_rows(other))


def _sorted_rows(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort(stable=True)]
