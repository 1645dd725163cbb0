"""Find the heads of a model: the module that reads each layer's context, and where in its input.

One forward pass in evaluation mode on small inputs tells which module is W_O of which layer, how
many heads it reads and how wide they are. Rows are numbered as in the results of observers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.capture import Capture, Kind
from attnlens.errors import UnsupportedAttentionError
from attnlens.tap.outputs import output_tensors, pretrained_inside
from attnlens.tap.projection import linear_hooks
from attnlens.tap.sites import Catalogue, Selection, select
from attnlens.tap.tap import Tap
from attnlens.texts.trial_inputs import example_inputs


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """The heads of one layer and the module that reads their contexts.

    Attributes:
        stack: name of the attention module with its indices replaced by `*`.
        layer: index in its stack, counted by call where a module is shared.
        site: name of the attention module.
        heads: H.
        width: D.
        group: number of query heads that share a key head.
        projection: W_O, or None for the reason in `reason`.
        name: name of W_O.
        axis: dimension of W_O's input that holds the heads, side by side.
        in_order: whether W_O's input is `[B, Q, H·D]`, in the order of the context.
        reason: why there is no projection.
    """

    stack: str
    layer: int
    site: str
    heads: int
    width: int
    group: int = 1
    projection: nn.Module | None = None
    name: str = ""
    axis: int = -1
    in_order: bool = False
    reason: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Stack and layer."""
        return self.stack, self.layer

    @property
    def label(self) -> str:
        """The layer in words, for messages."""
        return f"layer {self.layer} ({self.site})"


class Probe:
    """A forward pass on small inputs that leaves no trace in the model or the random state.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        inputs: keyword inputs of the model; made up for the pretrained model by default.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self._called = model
        if inputs is None:
            self._called = pretrained = pretrained_inside(model)
            inputs = example_inputs(pretrained)
        self._inputs = dict(inputs)

    def __call__(self) -> list[Tensor]:
        """Run the model in evaluation mode, always with the same random numbers.

        Returns:
            Every tensor it returned.
        """
        with evaluating(self.model), torch.random.fork_rng(_devices(self.model)):
            torch.manual_seed(0)
            return output_tensors(self._called(**self._inputs))


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Put every module back into training or evaluation mode, as it was, after a block.

    Args:
        model: any module.

    Yields:
        Nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode for a block; afterwards every module is as it was.

    Args:
        model: any module.

    Yields:
        Nothing.
    """
    with modes_restored(model):
        model.eval()
        yield


def find_heads(probe: Probe, kinds: Iterable[Kind] | Kind | None = None) -> tuple[LayerHeads, ...]:
    """Find the heads of every layer.

    Args:
        probe: runs the model.
        kinds: kinds of attention, as for a lens.

    Returns:
        One entry per layer, in the order of the rows of `HeadStatistics`.

    Raises:
        UnsupportedAttentionError: if no attention was seen.
    """
    captures = _captures(probe, selection_of(probe.model, kinds))
    if not captures:
        raise UnsupportedAttentionError(
            f"No attention was seen in {type(probe.model).__name__}, so it has no heads to mask, "
            f"prune or score. attnlens.checking.check(model) says more."
        )
    names = {
        capture.output_projection.name
        for capture in captures
        if capture.output_projection is not None
    }
    received = _received(probe, names)
    layers: dict[tuple[str, int], list[Capture]] = {}
    for capture in captures:
        layers.setdefault((capture.stack, capture.layer), []).append(capture)
    calls = {name: iter(inputs) for name, inputs in received.items()}
    modules = dict(probe.model.named_modules())
    found = [_layer(calls, modules, group) for group in layers.values()]
    order = {stack: place for place, stack in enumerate(dict.fromkeys(s for s, _ in layers))}
    return tuple(sorted(found, key=lambda layer: (order[layer.stack], layer.layer)))


def selection_of(model: nn.Module, kinds: Iterable[Kind] | Kind | None) -> Selection:
    """Choose every layer of some kinds of attention.

    Args:
        model: the model.
        kinds: kinds of attention, as for a lens.

    Returns:
        The selection.
    """
    return select(Catalogue(model), None, (kinds,) if isinstance(kinds, str) else kinds)


def _captures(probe: Probe, selection: Selection) -> list[Capture]:
    captures: list[Capture] = []
    with ExitStack() as stack, torch.no_grad():
        Tap(probe.model, selection, captures.append, every=1).attach(stack)
        probe()
    return captures


def _received(probe: Probe, names: set[str]) -> dict[str, list[Tensor]]:
    """The inputs of some linear modules, call by call."""
    kept: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str, module: nn.Module, received: Tensor) -> None:
        if name in kept:
            kept[name].append(received)

    with ExitStack() as stack, torch.no_grad():
        for handle in linear_hooks(probe.model, keep):
            stack.callback(handle.remove)
        probe()
    return kept


def _layer(
    calls: Mapping[str, Iterator[Tensor]], modules: Mapping[str, nn.Module], group: list[Capture]
) -> LayerHeads:
    """Describe the layer that some captures are of."""
    first, *others = group
    _, heads, _, _, width = first.shape
    keys = first.grouped_value.shape[1]
    bare = LayerHeads(first.stack, first.layer, first.site, heads, width, heads // max(keys, 1))
    output = first.output_projection
    if output is None:
        return replace(bare, reason=first.projection_reason)
    if any(o.output_projection is None or o.output_projection.name != output.name for o in others):
        return replace(bare, reason="its attention products go to different output projections")
    received = next(calls[output.name], None)
    if received is None:
        return replace(bare, reason=f"{output.name} is applied without being called as a module")
    batch, _, queries, _, _ = first.shape
    context = first.context.transpose(1, 2).flatten(2)
    module = modules[output.name]
    return replace(
        bare,
        projection=module,
        name=output.name,
        axis=1 if isinstance(module, (nn.Conv1d, nn.Conv2d)) else -1,
        in_order=received.shape == (batch, queries, heads * width)
        and torch.equal(context, received),
    )


def _devices(model: nn.Module) -> list[int]:
    """CUDA devices a model lives on: their random state is put back as well."""
    found = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    return sorted(found)
