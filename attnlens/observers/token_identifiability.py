"""Can a token be told from its hidden state? Maps back to the input, and the rate of success."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from attnlens.capture import LayerCapture
from attnlens.errors import AttnLensError, AttnLensWarning, InputError, UnsupportedAttentionError
from attnlens.functional.token_maps import Distance, MapKind, NormalEquations, normal_equations
from attnlens.observers.base import LayerKey, LayerObserver, SumObserver, Sums
from attnlens.observers.map_training import MapTraining
from attnlens.observers.token_rates import (
    Counts,
    Maps,
    Target,
    fit_maps,
    recovery_rate,
    solve_maps,
    stored_equations,
    test_sequences,
    tokens_of,
)
from attnlens.observers.token_store import (
    TEST,
    TRAIN,
    VALIDATION,
    PackedTokens,
    TokenStore,
    fingerprint,
)

Labels = Tensor | Callable[[Mapping[str, Any]], Tensor] | None
Solver = Literal["auto", "adam", "closed"]

_ENTERED = -1  # the layer under which sums over what entered the first one are kept
_SPLITS = ("train", "validation", "test")
_STORE = "store."


@dataclass(frozen=True)
class TokenIdentifiabilityResult:
    """Rates at which tokens of the test split are identified; all in `[0, 1]`.

    Tensors are float64 on the CPU, with one row per layer; NaN where there was nothing to count.

    Attributes:
        layers: `(stack, layer)` of each of the L rows.
        map: `"naive"`, `"linear"` or `"mlp"`.
        distance: `"cosine"` or `"l2"`.
        labels: names of the G labels.
        offsets: offsets of the neighbours, −k … −1, 1 … k.
        sequences: number of sequences in the train, validation and test splits, `[3]`.
        tokens: number of tokens in them, `[3]`.
        rate: tokens identified from the layer on which the map was trained, `[L]`.
        error: standard error of `rate` over test sequences, `[L]`.
        transfer: tokens identified by the map of each layer, first, from the hidden states of
            each layer, second, `[L, L]`.
        by_label: `rate` by label, `[L, G]`.
        neighbours: tokens whose neighbour at each offset is identified, by maps trained for that,
            `[L, 2k]`.
        words: control: rate when the targets are word embeddings, without position or anything
            else, by maps trained for that, `[L]`. Any position of the same word is right.
        position: control: rate of a guess that knows the position and nothing else, the mean
            input embedding at that position, a scalar.
        rescaled: control: `rate` after every hidden state is multiplied by a random number, `[L]`.
        rotated: control: `rate` after every hidden state is turned in a random direction, `[L]`.
        chance: rate of guessing a token of the sequence at random, a scalar.
        loss: loss on the validation split, `[L]`; NaN for the naive map.
        epochs: epochs of training until that loss, `[L]`; NaN where there was none.
        ridge: ridge term of a map in closed form, `[L]`; NaN elsewhere.
    """

    layers: tuple[LayerKey, ...]
    map: MapKind
    distance: Distance
    labels: tuple[str, ...]
    offsets: tuple[int, ...]
    sequences: Tensor
    tokens: Tensor
    rate: Tensor
    error: Tensor
    transfer: Tensor
    by_label: Tensor
    neighbours: Tensor
    words: Tensor
    position: Tensor
    rescaled: Tensor
    rotated: Tensor
    chance: Tensor
    loss: Tensor
    epochs: Tensor
    ridge: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return every quantity by name."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }


@dataclass(eq=False)
class _Chain:
    """What one run of a stack has left so far: its input and the outputs of chosen layers."""

    stack: str
    entered: Tensor  # [B, K, M]
    mask: Tensor
    left: dict[int, Tensor] = field(default_factory=dict)


class TokenIdentifiability(SumObserver, LayerObserver):
    """Rates at which input tokens are recovered from the hidden states of every layer.

    While the model runs, sequences with their hidden states are collected, up to a limit beyond
    which a random sample is kept. :meth:`compute` trains a map per layer on the training split,
    all layers together, and counts on the test split. A sequence's split follows from its content
    alone, so equal sequences are in the same split whatever the order, batching or sharding.

    The linear map for the L2 distance has a closed form. Its sums are accumulated while the model
    runs, about `4 M²` numbers per layer and target, and only test sequences are stored.

    Args:
        map: `"linear"`, `"mlp"` (one hidden layer, GELU), or `"naive"`, which takes the hidden
            state itself for the guess.
        distance: of training and of the search for the nearest neighbour, `"cosine"` or `"l2"`.
        layers: layer indices to look at; None looks at all.
        words: gives the word embeddings `[B, K, W]` of token ids `[B, K]`, as does
            `model.get_input_embeddings()`; without it there is no word control.
        neighbours: k, the largest distance of a neighbour to recover; each of the 2k offsets needs
            another training.
        labels: integer label of every token, `[B, K]`, of the forward passes to come; or what
            computes it from the model's arguments by name. May be set between forward passes.
            None: all share label 0.
        label_names: names of the G labels; tokens with other labels are left out of `by_label`.
        rescaling: largest factor of the random rescaling control.
        angle: of the random rotation control, in degrees.
        split: shares of the train, validation and test sequences.
        seed: of the splits, the sample, the first parameters, the batches and the controls.
        solver: `"adam"`, `"closed"`, or `"auto"` for the closed form where there is one.
        max_tokens: most tokens to store.
        max_bytes: most bytes to store; training takes about as much again.
        folder: where to store them in float16, as safetensors files that :meth:`reset` removes;
            in memory, in float32, if None.
        positions: P, the number of positions that the position control knows.
        training: how maps are trained.

    Raises:
        InputError: if arguments are of the wrong value or do not go together.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4. The controls
        are not in the paper.
    """

    def __init__(
        self,
        map: MapKind = "linear",
        distance: Distance = "cosine",
        layers: Iterable[int] | None = None,
        *,
        words: Callable[[Tensor], Tensor] | None = None,
        neighbours: int = 0,
        labels: Labels = None,
        label_names: Sequence[str] = ("all",),
        rescaling: float = 2.0,
        angle: float = 30.0,
        split: tuple[float, float, float] = (0.70, 0.15, 0.15),
        seed: int = 0,
        solver: Solver = "auto",
        max_tokens: int | None = None,
        max_bytes: int = 2**30,
        folder: str | os.PathLike[str] | None = None,
        positions: int = 512,
        training: MapTraining | None = None,
    ) -> None:
        super().__init__(layers)
        if len(split) != 3 or min(split) <= 0 or abs(sum(split) - 1) > 1e-9:
            raise InputError(f"split must be three positive shares that sum to one. Got {split}.")
        if rescaling < 1 or not 0 <= angle <= 180 or neighbours < 0 or positions < 1:
            raise InputError(
                f"rescaling must be at least 1, angle in [0, 180], neighbours at least 0 and "
                f"positions at least 1. Got {rescaling}, {angle}, {neighbours}, {positions}."
            )
        self._choose(map, distance, solver)
        self.words = words
        self.offsets = tuple(o for o in range(-neighbours, neighbours + 1) if o)
        self.labels = labels
        self.label_names = tuple(label_names)
        self.rescaling, self.angle = rescaling, angle
        self.split = split
        self.seed = seed
        self.positions = positions
        self.training = MapTraining() if training is None else training
        self.store = TokenStore(max_tokens, max_bytes, folder)
        self.streams = self.closed
        self.stored = (TEST,) if self.closed or map == "naive" else (TRAIN, VALIDATION, TEST)
        self._chains: list[_Chain] = []
        self._inputs: Mapping[str, Any] = {}

    def using(
        self,
        map: MapKind,
        distance: Distance | None = None,
        *,
        solver: Solver = "auto",
        training: MapTraining | None = None,
    ) -> TokenIdentifiability:
        """Return an observer with another map that shares what this one has collected.

        Args:
            map: see the class.
            distance: see the class; the same if None.
            solver: see the class.
            training: see the class; the same if None.

        Returns:
            The observer.

        Raises:
            InputError: if this one stores test sequences only, and the map must be trained.
        """
        other = copy(self)
        other._choose(map, self.distance if distance is None else distance, solver)
        other.training = self.training if training is None else training
        if map != "naive" and TRAIN not in self.stored and not (self.streams and other.closed):
            raise InputError(
                f"This observer stores test sequences only, because map={self.map!r} needs no "
                f'others. Collect with map="mlp", and derive the rest with using().'
            )
        return other

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
        if layer.link == "first" or not self._chains or self._chains[-1].stack != layer.stack:
            self._chains.append(_Chain(layer.stack, layer.hidden, layer.mask))
        chain = self._chains[-1]
        if layer.output.dim() != 3 or layer.output.shape != chain.entered.shape:
            raise UnsupportedAttentionError(
                f"{layer.name} leaves {list(layer.output.shape)} of {list(chain.entered.shape)} "
                f"that entered {layer.stack}, so its tokens are not those of the input."
            )
        if layer.chosen and (self.layers is None or layer.layer in self.layers):
            chain.left[layer.layer] = layer.output

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

    def compute(self) -> TokenIdentifiabilityResult:
        """Train the maps and count what they identify.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if no sequence was seen, or a split is empty.
        """
        keys = self._layer_keys()
        entered = {name: t.cpu() for name, t in self.sums[(keys[0][0], _ENTERED)].items()}
        for name, count in zip(_SPLITS, entered["sequences"], strict=True):
            if not count:
                raise AttnLensError(
                    f"None of the {int(entered['sequences'].sum())} sequences seen is in the "
                    f"{name} split. Run more text through the model, or change seed or split."
                )
        if entered["skipped"] > 0:
            warnings.warn(
                f"{int(entered['skipped'])} sequence(s) held NaN or Inf and were left out. Check "
                f"the model's inputs.",
                AttnLensWarning,
                stacklevel=2,
            )
        layers = len(keys)
        own = self._fit(0, keys)
        counts = Counts(own.parameters, self.distance, len(self.label_names))
        mean_entered = entered["position_sum"] / entered["position_count"][:, None]
        generator = torch.Generator().manual_seed(self.seed)
        for batch in test_sequences(self.store):
            counts.add(
                batch,
                mean_entered=mean_entered.float(),
                rescaling=self.rescaling,
                angle=self.angle,
                generator=generator,
            )
        neighbours = [self._recovered(offset, keys) for offset in self.offsets]
        return TokenIdentifiabilityResult(
            tuple(keys),
            self.map,
            self.distance,
            self.label_names,
            self.offsets,
            sequences=entered["sequences"],
            tokens=entered["tokens"],
            neighbours=torch.stack(neighbours, 1)
            if neighbours
            else torch.zeros(layers, 0).double(),
            words=self._recovered("words", keys),
            loss=own.loss.double().expand(layers),
            epochs=own.epochs.double().expand(layers),
            ridge=own.ridge.double().expand(layers),
            **counts.rates(),
        )

    def reset(self) -> None:
        """Forget everything seen, and remove the files."""
        super().reset()
        self.store.clear()

    def merge(self, other: TokenIdentifiability) -> TokenIdentifiability:
        """Add what another observer has seen.

        Args:
            other: of the same settings; left unchanged.

        Returns:
            This observer.

        Raises:
            InputError: if the other differs in seed, split or what it collects.
        """
        for name in ("seed", "split", "streams", "offsets", "positions", "label_names"):
            if getattr(self, name) != getattr(other, name):
                raise InputError(
                    f"Observers with different {name} cannot be merged. Got "
                    f"{getattr(self, name)!r} and {getattr(other, name)!r}."
                )
        super().merge(other)
        self.store.merge(other.store)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums and the sequences on the CPU; in memory, also from a folder."""
        stored = {f"{_STORE}{name}": t for name, t in self.store.state_dict().items()}
        return super().state_dict() | stored

    def _add_state(self, state: Mapping[str, Tensor]) -> None:
        super()._add_state({n: t for n, t in state.items() if not n.startswith(_STORE)})
        self.store.add_state({
            n.removeprefix(_STORE): t for n, t in state.items() if n.startswith(_STORE)
        })

    def _choose(self, map: MapKind, distance: Distance, solver: Solver) -> None:
        if map not in ("naive", "linear", "mlp") or distance not in ("cosine", "l2"):
            raise InputError(
                f'map must be "naive", "linear" or "mlp" and distance "cosine" or "l2". Got '
                f"{map!r} and {distance!r}."
            )
        solvable = (map, distance) == ("linear", "l2")
        if solver not in ("auto", "adam", "closed") or (solver == "closed" and not solvable):
            raise InputError(
                f'solver must be "auto", "adam" or, for map="linear" and distance="l2", "closed". '
                f"Got {solver!r}."
            )
        self.map: MapKind = map
        self.distance: Distance = distance
        self.closed = solvable and solver != "adam"

    def _layer_keys(self) -> list[LayerKey]:
        """The layers seen, of one stack."""
        keys = [key for key in self.ordered() if key[1] != _ENTERED]
        stacks = list(dict.fromkeys(stack for stack, _ in keys))
        if not keys:
            raise AttnLensError(
                "TokenIdentifiability has seen no complete forward pass of the layers it was "
                "asked for. Run the model inside `with Lens(...)`, and check `layers`."
            )
        if len(stacks) > 1:
            raise AttnLensError(
                f"Tokens of different stacks were seen: {', '.join(stacks)}. Look at one of them: "
                f"pass Lens the part of the model, or kinds=."
            )
        return keys

    def _targets(self) -> tuple[Target, ...]:
        return (0, *self.offsets, *(("words",) if self.words is not None else ()))

    def _fit(self, target: Target, keys: list[LayerKey]) -> Maps:
        """Fit the maps of all layers to a target."""
        if self.map == "naive":
            return Maps((), *[torch.tensor(torch.nan)] * 3)
        if not self.closed:
            return fit_maps(self.store, target, self.map, self.distance, self.training, self.seed)
        if not self.streams:
            train, validation = (
                stored_equations(self.store, split, target) for split in (TRAIN, VALIDATION)
            )
            return solve_maps(train, validation)
        sums = [self.sums[key] for key in keys]
        stacked = (
            torch.stack([layer[f"{target}.{name}"] for layer in sums], 1).cpu()
            for name in NormalEquations._fields
        )
        train, validation = (NormalEquations(*parts) for parts in zip(*stacked, strict=True))
        return solve_maps(train, validation)

    def _recovered(self, target: Target, keys: list[LayerKey]) -> Tensor:
        """Rate at which a target other than the own input embedding is recovered, `[L]`."""
        entered = self.sums[(keys[0][0], _ENTERED)]
        width, words = entered["position_sum"].shape[1], int(entered["word_width_max"])
        if target == "words" and (not words or (self.map == "naive" and words != width)):
            return torch.full((len(keys),), torch.nan, dtype=torch.float64)
        maps = self._fit(target, keys)
        return recovery_rate(self.store, maps.parameters, target, self.distance)

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
        self.add((chain.stack, _ENTERED), self._entered_sums(packed, skipped.sum()))
        for layer, sums in zip(layers, self._layer_sums(packed), strict=True):
            self.add((chain.stack, layer), sums)
        wanted = torch.isin(packed.split, torch.tensor(self.stored, device=mask.device))
        self.store.extend(packed.select(wanted).cpu().sequences())

    def _same_layers(self, chain: _Chain) -> list[int]:
        """The layers of a run, which must be those of the runs before."""
        layers = sorted(chain.left)
        known = sorted(i for stack, i in self.sums if stack == chain.stack and i != _ENTERED)
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
        splits = torch.arange(len(_SPLITS), device=packed.split.device)
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
