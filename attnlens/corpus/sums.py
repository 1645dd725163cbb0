"""Sums whose last bit does not depend on the order in which they were added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from attnlens.observer import (
    Observer,
    State,
    SumObserver,
    Sums,
    is_summed,
    named_sums,
    part_of,
    sums_by_layer,
)
from attnlens.results import LayerKey

_STATE, _LOW = "state/", "low/"


class ExactSums:
    """An observer whose sums over chunks are kept in twice the precision of float64.

    The result is the same in whatever order chunks are added, by one process or by many: what
    float64 rounds off is kept beside each sum, and returned to the sum once it is large enough.
    This is exact for zeros and for terms whose sizes lie within a factor of 2⁴⁰ of each other.

    Args:
        observer: the observer; between two chunks it holds the rounded sums.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._low: dict[LayerKey, Sums] = {}

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Let the observer see a chunk; after an exception its sums are as they were before."""
        if not isinstance(self.observer, SumObserver):
            yield
            return
        total, self.observer.sums = self.observer.sums, {}
        try:
            yield
        except BaseException:
            self.observer.sums = total
            raise
        of_chunk, self.observer.sums = self.observer.sums, total
        for key, sums in of_chunk.items():
            self._add(self.observer, key, sums)

    def state_dict(self) -> State:
        """Return the state of the observer and what was rounded off as named tensors."""
        parts = {_STATE: self.observer.state_dict(), _LOW: named_sums(self._low)}
        return {f"{part}{name}": t for part, own in parts.items() for name, t in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state.

        Args:
            state: what :meth:`state_dict` returned.
        """
        self.observer.load_state_dict(part_of(state, _STATE))
        self._low = sums_by_layer(part_of(state, _LOW))

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add what another has seen.

        Args:
            state: what its :meth:`state_dict` returned.
        """
        added, observer = part_of(state, _STATE), self.observer
        if not isinstance(observer, SumObserver):
            observer.add_state(added)
            return
        before = {key: dict(sums) for key, sums in observer.sums.items()}
        observer.add_state(added)
        for (stack, layer), sums in before.items():
            terms = part_of(added, f"{stack}/{layer}/")
            self._keep_rounding((stack, layer), sums, terms, observer.sums[stack, layer])
        for key, sums in sums_by_layer(part_of(state, _LOW)).items():
            self._add(observer, key, sums)

    def _add(self, observer: SumObserver, key: LayerKey, sums: Sums) -> None:
        before = dict(observer.sums.get(key, {}))
        observer.add(key, sums)
        if before:
            self._keep_rounding(key, before, sums, observer.sums[key])

    def _keep_rounding(self, key: LayerKey, before: Sums, added: Sums, total: Sums) -> None:
        """Move what an addition rounded off into the low parts, and the largest share back."""
        low = self._low.setdefault(key, {})
        for name, term in added.items():
            if not is_summed(name) or not term.is_floating_point():
                continue
            lost = _rounding(before[name], term.to(before[name].device), total[name])
            low[name] = low[name] + lost if name in low else lost
            rounded = total[name] + low[name]
            low[name] = _rounding(total[name], low[name], rounded)
            total[name] = rounded


def _rounding(first: Tensor, second: Tensor, total: Tensor) -> Tensor:
    """Return exactly what `first + second` rounded off; zero where the sum is not finite."""
    # Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    part = total - first
    lost = (first - (total - part)) + (second - part)
    return torch.where(lost.isfinite(), lost, 0.0)
