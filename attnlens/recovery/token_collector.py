"""Collect the hidden states of tokens while a model runs: sums, and a sample of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnlens.capture import LayerCapture
from attnlens.errors import AttnLensError, InputError, UnsupportedAttentionError
from attnlens.observer import Labels, LayerObserver, SumObserver, Sums, part_of
from attnlens.recovery.token_maps import NormalEquations, normal_equations
from attnlens.recovery.token_rates import Target, tokens_of
from attnlens.recovery.token_store import (
    TEST,
    TRAIN,
    VALIDATION,
    PackedTokens,
    TokenStore,
    fingerprint,
)
from attnlens.results import LayerKey

ENTERED = -1
"""The layer under which sums over what entered the first one are kept."""

SPLITS = ("train", "validation", "test")
_STORE = "store."


@dataclass(eq=False)
class _Chain:
    """What one run of a stack has left so far: its input and the outputs of chosen layers."""

    stack: str
    entered: Tensor  # [B, K, M]
    mask: Tensor
    left: dict[int, Tensor] = field(default_factory=dict)


class TokenCollector(SumObserver, LayerObserver):
    """Collects what entered the first layer of a stack and what left each, by sequence.

    A sequence's split follows from its content alone, so equal sequences are in the same split
    whatever the order, batching or sharding.

    Args:
        layers: layer indices to look at; None looks at all.
        words: gives the word embeddings `[B, K, W]` of token ids `[B, K]`, or None.
        offsets: of neighbours to recover.
        labels: integer label of every token, `[B, K]`; or what computes it from the model's
            arguments by name; or None.
        split: shares of the train, validation and test sequences.
        seed: of the splits and of the sample.
        positions: P, the number of positions whose mean input embedding is kept.
        streams: whether to sum normal equations of the train and validation splits.
        stored: splits of which sequences are stored.
        store: where.

    Raises:
        InputError: if the split is none.
    """

    alike = ("seed", "split", "streams", "offsets", "positions", "stored")

    def __init__(
        self,
        layers: Iterable[int] | None,
        *,
        words: Callable[[Tensor], Tensor] | None,
        offsets: tuple[int, ...],
        labels: Labels,
        split: tuple[float, float, float],
        seed: int,
        positions: int,
        streams: bool,
        stored: tuple[int, ...],
        store: TokenStore,
    ) -> None:
        super().__init__(layers)
        if len(split) != 3 or min(split) <= 0 or abs(sum(split) - 1) > 1e-9:
            raise InputError(f"split must be three positive shares that sum to one. Got {split}.")
        self.words = words
        self.offsets = offsets
        self.labels = labels
        self.split = split
        self.seed = seed
        self.positions = positions
        self.streams = streams
        self.stored = stored
        self.store = store
        self._chains: list[_Chain] = []
        self._inputs: Mapping[str, Any] = {}

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Take note of the token ids to come.

        Args:
            inputs: the model's arguments by name.
        """
        self._chains, self._inputs = [], inputs

    def update_layer(self, layer: LayerCapture) -> None:
        """Keep what entered the first layer and what left each until the pass ends.

        Args:
            layer: the call.

        Raises:
            UnsupportedAttentionError: if a layer changes the number or the width of the tokens.
        """
        chain = next((c for c in reversed(self._chains) if c.stack == layer.stack), None)
        if layer.link == "first" or chain is None:
            chain = _Chain(layer.stack, layer.hidden, layer.mask)
            self._chains.append(chain)
        if layer.output.dim() != 3 or layer.output.shape != chain.entered.shape:
            raise UnsupportedAttentionError(
                f"{layer.name} leaves {list(layer.output.shape)} of {list(chain.entered.shape)} "
                f"that entered {layer.stack}, so its tokens are not those of the input."
            )
        if layer.chosen and (self.layers is None or layer.layer in self.layers):
            # A copy, because what comes next may change it in place.
            chain.left[layer.layer] = layer.output.clone()

    def end_forward(self, completed: bool) -> None:
        """Collect the sequences of a completed pass.

        Args:
            completed: False if the pass was interrupted; nothing is then collected.
        """
        chains, self._chains = self._chains, []
        inputs, self._inputs = self._inputs, {}
        for chain in chains if completed else ():
            if chain.left:
                self._collect(chain, inputs)

    def layer_keys(self) -> list[LayerKey]:
        """Return the layers seen, which must be of one stack.

        Returns:
            Stack and index of each.

        Raises:
            AttnLensError: if no layer was seen, or those of several stacks.
        """
        keys = [key for key in self.ordered() if key[1] != ENTERED]
        stacks = list(dict.fromkeys(stack for stack, _ in keys))
        if not keys:
            raise AttnLensError(self._nothing())
        if len(stacks) > 1:
            raise AttnLensError(
                f"Tokens of different stacks were seen: {', '.join(stacks)}. Look at one of them: "
                f"pass Lens the part of the model, or kinds=."
            )
        return keys

    def reset(self) -> None:
        """Forget everything seen, and remove the files."""
        super().reset()
        self.store.clear()

    def merge(self, other: TokenCollector) -> TokenCollector:
        """Add what another observer has seen.

        Args:
            other: of the same settings; left unchanged.

        Returns:
            This observer.
        """
        super().merge(other)
        self.store.merge(other.store)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums and the sequences on the CPU; in memory, also from a folder."""
        stored = {f"{_STORE}{name}": t for name, t in self.store.state_dict().items()}
        return super().state_dict() | stored

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add a state to the present one, as if what it saw had been seen here.

        Args:
            state: what :meth:`state_dict` returned.
        """
        super().add_state({n: t for n, t in state.items() if not n.startswith(_STORE)})
        self.store.add_state(part_of(state, _STORE))

    def _nothing(self) -> str:
        return (
            f"{type(self).__name__} has seen no complete forward pass of the layers it was asked "
            f"for. Run the model inside `with Lens(...)`, and check `layers`."
        )

    def _targets(self) -> tuple[Target, ...]:
        return (0, *self.offsets, *(("words",) if self.words is not None else ()))

    def _collect(self, chain: _Chain, inputs: Mapping[str, Any]) -> None:
        """Take the sequences of one run of a stack."""
        layers = self._same_layers(chain)
        mask, left = chain.mask, [chain.left[layer] for layer in layers]
        hidden = torch.stack([chain.entered, *left])[:, mask]  # [L + 1, N, M]
        ids = inputs.get("input_ids")
        ids = ids if isinstance(ids, Tensor) and ids.shape == mask.shape else None
        content = chain.entered[mask].half() if ids is None else ids[mask]
        lengths = mask.sum(1)
        places = [
            fingerprint(part.numpy().tobytes(), self.seed)
            for part in content.cpu().split(lengths.tolist())
        ]
        packed = PackedTokens(
            hidden,
            self._word_embeddings(ids, mask),
            self._token_labels(inputs, mask),
            lengths,
            torch.tensor([priority for _, priority in places], device=mask.device),
            torch.tensor([self._split_of(place) for place, _ in places], device=mask.device),
        )
        finite = torch.ones_like(mask)
        finite[mask] = hidden.isfinite().all(-1).all(0)
        skipped = ~finite.all(1)
        packed = packed.select(~skipped & (lengths > 0))
        self.add((chain.stack, ENTERED), self._entered_sums(packed, skipped.sum()))
        for layer, sums in zip(layers, self._layer_sums(packed), strict=True):
            self.add((chain.stack, layer), sums)
        wanted = torch.isin(packed.split, torch.tensor(self.stored, device=mask.device))
        self.store.extend(packed.select(wanted).cpu().sequences())

    def _same_layers(self, chain: _Chain) -> list[int]:
        """The layers of a run, which must be those of the runs before."""
        layers = sorted(chain.left)
        known = sorted(i for stack, i in self.sums if stack == chain.stack and i != ENTERED)
        if known and known != layers:
            raise UnsupportedAttentionError(
                f"Layers {layers} of {chain.stack} ran where {known} had run before. Turn off "
                f"LayerDrop, for instance with model.eval()."
            )
        return layers

    def _split_of(self, place: float) -> int:
        train, validation, _ = self.split
        return TRAIN if place < train else VALIDATION if place < train + validation else TEST

    def _word_embeddings(self, ids: Tensor | None, mask: Tensor) -> Tensor:
        """Word embeddings of the real tokens, `[N, W]`."""
        if self.words is None:
            return torch.zeros(int(mask.sum()), 0, device=mask.device)
        if ids is None:
            raise InputError(
                f"words needs the model to be called with input_ids {list(mask.shape)}. Pass "
                f"them, or leave words out."
            )
        return self.words(ids).detach()[mask]

    def _token_labels(self, inputs: Mapping[str, Any], mask: Tensor) -> Tensor:
        """Labels of the real tokens, `[N]`."""
        labels = self.labels(inputs) if callable(self.labels) else self.labels
        if labels is None:
            return torch.zeros(int(mask.sum()), dtype=torch.int64, device=mask.device)
        if labels.shape != mask.shape:
            raise InputError(
                f"labels must have the shape of the tokens, {list(mask.shape)}. "
                f"Got {list(labels.shape)}."
            )
        return labels.to(mask.device, torch.int64)[mask]

    def _entered_sums(self, packed: PackedTokens, skipped: Tensor) -> Sums:
        """Numbers of sequences and tokens by split, and train input embeddings by position."""
        splits = torch.arange(len(SPLITS), device=packed.split.device)
        members = (packed.split[:, None] == splits).double()  # [S, 3]
        ends = packed.lengths.cumsum(0)
        starts = (ends - packed.lengths).repeat_interleave(packed.lengths)
        position = torch.arange(len(starts), device=starts.device) - starts
        known = (packed.split == TRAIN).repeat_interleave(packed.lengths)
        known &= position < self.positions
        entered = packed.hidden[0, known].double()
        total = entered.new_zeros(self.positions, entered.shape[1])
        return {
            "sequences": members.sum(0),
            "tokens": (members * packed.lengths[:, None]).sum(0),
            "skipped": skipped.double(),
            "word_width_max": torch.tensor(packed.words.shape[1], dtype=torch.float64),
            "position_sum": total.index_add_(0, position[known], entered),
            "position_count": position[known].bincount(minlength=self.positions).double(),
        }

    def _layer_sums(self, packed: PackedTokens) -> list[Sums]:
        """Normal equations of the train and validation splits, `[2, …]` each, for each layer."""
        layers = range(len(packed.hidden) - 1)
        sums: list[Sums] = [{"tokens": packed.lengths.sum().double()} for _ in layers]
        if not self.streams:
            return sums
        for target in self._targets():
            parts = [
                normal_equations(*tokens_of(packed.select(packed.split == split), target))
                for split in (TRAIN, VALIDATION)
            ]
            for name, *entries in zip(NormalEquations._fields, *parts, strict=True):
                for layer in layers:
                    both = torch.stack([entry[layer] for entry in entries])
                    sums[layer][f"{target}.{name}"] = both
        return sums
