"""Keep raw and effective attention maps, within a stated memory bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from attnlens.algebra.problem import problem
from attnlens.capture import Capture, Kind
from attnlens.errors import AttnLensError, InputError, MemoryBoundError
from attnlens.observer import Observer, checked_indices
from attnlens.results import LayerKey, Result
from attnlens.saving import storable

_KINDS = get_args(Kind)
_TENSORS = ("raw", "effective", "mask", "value_norm", "minimal")


@storable("entry")
@dataclass(frozen=True, repr=False)
class AttentionMap(Result):
    """Raw and effective attention of one call.

    Attributes:
        stack: stack of the layer.
        layer: layer index.
        heads: indices of the heads that were kept.
        raw: `[B, h, Q, K]` float32, A.
        effective: `[B, h, Q, K]` float32, A⊥.
        mask: `[B, 1 or h, Q, K]` bool, True where a real query may attend.
        kind: `"encoder"`, `"decoder"` or `"cross"` attention.
        value_norm: `[B, h, 1, K]` float32, `‖T_j‖` (`‖V_j‖` where H is not known), so that
            `raw * value_norm` is norm-weighted attention (Kobayashi et al., "Attention is Not Only
            a Weight", EMNLP 2020); None where it is not known.
        minimal: `[B, h, Q, K]` float32, the distribution of least norm with the same output; None
            where it was not asked for.
    """

    stack: str
    layer: int
    heads: tuple[int, ...]
    raw: Tensor
    effective: Tensor
    mask: Tensor
    kind: Kind = "encoder"
    value_norm: Tensor | None = None
    minimal: Tensor | None = None

    axes: ClassVar = {"example": "", "head": "heads", "query": "", "key": ""}


class EffectiveAttention(Observer):
    """Keep raw and effective maps of chosen layers and heads on the CPU.

    Args:
        layers: layer indices to keep; None keeps all that the lens delivers.
        heads: head indices to keep; None keeps all.
        simplex: keep the row sums of A (`LN(`[T, 1]`)` instead of `LN(T)`).
        minimal: keep the distribution of least norm with the same output too, which costs more
            than the forward pass.
        max_bytes: bound on the memory of all kept maps; an error is raised before it is crossed.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.

    Examples:
        >>> maps = EffectiveAttention(layers=[3], heads=[7])
        >>> with Lens(model, maps), torch.no_grad():
        ...     output = model(**batch)
        >>> tuple(maps.compute()[0].effective.shape)
        (2, 1, 19, 19)
    """

    def __init__(
        self,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        *,
        simplex: bool = False,
        minimal: bool = False,
        max_bytes: int = 2**30,
    ) -> None:
        super().__init__(layers)
        self.heads = None if heads is None else checked_indices("heads", heads)
        self.simplex = simplex
        self.minimal = minimal
        self.max_bytes = max_bytes
        self._maps: list[AttentionMap] = []

    @property
    def kept_bytes(self) -> int:
        """Memory of the maps kept so far, in bytes."""
        return _nbytes(self._maps)

    def update(self, capture: Capture) -> None:
        """Keep the maps of one attention call.

        Args:
            capture: the call.

        Raises:
            InputError: if a head index does not exist in this layer.
            MemoryBoundError: if keeping them would cross `max_bytes`.
        """
        batch, heads, queries, keys, _ = capture.shape
        chosen = tuple(range(heads)) if self.heads is None else self.heads
        if any(not 0 <= head < heads for head in chosen):
            raise InputError(
                f"heads={list(chosen)} but {capture.site} (layer {capture.layer}) has heads "
                f"0 to {heads - 1}."
            )
        masks = capture.support.keys.shape[1]
        kept = 12 if self.minimal else 8  # bytes of an entry
        needed = batch * keys * (queries * (kept * len(chosen) + masks) + 4 * len(chosen))
        if self.kept_bytes + needed > self.max_bytes:
            raise MemoryBoundError(
                f"Keeping {len(chosen)} head(s) of {capture.site} for {batch} example(s) of "
                f"{queries} × {keys} tokens needs {needed:,} bytes on top of "
                f"{self.kept_bytes:,}, above max_bytes={self.max_bytes:,}. Choose fewer layers "
                f"or heads, call reset() between batches, or raise max_bytes."
            )
        raw = capture.attention()
        projected = capture.value_basis(self.simplex).project(raw)
        effective = torch.where(problem(capture).finite[..., None, None], projected, torch.nan)
        mask = capture.support.mask() & capture.real_rows[..., None]
        mask = mask[:, list(chosen)] if masks > 1 else mask
        index = list(chosen)
        minimal = None
        if self.minimal:
            minimal = _kept(capture.minimal_distribution().distribution[:, index])
        self._maps.append(
            AttentionMap(
                capture.stack,
                capture.layer,
                chosen,
                _kept(raw[:, index]),
                _kept(effective[:, index]),
                mask.to("cpu", copy=True),
                capture.kind,
                _kept(problem(capture).value_norms[:, index, None]),
                minimal,
            )
        )

    def compute(self) -> list[AttentionMap]:
        """Return the maps in the order in which they were seen.

        Returns:
            One entry per attention call.

        Raises:
            AttnLensError: if nothing was seen.
        """
        if not self._maps:
            raise AttnLensError(
                "EffectiveAttention has seen no attention call. Run the model inside "
                "`with Lens(...)`, and check `layers`."
            )
        return list(self._maps)

    def reset(self) -> None:
        """Drop the maps."""
        self._maps = []

    def state_dict(self) -> dict[str, Tensor]:
        """Return the maps, named `index/stack/layer/quantity`."""
        state = {}
        for index, kept in enumerate(self._maps):
            prefix = f"{index}/{kept.stack}/{kept.layer}"
            state[f"{prefix}/heads"] = torch.tensor(kept.heads)
            state[f"{prefix}/kind"] = torch.tensor(_KINDS.index(kept.kind))
            for name in _TENSORS:
                if getattr(kept, name) is not None:
                    state[f"{prefix}/{name}"] = getattr(kept, name)
        return state

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Append maps.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            MemoryBoundError: if keeping them would cross `max_bytes`.
        """
        entries: dict[int, tuple[LayerKey, dict[str, Any]]] = {}
        for name, tensor in state.items():
            head, quantity = name.rsplit("/", 1)
            index, rest = head.split("/", 1)
            stack, layer = rest.rsplit("/", 1)
            entry = entries.setdefault(int(index), ((stack, int(layer)), {}))
            if quantity == "heads":
                entry[1][quantity] = tuple(tensor.tolist())
            else:
                entry[1][quantity] = _KINDS[int(tensor)] if quantity == "kind" else tensor
        maps = [
            AttentionMap(stack, layer, **parts)
            for _, ((stack, layer), parts) in sorted(entries.items())
        ]
        if self.kept_bytes + _nbytes(maps) > self.max_bytes:
            raise MemoryBoundError(
                f"Adding maps of {_nbytes(maps):,} bytes to {self.kept_bytes:,} crosses "
                f"max_bytes={self.max_bytes:,}."
            )
        self._maps += maps


def stacked_maps(
    maps: Iterable[AttentionMap], stack: str | None = None, *, raw: bool = False
) -> tuple[Tensor, ...]:
    """Put maps into the layout of `outputs.attentions`.

    Args:
        maps: maps as they were seen.
        stack: the stack of layers; may be left out where there is only one.
        raw: take raw attention instead of effective.

    Returns:
        `[B, H, Q, K]` for each layer, first to last; all calls of a layer along B.

    Raises:
        InputError: if there are several stacks or none of that name, or calls of different size.
    """
    layers: dict[LayerKey, list[Tensor]] = {}
    for seen in maps:
        layers.setdefault((seen.stack, seen.layer), []).append(seen.raw if raw else seen.effective)
    stacks = sorted({name for name, _ in layers})
    if stack is None and len(stacks) == 1:
        stack = stacks[0]
    if stack not in stacks:
        raise InputError(f"stack must be one of {', '.join(stacks)}. Got {stack!r}.")
    chosen = [layers[key] for key in sorted(layers) if key[0] == stack]
    for calls in chosen:
        sizes = {call.shape[1:] for call in calls}
        if len(sizes) > 1:
            raise InputError(
                f"{stack} was seen with maps of different size, "
                f"{', '.join(str(list(size)) for size in sorted(sizes))} (heads, queries, keys). "
                f"Call reset() between batches, or pad them to one length."
            )
    return tuple(torch.cat(calls) for calls in chosen)


def _nbytes(maps: Iterable[AttentionMap]) -> int:
    tensors = (getattr(entry, name) for entry in maps for name in _TENSORS)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _kept(maps: Tensor) -> Tensor:
    """A float32 copy on the CPU that shares no memory with the model's tensors."""
    return maps.to("cpu", torch.float32, copy=True)
