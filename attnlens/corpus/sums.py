"""Sums whose last bit does not depend on the order in which they were added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy

import torch
from torch import Tensor

from attnlens.observer import Observer, SumObserver, Sums, is_summed
from attnlens.results import LayerKey

_STATE, _LOW = "state/", "low/"


class ExactSums:
    """An observer whose sums over windows are kept in twice the precision.

    Windows are then added in any order, by one process or by many, with the same result: what
    float64 rounds off is kept beside each sum and given back when it amounts to something. This
    is exact for terms whose sizes lie within a factor of 2⁴⁰ of each other, and zeros.

    Args:
        observer: holds the sums, rounded, between two windows.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._low: dict[LayerKey, Sums] = {}

    @contextmanager
    def window(self) -> Iterator[None]:
        """Let the observer see a window; if that fails, its sums are as they were."""
        if not isinstance(self.observer, SumObserver):
            yield
            return
        total, self.observer.sums = self.observer.sums, {}
        try:
            yield
        except BaseException:
            self.observer.sums = total
            raise
        seen, self.observer.sums = self.observer.sums, total
        for key, sums in seen.items():
            self._add(key, sums)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the observer and what was rounded off, as named tensors."""
        state = {f"{_STATE}{name}": t for name, t in self.observer.state_dict().items()}
        for (stack, layer), sums in self._low.items():
            state |= {f"{_LOW}{stack}/{layer}/{name}": t.cpu() for name, t in sums.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state.

        Args:
            state: what :meth:`state_dict` returned.
        """
        self.observer.load_state_dict(_of(state, _STATE))
        self._low = _by_layer(_of(state, _LOW))

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add what another has seen.

        Args:
            state: what its :meth:`state_dict` returned.
        """
        added = _of(state, _STATE)
        if not isinstance(self.observer, SumObserver):
            other = copy(self.observer)
            other.load_state_dict(added)
            self.observer.merge(other)
            return
        before = {key: dict(sums) for key, sums in self.observer.sums.items()}
        self.observer.add_state(added)
        for (stack, layer), sums in before.items():
            names = {name: f"{stack}/{layer}/{name}" for name in sums}
            terms = {name: added[full] for name, full in names.items() if full in added}
            self._keep_rounding((stack, layer), sums, terms)
        for key, sums in _by_layer(_of(state, _LOW)).items():
            self._add(key, sums)

    def _add(self, key: LayerKey, sums: Sums) -> None:
        assert isinstance(self.observer, SumObserver)
        before = dict(self.observer.sums.get(key, {}))
        self.observer.add(key, sums)
        if before:
            self._keep_rounding(key, before, sums)

    def _keep_rounding(self, key: LayerKey, before: Sums, added: Sums) -> None:
        """Move what an addition rounded off into the low parts, and the largest share back."""
        assert isinstance(self.observer, SumObserver)
        total, low = self.observer.sums[key], self._low.setdefault(key, {})
        for name, term in added.items():
            if not is_summed(name) or not term.is_floating_point():
                continue
            lost = _rounding(before[name], term.to(before[name].device), total[name])
            low[name] = low[name] + lost if name in low else lost
            rounded = total[name] + low[name]
            low[name] = _rounding(total[name], low[name], rounded)
            total[name] = rounded


def _rounding(first: Tensor, second: Tensor, total: Tensor) -> Tensor:
    """What `first + second` lost, exactly; zero where it is not finite."""
    # Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    part = total - first
    lost = (first - (total - part)) + (second - part)
    return torch.where(lost.isfinite(), lost, 0.0)


def _of(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in state.items() if name.startswith(prefix)}


def _by_layer(state: Mapping[str, Tensor]) -> dict[LayerKey, Sums]:
    layers: dict[LayerKey, Sums] = {}
    for name, tensor in state.items():
        stack, layer, quantity = name.rsplit("/", 2)
        layers.setdefault((stack, int(layer)), {})[quantity] = tensor
    return layers
