"""Train the maps of all layers together, with early stopping for each, from where it was left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from attnlens.errors import InputError, NonFiniteError
from attnlens.files import load_state, save_state
from attnlens.recovery.packed_tokens import Tokens
from attnlens.recovery.token_maps import (
    Distance,
    MapKind,
    Maps,
    apply_map,
    glorot_parameters,
    map_loss,
)

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
        checkpoint: folder for the state of trainings, as sealed safetensors; one that was
            interrupted goes on from there. Nothing is written if None.
        checkpoint_seconds: least time between two writes.
        progress: show a bar.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4.

    Examples:
        >>> TokenIdentifiability("mlp", training=MapTraining(max_epochs=30)).training.max_epochs
        30
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


def train_maps(
    kind: MapKind,
    distance: Distance,
    train: Shards,
    validation: Shards,
    settings: MapTraining | None = None,
    seed: int = 0,
    name: str = "maps",
    identity: str = "",
) -> Maps:
    """Train one map per layer; each takes the same course as if it were trained alone.

    Batches hold the same tokens for every layer, a layer stops for itself, and all arithmetic is
    batched over the layers that are still learning.

    Args:
        kind: `"linear"` or `"mlp"`.
        distance: what to minimise, see :func:`~attnlens.recovery.token_maps.map_loss`.
        train: parts of the training split, each a function that loads hidden states `[L, N, M]`
            and targets `[N, M']`; each is shuffled by itself, and their order as well.
        validation: parts of the validation split.
        settings: how to train; the paper's way by default.
        seed: of the first parameters and of the batches.
        name: of this training, for its checkpoint and its bar.
        identity: what is trained on; a checkpoint of something else is refused.

    Returns:
        The maps, each as it was when its validation loss was smallest.

    Raises:
        InputError: if a split is empty, or the checkpoint is of another training or damaged.
        NonFiniteError: if a loss is NaN or infinite.

    Examples:
        >>> from attnlens.recovery import MapTraining
        >>> target = torch.eye(3).repeat(20, 1)
        >>> split = [lambda: (2 * target[None], target)]
        >>> maps = train_maps("linear", "l2", split, split, MapTraining(0.1, max_epochs=100))
        >>> bool(maps.loss < 1e-3)
        True

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4.
    """
    settings = MapTraining() if settings is None else settings
    about = {"kind": kind, "distance": distance, "seed": seed, "tokens": identity}
    about |= {n: getattr(settings, n) for n in ("learning_rate", "batch_size", "patience", "width")}
    path = None if settings.checkpoint is None else Path(settings.checkpoint, f"{name}.safetensors")
    with torch.inference_mode(False), torch.enable_grad(), _bar(name, settings) as bar:
        train, validation = _loaded_once(train, "training"), _loaded_once(validation, "validation")
        sample = validation[0]()[0].mean(1)
        state = _begin(kind, train[0](), settings, seed)
        if path is not None and path.exists():
            state = _read(path, state, about, sample)
        written = time.monotonic()
        while len(state.live) and state.epoch < settings.max_epochs:
            _epoch(state, distance, train, settings, seed)
            _judge(state, distance, validation, settings)
            bar.update(int(state.epoch) - bar.n)
            bar.set_postfix(learning=len(state.live), loss=f"{float(state.loss.mean()):.4g}")
            if path is not None and time.monotonic() - written >= settings.checkpoint_seconds:
                _write(path, state, about, sample)
                written = time.monotonic()
        if path is not None:
            _write(path, state, about, sample)
    loss, epochs = state.loss.double(), state.epochs.double()
    missing = torch.full_like(loss, torch.nan)
    return Maps(tuple(part.cpu() for part in state.best), loss, epochs, missing)


@dataclass(eq=False)
class _State:
    """A training between two epochs. Live layers, A of them, are those still learning."""

    epoch: Tensor  # a scalar
    live: Tensor  # [A]
    parameters: list[Tensor]  # [A, …] each
    moments: list[dict[str, Tensor]]  # state of Adam for each
    best: list[Tensor]  # [L, …] each
    loss: Tensor  # [L] smallest so far
    epochs: Tensor  # [L] when that was

    def let_go_on(self, layers: Tensor) -> None:
        """Let some of the live layers, `[A]` bool, go on and stop the others."""
        state = self.live, self.parameters, self.moments
        self.live, self.parameters, self.moments = tree_map(
            lambda tensor: tensor.detach()[layers] if tensor.dim() else tensor, state
        )


def _begin(kind: MapKind, tokens: Tokens, settings: MapTraining, seed: int) -> _State:
    hidden, target = tokens
    layers, sizes = len(hidden), (hidden.shape[-1], target.shape[-1])
    generator = torch.Generator().manual_seed(seed)
    parameters = glorot_parameters(
        kind, sizes, layers=layers, width=settings.width, generator=generator
    )
    parts = [part.to(settings.device) for part in parameters]
    return _State(
        epoch=torch.tensor(0),
        live=torch.arange(layers),
        parameters=parts,
        moments=[
            {"step": part.new_zeros(())}
            | {name: torch.zeros_like(part) for name in ("exp_avg", "exp_avg_sq")}
            for part in parts
        ],
        best=[part.clone() for part in parts],
        loss=torch.full((layers,), torch.inf),
        epochs=torch.zeros(layers, dtype=torch.int64),
    )


def _loaded_once(shards: Shards, split: str) -> Shards:
    """A split that is a single part need not be loaded in every epoch."""
    if len(shards) == 1:
        tokens = shards[0]()
        shards = [lambda: tokens]
    if not any(len(shard()[1]) for shard in shards):
        raise InputError(f"The {split} split has no tokens. Run more text through the model.")
    return shards


def _epoch(
    state: _State, distance: Distance, train: Shards, settings: MapTraining, seed: int
) -> None:
    """Visit every training token once."""
    parameters = [part.requires_grad_() for part in state.parameters]
    optimiser = Adam(parameters, lr=settings.learning_rate, fused=True)
    optimiser.state.update(zip(parameters, state.moments, strict=True))
    # Seeded by the epoch, so that a training that goes on sees the batches it would have seen.
    generator = torch.Generator().manual_seed((seed << 32) + int(state.epoch) + 1)
    for shard in torch.randperm(len(train), generator=generator).tolist():
        hidden, target = train[shard]()
        hidden = _of_live(hidden, state)
        order = torch.randperm(len(target), generator=generator)
        for rows in torch.split(order, settings.batch_size):
            batch = hidden.index_select(1, rows), target.index_select(0, rows)
            entered, wanted = (part.to(settings.device) for part in batch)
            # Layers share no parameter, so their losses may be added.
            loss = map_loss(apply_map(tuple(parameters), entered), wanted, distance).sum()
            torch.autograd.backward(loss)
            optimiser.step()
            optimiser.zero_grad()
    state.epoch += 1


@torch.no_grad()
def _judge(state: _State, distance: Distance, validation: Shards, settings: MapTraining) -> None:
    """Remember the layers that got better, and stop those that have not for long."""
    total, count = torch.zeros(len(state.live)), 0
    for shard in validation:
        hidden, target = shard()
        parts = (torch.split(_of_live(hidden, state), _CHUNK, 1), torch.split(target, _CHUNK))
        for states, wanted in zip(*parts, strict=True):
            guess = apply_map(tuple(state.parameters), states.to(settings.device))
            loss = map_loss(guess, wanted.to(settings.device), distance)
            total += loss.cpu() * len(wanted)
            count += len(wanted)
    loss = total / count
    if not bool(loss.isfinite().all()):
        layer = int(state.live[~loss.isfinite()][0])
        raise NonFiniteError(
            f"The loss of map {layer} became NaN or infinite in epoch {int(state.epoch)}. Lower "
            f"learning_rate={settings.learning_rate:g}, or look for NaN in the tokens."
        )
    better = loss < state.loss[state.live]
    improved = state.live[better]
    state.loss[improved], state.epochs[improved] = loss[better], state.epoch
    for best, part in zip(state.best, state.parameters, strict=True):
        best[improved] = part[better]
    going_on = state.epoch - state.epochs[state.live] < settings.patience
    if not bool(going_on.all()):
        state.let_go_on(going_on)


def _of_live(hidden: Tensor, state: _State) -> Tensor:
    return hidden if len(state.live) == len(hidden) else hidden[state.live]


def _bar(name: str, settings: MapTraining) -> Any:
    from tqdm.auto import tqdm

    disable = not settings.progress
    return tqdm(total=settings.max_epochs, desc=name, unit="epoch", leave=False, disable=disable)


def _write(path: Path, state: _State, about: Mapping[str, Any], sample: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves, _ = tree_flatten_with_path({**vars(state), "sample": sample})
    save_state({keystr(place): tensor for place, tensor in leaves}, path, about)


def _read(path: Path, first: _State, about: Mapping[str, Any], sample: Tensor) -> _State:
    """Read a checkpoint of the same training as one that begins with another state."""
    leaves, structure = tree_flatten_with_path({**vars(first), "sample": sample})
    try:
        tensors, written = load_state(path)
    except InputError as error:
        raise InputError(f"{path} is not a complete checkpoint. Remove it. {error}") from error
    different = sorted(name for name in about if written.get(name) != about[name])
    # Mean hidden states tell models apart that read the same texts.
    means = tensors.get(keystr(leaves[-1][0]), torch.empty(0))
    if means.shape != sample.shape or not torch.allclose(means, sample, rtol=1e-2, atol=1e-3):
        different.append("hidden states")
    if different:
        raise InputError(
            f"{path} is the checkpoint of a training with other {', '.join(different)}. Remove "
            f"it, or choose another checkpoint folder."
        )
    devices = {keystr(place): tensor.device for place, tensor in leaves}
    state = tree_unflatten([tensors[name].to(d) for name, d in devices.items()], structure)
    del state["sample"]
    return _State(**state)
