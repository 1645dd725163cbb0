"""Which layer an invocation is: by call where modules are shared, else by module."""

from __future__ import annotations

from collections import Counter

from attnlens.tap.sites import Site


class LayerOrder:
    """Count the invocations of sites, and their calls, in one forward pass."""

    def __init__(self) -> None:
        self._invoked: set[str] = set()
        self._repeating: set[str] = set()
        self._layer: dict[str, int] = {}  # stack → layer of its latest invocation
        self._ordinal: Counter[str] = Counter()
        self._calls: Counter[tuple[str, int]] = Counter()

    def restart(self) -> None:
        """Begin a nested forward: the layers of an encoder called twice count anew."""
        self._invoked.clear()
        self._repeating.clear()
        self._layer.clear()

    def invoke(self, site: Site) -> None:
        """Enter a site's module."""
        if site.name in self._invoked:
            self._repeating.add(site.stack)
        self._invoked.add(site.name)
        layer = site.layer
        if site.stack in self._repeating:
            layer = max(layer, self._layer.get(site.stack, -1) + 1)
        self._layer[site.stack] = layer
        self._ordinal[site.name] = 0

    def layer(self, site: Site) -> int:
        """Return the layer of the invocation that is running."""
        return self._layer.get(site.stack, site.layer)

    def ordinal(self, site: Site) -> int:
        """Return the position of the current call in its invocation, counted from zero."""
        return self._ordinal[site.name] - 1

    def count(self, site: Site, layer: int) -> int:
        """Count this call, and return how many of the same layer came before in this forward."""
        index = self._calls[site.stack, layer]
        self._calls[site.stack, layer] += 1
        self._ordinal[site.name] += 1
        return index
