"""Can a token be told from its hidden state? Maps back to the input, and the rate of success."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from attnlens.capture import LayerCapture
from attnlens.errors import AttnLensError, InputError, UnsupportedAttentionError
from attnlens.observer import (
    ChainObserver,
    Labels,
    SumObserver,
    checked_labels,
    part_of,
    warn_of_skipped,
)
from attnlens.recovery.map_training import MapTraining
from attnlens.recovery.packed_tokens import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    PackedTokens,
    Target,
    entered_sums,
    equation_sums,
    fingerprint,
)
from attnlens.recovery.recovery_result import TokenIdentifiabilityResult
from attnlens.recovery.token_maps import Distance, MapKind
from attnlens.recovery.token_rates import Recovery
from attnlens.recovery.token_store import TokenStore

Solver = Literal["auto", "adam", "closed"]

ENTERED = -1
"""The layer under which sums over what entered the first one are kept."""

_STORE = "store."


class TokenIdentifiability(ChainObserver, SumObserver):
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

    Examples:
        >>> tokens = TokenIdentifiability("naive")
        >>> with Lens(model, tokens), torch.no_grad():
        ...     for text in attnlens.demo.paragraphs():
        ...         output = model(**tokenizer(text, return_tensors="pt"))
        >>> tokens.compute().layers[0][1]
        0
    """

    alike = ("seed", "split", "streams", "offsets", "positions", "stored", "label_names")

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
        if rescaling < 1 or not 0 <= angle <= 180 or neighbours < 0 or positions < 1:
            raise InputError(
                f"rescaling must be at least 1, angle in [0, 180], neighbours at least 0 and "
                f"positions at least 1. Got {rescaling}, {angle}, {neighbours}, {positions}."
            )
        if len(split) != 3 or min(split) <= 0 or abs(sum(split) - 1) > 1e-9:
            raise InputError(f"split must be three positive shares that sum to one. Got {split}.")
        super().__init__(layers)
        self._choose(map, distance, solver)
        self.words = words
        self.offsets = tuple(offset for offset in range(-neighbours, neighbours + 1) if offset)
        self.labels = labels
        self.label_names = tuple(label_names)
        self.rescaling, self.angle = rescaling, angle
        self.split = split
        self.seed = seed
        self.positions = positions
        self.streams = self.closed
        needed = (TEST,) if self.closed or map == "naive" else (TRAIN, VALIDATION, TEST)
        self.stored: tuple[int, ...] = needed
        self.store = TokenStore(max_tokens, max_bytes, folder)
        self.training = MapTraining() if training is None else training

    def using(
        self,
        map: MapKind,
        distance: Distance | None = None,
        *,
        solver: Solver = "auto",
        training: MapTraining | None = None,
    ) -> TokenIdentifiability:
        """Return an observer with another map that shares what this one has collected.

        Give a lens only one of them.

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

    def update_chain(self, chain: Sequence[LayerCapture], inputs: Mapping[str, Any]) -> None:
        """Collect the sequences of a run of a stack.

        Args:
            chain: its layers in order.
            inputs: the model's arguments by name.

        Raises:
            UnsupportedAttentionError: if a layer changes the number or the width of the tokens, or
                other layers ran than before.
            InputError: if labels or token ids are not as many as there are tokens.
        """
        layers = self._layers_of(chain)
        if not layers:
            return
        stack, entered, mask = chain[0].stack, chain[0].hidden, chain[0].mask
        hidden = torch.stack([entered, *(layer.output for layer in layers)])[:, mask]
        ids = inputs.get("input_ids")
        ids = ids if isinstance(ids, Tensor) and ids.shape == mask.shape else None
        words = self._word_embeddings(ids, mask)
        labels = self.labels(inputs) if callable(self.labels) else self.labels
        lengths, content = mask.sum(1), entered[mask].half() if ids is None else ids[mask]
        places = self._places(content, lengths)
        packed = PackedTokens(hidden, words, checked_labels(labels, mask)[mask], lengths, *places)
        finite = torch.ones_like(mask)
        # In the float32 of the store, which is narrower than the float64 of some models.
        of_hidden, of_words = (part.float().isfinite().all(-1) for part in (hidden, words))
        finite[mask] = of_hidden.all(0) & of_words
        skipped = ~finite.all(1)
        packed = packed.select(~skipped & mask.any(1))
        targets: list[Target] = [0, *self.offsets]
        targets += ["words"] if self.words is not None else []
        stored = torch.isin(packed.split, torch.tensor(self.stored, device=mask.device))
        sums = entered_sums(packed, self.positions) | {"skipped": skipped.sum().double()}
        sums |= equation_sums(packed, targets if self.streams else [])
        self.store.extend(packed.select(stored).sequences())
        self.add((stack, ENTERED), sums)
        for layer in layers:
            self.add((stack, layer.layer), {"tokens": packed.lengths.sum().double()})

    def compute(self) -> TokenIdentifiabilityResult:
        """Train the maps and count what they identify.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if no sequence was seen, or a split is empty.
        """
        sums = self.seen()
        stacks = [stack for stack, layer in sums if layer == ENTERED]
        if len(stacks) > 1:
            raise AttnLensError(
                f"Tokens of different stacks were seen: {', '.join(stacks)}. Look at one of them: "
                f"pass Lens the part of the model, or kinds=."
            )
        entered = sums.pop((stacks[0], ENTERED))
        warn_of_skipped(entered["skipped"][None], what="sequence")
        for place, name in enumerate(SPLITS):
            count = int(entered["sequences"][place])
            if not count or (place in self.stored and not self.store.shards(place)):
                raise AttnLensError(
                    f"The {name} split is empty: {count} of {int(entered['sequences'].sum())} "
                    f"sequences seen belong to it. Run more text through the model, or change "
                    f"seed, split or max_tokens."
                )
        return Recovery(
            map=self.map,
            distance=self.distance,
            closed=self.closed,
            training=self.training,
            seed=self.seed,
            rescaling=self.rescaling,
            angle=self.angle,
            labels=self.label_names,
            offsets=self.offsets,
            layers=tuple(sums),
            entered=entered,
            streams=self.streams,
            store=self.store,
        ).result()

    def reset(self) -> None:
        """Forget everything seen, and remove the files."""
        super().reset()
        self.store.clear()

    def merge(self, other: TokenIdentifiability) -> TokenIdentifiability:
        """Add what another observer of the same settings has seen, and return this one."""
        super().merge(other)
        self.store.merge(other.store)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums and the sequences on the CPU; in memory, also from a folder."""
        stored = {f"{_STORE}{name}": t for name, t in self.store.state_dict().items()}
        return super().state_dict() | stored

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add a state to the present one, as if what it saw had been seen here."""
        super().add_state({n: t for n, t in state.items() if not n.startswith(_STORE)})
        self.store.add_state(part_of(state, _STORE))

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

    def _layers_of(self, chain: Sequence[LayerCapture]) -> list[LayerCapture]:
        """The layers to look at, which must be those of the runs before and keep all tokens."""
        stack, entered = chain[0].stack, list(chain[0].hidden.shape)
        for layer in chain:
            left = list(layer.output.shape)
            if len(left) != 3 or left != entered:
                raise UnsupportedAttentionError(
                    f"{layer.name} leaves {left} of {entered} that entered {stack}, so its tokens "
                    f"are not those of the input."
                )
        wanted = [c for c in chain if c.chosen and (self.layers is None or c.layer in self.layers)]
        layers = sorted(wanted, key=lambda layer: layer.layer)
        indices = [layer.layer for layer in layers]
        before = sorted(index for name, index in self.sums if name == stack and index != ENTERED)
        if layers and before and before != indices:
            raise UnsupportedAttentionError(
                f"Layers {indices} of {stack} ran where {before} had run before. Turn off "
                f"LayerDrop, for instance with model.eval()."
            )
        return layers

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

    def _places(self, content: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Priorities and splits of sequences, `[S]`, by the content of their tokens."""
        train, validation, _ = self.split
        sequences = torch.split(content.cpu(), lengths.tolist())
        places = [fingerprint(part.numpy().tobytes(), self.seed) for part in sequences]
        splits = [(place >= train) + (place >= train + validation) for place, _ in places]
        priorities = [priority for _, priority in places]
        return lengths.new_tensor(priorities), lengths.new_tensor(splits)
