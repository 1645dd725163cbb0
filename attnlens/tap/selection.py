"""Which attention a lens looks at, checked against the modules there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from attnlens.capture import Kind
from attnlens.errors import InputError
from attnlens.tap.sites import Catalogue, Site

Kinds = Iterable[Kind] | Kind | None
KINDS: frozenset[Kind] = frozenset(get_args(Kind))


@dataclass(frozen=True)
class Selection:
    """Which attention a lens looks at.

    Attributes:
        catalogue: the modules of the model.
        layers: layer indices (negative ones from the end of each stack) and module names, or
            None for all.
        kinds: the kinds of attention.
    """

    catalogue: Catalogue
    layers: frozenset[int | str] | None
    kinds: frozenset[Kind]

    def takes(self, site: Site) -> bool:
        """Tell whether some layer that a site may serve is wanted."""
        served = self.catalogue.served_by(site)
        return any(self.accepts(site, layer) for layer in served)

    def accepts(self, site: Site, layer: int) -> bool:
        """Tell whether a call of an attention module is wanted.

        Args:
            site: the attention module.
            layer: the layer that the call serves.

        Returns:
            True if its kind is looked at and the layer, if any were named, is one of them.
        """
        named = self.layers is not None and site.name in self.layers
        return site.kind in self.kinds and (named or self._counts(site, layer))

    def accepts_layer(self, site: Site, layer: int) -> bool:
        """Tell whether a Transformer layer, or an attention module inside it, is wanted.

        Args:
            site: the layer.
            layer: its index in the running forward.

        Returns:
            True if it is, or if no layers were named.
        """
        names = (f"{name}." for name in self.layers or () if isinstance(name, str))
        inside = any(name.startswith(f"{site.name}.") for name in names)
        return inside or self._counts(site, layer)

    def _counts(self, site: Site, layer: int) -> bool:
        """Whether an index, counted from either end of its stack, is wanted."""
        if self.layers is None:
            return True
        return not self.layers.isdisjoint((layer, layer - self.catalogue.depth(site.stack)))


def select(
    catalogue: Catalogue, layers: Iterable[int | str] | None = None, kinds: Kinds = None
) -> Selection:
    """Check what a user asks for against the modules there are.

    Args:
        catalogue: the modules of the model.
        layers: layer indices and module names; None takes all.
        kinds: kinds of attention. None takes the encoder's self-attention, or where a model has
            none, every self-attention.

    Returns:
        The selection.

    Raises:
        InputError: if a layer, name or kind cannot match anything.
    """
    wanted = None if layers is None else frozenset(layers)
    selection = Selection(catalogue, wanted, _checked_kinds(catalogue, kinds))
    for layer in wanted or ():
        _check_layer(layer, selection)
    if wanted is not None and not wanted:
        raise InputError("layers is empty, so there is nothing to look at; None looks at all.")
    return selection


def _checked_kinds(catalogue: Catalogue, kinds: Kinds) -> frozenset[Kind]:
    present = {site.kind for site in catalogue.interface}
    if kinds is None:
        promised = present or catalogue.kinds()
        both = promised and "encoder" not in promised
        return frozenset(("encoder", "decoder") if both else ("encoder",))
    wanted = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    if not wanted or wanted - KINDS:
        raise InputError(f"kinds must be among {sorted(KINDS)}. Got {sorted(wanted)}.")
    present |= catalogue.kinds()
    if present and not wanted & present:
        raise InputError(f"The model has attention of kinds {sorted(present)} only.")
    return wanted


def _check_layer(layer: int | str, selection: Selection) -> None:
    """Raise where a layer index or name can match no attention module."""
    catalogue = selection.catalogue
    sites = [site for site in catalogue.interface if site.kind in selection.kinds]
    example = f" Names look like {sites[0].name!r}." if sites else ""
    if isinstance(layer, str):
        inside = [site.name for site in sites if site.name.startswith(f"{layer}.")]
        if not catalogue.has(layer) or inside:
            what = f"holds attention at {inside[0]!r}" if inside else "is no module of the model"
            raise InputError(f"layers={layer!r} {what}.{example}")
        return
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise InputError(f"layers holds indices and module names. Got {layer!r}.")
    depth = max((catalogue.depth(site.stack) for site in sites), default=None)
    if depth is not None and not -depth <= layer < depth:
        raise InputError(
            f"layers={layer!r} matches no attention module: there are {depth} layers.{example}"
        )
