"""Find the heads of a model: the module that reads each layer's context, and where in its input.

One forward pass in evaluation mode on small inputs tells which module is W_O of which layer, how
many heads it reads and how wide they are. Rows are numbered as in the results of observers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attnlens.capture import Capture, Kind
from attnlens.errors import UnsupportedAttentionError
from attnlens.results import LayerKey
from attnlens.tap.interrupts import attached
from attnlens.tap.projection import linear_hooks
from attnlens.tap.selection import Kinds, select
from attnlens.tap.sites import Catalogue
from attnlens.tap.tap import Tap
from attnlens.tap.trial import Trial


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """The heads of one layer and the module that reads their contexts.

    Attributes:
        stack: name of the attention module with its indices replaced by `*`.
        layer: index in its stack, counted by call where a module is shared.
        site: name of the attention module.
        kind: encoder or decoder self-attention, or cross-attention.
        heads: H.
        width: D.
        group: number of query heads that share a key head.
        depth: number of blocks in its stack, whether or not all of them attend.
        projection: W_O, or None for the reason in `reason`.
        name: name of W_O.
        axis: dimension of W_O's input that holds the heads, side by side.
        in_order: whether W_O's input is `[B, Q, H·D]`, in the order of the context.
        reason: why there is no projection.
    """

    stack: str
    layer: int
    site: str
    kind: Kind
    heads: int
    width: int
    group: int = 1
    depth: int = 1
    projection: nn.Module | None = None
    name: str = ""
    axis: int = -1
    in_order: bool = False
    reason: str = ""

    @property
    def key(self) -> LayerKey:
        """Stack and layer."""
        return self.stack, self.layer

    @property
    def label(self) -> str:
        """The layer in words, for messages."""
        return f"layer {self.layer} ({self.site})"

    def contexts(self, received: Tensor) -> Tensor:
        """View the input of W_O as the contexts of the heads, `[..., H, D]`."""
        last = received.movedim(self.axis, -1)
        return last.reshape(*last.shape[:-1], self.heads, self.width)


def find_heads(trial: Trial, kinds: Kinds = None) -> tuple[LayerHeads, ...]:
    """Find the heads of every layer.

    Args:
        trial: runs the model.
        kinds: kinds of attention, as for a lens.

    Returns:
        One entry per layer, in the order of the rows of `HeadStatistics`.

    Raises:
        UnsupportedAttentionError: if no attention was seen.
    """
    captures: list[Capture] = []
    received: dict[str, list[Tensor]] = {}  # by linear modules, call by call

    def keep(name: str, module: nn.Module, tensor: Tensor) -> None:
        received.setdefault(name, []).append(tensor)

    catalogue = Catalogue(trial.model)
    tap = Tap(select(catalogue, kinds=kinds), captures.append)

    def attach(stack: ExitStack) -> None:
        for remove in linear_hooks(trial.model, keep):
            stack.callback(remove)
        tap.attach(stack)

    with attached(attach), torch.no_grad():
        trial()
    if not captures:
        raise UnsupportedAttentionError(
            f"No attention was seen in {type(trial.model).__name__}, so it has no heads to mask, "
            f"prune or score. attnlens.checking.check(model) says more."
        )
    by_layer: dict[LayerKey, list[Capture]] = {}
    for capture in captures:
        by_layer.setdefault((capture.stack, capture.layer), []).append(capture)
    calls = {name: iter(tensors) for name, tensors in received.items()}
    modules = dict(trial.model.named_modules())
    layers = [
        replace(_layer(calls, modules, group), depth=catalogue.depth(group[0].stack))
        for group in by_layer.values()
    ]
    stacks = list(dict.fromkeys(stack for stack, _ in by_layer))
    return tuple(sorted(layers, key=lambda layer: (stacks.index(layer.stack), layer.layer)))


def _layer(
    calls: Mapping[str, Iterator[Tensor]], modules: Mapping[str, nn.Module], group: list[Capture]
) -> LayerHeads:
    """Describe the layer that some captures are of."""
    first, *others = group
    batch, heads, queries, _, width = first.shape
    bare = LayerHeads(
        first.stack,
        first.layer,
        first.site,
        first.kind,
        heads,
        width,
        heads // max(first.grouped_value.shape[1], 1),
    )
    name = first.receiver
    if not name:
        return replace(bare, reason=first.projection_reason)
    if any(other.receiver != name for other in others):
        return replace(bare, reason="its attention products go to different output projections")
    received = next(calls.get(name, iter(())), None)
    if received is None:
        return replace(bare, reason=f"{name} is applied without being called as a module")
    context = first.context.transpose(1, 2).flatten(2)
    module = modules[name]
    return replace(
        bare,
        projection=module,
        name=name,
        axis=1 if isinstance(module, (nn.Conv1d, nn.Conv2d)) else -1,
        in_order=received.shape == (batch, queries, heads * width)
        and torch.equal(context, received),
    )
