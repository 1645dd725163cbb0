"""Train the maps of all layers together, with early stopping for each, from where it was left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from attnlens.errors import InputError, NonFiniteError
from attnlens.files import load_state, save_state
from attnlens.recovery.token_maps import (
    Distance,
    MapKind,
    Parameters,
    apply_map,
    glorot_parameters,
    map_loss,
)

Tokens = tuple[Tensor, Tensor]
"""Hidden states `[L, N, M]` and their targets `[N, M']`."""

Shards = Sequence[Callable[[], Tokens]]

_CHUNK = 4096  # tokens judged at once


@dataclass(frozen=True)
class MapTraining:
    """How maps are trained by gradient descent; the defaults are the paper's.

    Attributes:
        learning_rate: of Adam.
        batch_size: tokens in a batch.
        patience: epochs without a smaller loss on the validation split after which a layer stops.
        max_epochs: epochs after which every layer stops.
        width: hidden units of an MLP.
        device: where to train.
        checkpoint: folder for the state of trainings, as safetensors; one that was interrupted
            goes on from there. Nothing is written if None.
        checkpoint_seconds: least time between two writes.
        progress: show a bar; needs tqdm.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4.
    """

    learning_rate: float = 1e-4
    batch_size: int = 256
    patience: int = 20
    max_epochs: int = 1000
    width: int = 1000
    device: str = "cpu"
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_seconds: float = 30.0
    progress: bool = False


class TrainedMaps(NamedTuple):
    """Maps of all layers, each as it was when its validation loss was smallest.

    Attributes:
        parameters: as of :func:`~attnlens.recovery.token_maps.glorot_parameters`.
        loss: that loss, `[L]`.
        epochs: number of epochs until then, `[L]`.
    """

    parameters: Parameters
    loss: Tensor
    epochs: Tensor


@dataclass(eq=False)
class _State:
    """A training between two epochs. Live layers, A of them, are those still learning."""

    counters: Tensor  # epochs and steps so far
    live: Tensor  # [A]
    parameters: list[Tensor]  # [A, …] each
    first: list[Tensor]  # moments of Adam
    second: list[Tensor]
    best: list[Tensor]  # [L, …] each
    loss: Tensor  # [L] smallest so far
    epochs: Tensor  # [L] when that was

    def named(self) -> dict[str, Tensor]:
        """The state as named tensors."""
        lists = ("parameters", "first", "second", "best")
        single = {name: entry for name, entry in vars(self).items() if name not in lists}
        return single | {f"{n}.{i}": t for n in lists for i, t in enumerate(getattr(self, n))}

    @classmethod
    def of(cls, named: dict[str, Tensor]) -> _State:
        """The state from named tensors."""
        entries: dict[str, Any] = {n: t for n, t in named.items() if "." not in n}
        for name in sorted(name for name in named if "." in name):
            entries.setdefault(name.partition(".")[0], []).append(named[name])
        return cls(**entries)

    def keep(self, chosen: Tensor) -> None:
        """Let some of the live layers go on and stop the others."""
        self.live = self.live[chosen]
        for name in ("parameters", "first", "second"):
            setattr(self, name, [tensor[chosen] for tensor in getattr(self, name)])


def train_maps(
    kind: MapKind,
    distance: Distance,
    train: Shards,
    validation: Shards,
    settings: MapTraining,
    *,
    seed: int = 0,
    name: str = "maps",
    identity: str = "",
) -> TrainedMaps:
    """Train one map per layer; each takes the same course as if it were trained alone.

    Batches hold the same tokens for every layer, a layer stops for itself, and all arithmetic is
    batched over the layers that are still learning.

    Args:
        kind: `"linear"` or `"mlp"`.
        distance: what to minimise, see :func:`~attnlens.recovery.token_maps.map_loss`.
        train: parts of the training split; each is shuffled by itself, and their order as well.
        validation: parts of the validation split.
        settings: how to train.
        seed: of the first parameters and of the batches.
        name: of this training, for its checkpoint and its bar.
        identity: what is trained on; a checkpoint of something else is refused.

    Returns:
        The maps.

    Raises:
        NonFiniteError: if a loss is NaN or infinite.
    """
    about = {"kind": kind, "distance": distance, "seed": seed, "tokens": identity}
    about |= {n: getattr(settings, n) for n in ("learning_rate", "batch_size", "patience", "width")}
    folder = None if settings.checkpoint is None else Path(settings.checkpoint)
    path = None if folder is None else folder / f"{name}.safetensors"
    with torch.inference_mode(False), torch.enable_grad():
        train, validation = _loaded_once(train), _loaded_once(validation)
        sample = validation[0]()[0].mean(1)
        state = None if path is None else _read(path, about, sample, settings.device)
        if state is None:
            state = _begin(kind, train[0](), settings, seed)
        written = time.monotonic()
        with _bar(name, settings) as bar:
            while len(state.live) and state.counters[0] < settings.max_epochs:
                _epoch(state, distance, train, settings, seed)
                _judge(state, distance, validation, settings)
                bar(state)
                if path is not None and time.monotonic() - written >= settings.checkpoint_seconds:
                    _write(path, state, about, sample)
                    written = time.monotonic()
        if path is not None:
            _write(path, state, about, sample)
    return TrainedMaps(tuple(part.cpu() for part in state.best), state.loss, state.epochs)


def _begin(kind: MapKind, tokens: Tokens, settings: MapTraining, seed: int) -> _State:
    hidden, target = tokens
    parameters = glorot_parameters(
        kind,
        (hidden.shape[-1], target.shape[-1]),
        layers=len(hidden),
        width=settings.width,
        generator=torch.Generator().manual_seed(seed),
    )
    parameters = tuple(part.to(settings.device) for part in parameters)
    zeros = [torch.zeros_like(part) for part in parameters]
    return _State(
        counters=torch.zeros(2, dtype=torch.int64),
        live=torch.arange(len(hidden)),
        parameters=list(parameters),
        first=zeros,
        second=[part.clone() for part in zeros],
        best=[part.clone() for part in parameters],
        loss=torch.full((len(hidden),), torch.inf),
        epochs=torch.zeros(len(hidden), dtype=torch.int64),
    )


def _loaded_once(shards: Shards) -> Shards:
    """A split that is a single part need not be loaded in every epoch."""
    if len(shards) != 1:
        return shards
    tokens = shards[0]()
    return [lambda: tokens]


def _epoch(
    state: _State, distance: Distance, train: Shards, settings: MapTraining, seed: int
) -> None:
    """Visit every training token once."""
    # Seeded by the epoch, so that a training that goes on sees the batches it would have seen.
    generator = torch.Generator().manual_seed((seed << 32) + int(state.counters[0]) + 1)
    for shard in torch.randperm(len(train), generator=generator).tolist():
        hidden, target = train[shard]()
        hidden = _of_live(hidden, state)
        for rows in torch.randperm(len(target), generator=generator).split(settings.batch_size):
            batch = hidden.index_select(1, rows), target.index_select(0, rows)
            batch = batch[0].to(settings.device), batch[1].to(settings.device)
            _step(state, distance, batch, settings.learning_rate)
    state.counters[0] += 1


def _step(state: _State, distance: Distance, batch: Tokens, learning_rate: float) -> None:
    """One step of Adam. Layers share no parameter, so their losses may be added."""
    hidden, target = batch
    leaves = [part.requires_grad_() for part in state.parameters]
    loss = map_loss(apply_map(tuple(leaves), hidden), target, distance).sum()
    gradients = list(torch.autograd.grad(loss, leaves))
    device = leaves[0].device
    steps = [torch.tensor(float(state.counters[1]), device=device) for _ in leaves]
    with torch.no_grad():
        adam(
            [part.requires_grad_(False) for part in leaves],
            gradients,
            state.first,
            state.second,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=learning_rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
    state.counters[1] += 1


@torch.no_grad()
def _judge(state: _State, distance: Distance, validation: Shards, settings: MapTraining) -> None:
    """Remember the layers that got better, and stop those that have not for long."""
    total, count = torch.zeros(len(state.live)), 0
    for shard in validation:
        hidden, target = shard()
        parts = zip(_of_live(hidden, state).split(_CHUNK, 1), target.split(_CHUNK), strict=True)
        for hidden, target in parts:
            guess = apply_map(tuple(state.parameters), hidden.to(settings.device))
            loss = map_loss(guess, target.to(settings.device), distance)
            total += loss.cpu() * len(target)
            count += len(target)
    loss, epoch = total / count, int(state.counters[0])
    if not bool(loss.isfinite().all()):
        layer = int(state.live[~loss.isfinite()][0])
        raise NonFiniteError(
            f"The loss of map {layer} became NaN or infinite in epoch {epoch}. Lower "
            f"learning_rate={settings.learning_rate:g}."
        )
    better = loss < state.loss[state.live]
    improved = state.live[better]
    state.loss[improved], state.epochs[improved] = loss[better], epoch
    for best, part in zip(state.best, state.parameters, strict=True):
        best[improved] = part[better]
    going_on = epoch - state.epochs[state.live] < settings.patience
    if not bool(going_on.all()):
        state.keep(going_on)


def _of_live(hidden: Tensor, state: _State) -> Tensor:
    return hidden if len(state.live) == len(hidden) else hidden[state.live]


@contextmanager
def _bar(name: str, settings: MapTraining) -> Iterator[Callable[[_State], None]]:
    """A bar of epochs, told of the state after each."""
    if not settings.progress:
        yield lambda state: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=settings.max_epochs, desc=name, unit="epoch", leave=False) as bar:

        def advance(state: _State) -> None:
            bar.update(int(state.counters[0]) - bar.n)
            bar.set_postfix(learning=len(state.live), loss=f"{float(state.loss.mean()):.4g}")

        yield advance


def _write(path: Path, state: _State, about: dict[str, Any], sample: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_state(state.named() | {"sample": sample}, path, about)


def _read(path: Path, about: dict[str, Any], sample: Tensor, device: str) -> _State | None:
    """Read a checkpoint of the same training, or None if there is none."""
    if not path.exists():
        return None
    named, found = load_state(path)
    different = sorted(name for name in about if found.get(name) != about[name])
    # Mean hidden states tell models apart that read the same texts.
    known = named.pop("sample", torch.empty(0))
    if known.shape != sample.shape or not torch.allclose(known, sample, rtol=1e-2, atol=1e-3):
        different.append("hidden states")
    if different:
        raise InputError(
            f"{path} is the checkpoint of a training with other {', '.join(different)}. Remove "
            f"it, or choose another checkpoint folder."
        )
    on_cpu = ("counters", "live", "loss", "epochs")
    return _State.of({n: t if n in on_cpu else t.to(device) for n, t in named.items()})
