"""Maps back to tokens: for all layers together, one layer after the other, and in closed form.

On a CPU the matrix products of wide layers take the time, and they are the same either way.
Together pays where the steps are small: narrow layers, or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, mse_loss

from attnlens.recovery.map_training import MapTraining, train_maps
from attnlens.recovery.packed_tokens import Tokens
from attnlens.recovery.ridge_maps import best_ridge_maps, normal_equations
from attnlens.recovery.token_maps import Distance, MapKind, glorot_parameters
from benchmarks.registry import Check, Comparison, Step, case, seconds

TOKENS, HELD_OUT = 2048, 512
SETTINGS = MapTraining(learning_rate=1e-3, max_epochs=2)
LONG = MapTraining(learning_rate=1e-3, max_epochs=25)


@case("identifiability")
def steps() -> Iterator[Step]:
    """Maps of all layers, batched or in closed form, against modules trained one by one."""
    for kind, layers, width in (("linear", 12, 64), ("linear", 6, 384), ("mlp", 6, 384)):
        train, validation = problem(layers, width), problem(layers, width, HELD_OUT, seed=1)
        together = partial(all_layers, kind, train, validation)
        alone = partial(layer_after_layer, kind, train, validation)
        setting = f"{kind}, {layers} layers of {width}"
        apart = (together() - alone()).abs().max().item()
        yield Check(f"{setting}: the same losses", apart, 1e-4)
        ours, theirs = seconds(together, alone, repeats=3, warm_up=0)
        yield Comparison(setting, "together", ours, "layer after layer", theirs)
    train, validation = problem(6, 384), problem(6, 384, HELD_OUT, seed=1)
    solved = partial(closed_form, train, validation)
    alone = partial(layer_after_layer, "linear", train, validation, "l2", LONG)
    setting = "linear, l2, 6 layers of 384"
    excess = (solved() - alone()).clamp(min=0).max().item()
    yield Check(f"{setting}: a closed form at least as good as 25 epochs", excess, 1e-6)
    ours, theirs = seconds(solved, alone, repeats=1, warm_up=0)
    yield Comparison(setting, "closed form", ours, "layer after layer", theirs)


def problem(layers: int, width: int, tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states `[L, N, M]` and the targets `[N, M]` that they are noisy mixtures of."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(tokens, width, generator=generator)
    noise = torch.randn(layers, tokens, width, generator=generator)
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(9)) / width**0.5
    return target @ mixing + 0.5 * noise, target


def all_layers(kind: MapKind, train: Tokens, validation: Tokens) -> Tensor:
    """Smallest validation loss of every layer, trained together."""
    return train_maps(kind, "cosine", [lambda: train], [lambda: validation], SETTINGS).loss


def closed_form(train: Tokens, validation: Tokens) -> Tensor:
    """Validation loss of the linear maps that minimise squared error, every layer."""
    solved = best_ridge_maps(normal_equations(*train), normal_equations(*validation))
    return solved.loss.float()


def layer_after_layer(
    kind: MapKind,
    train: Tokens,
    validation: Tokens,
    distance: Distance = "cosine",
    settings: MapTraining = SETTINGS,
) -> Tensor:
    """The usual way: a module, an optimiser and a loop for each layer; the same batches."""
    losses = [
        one_layer(
            _module(kind, hidden.shape[1]), (hidden, train[1]), (held, validation[1]), distance,
            settings,
        )
        for hidden, held in zip(train[0], validation[0], strict=True)
    ]  # fmt: skip
    return torch.tensor(losses)


def one_layer(
    module: nn.Module,
    train: Tokens,
    validation: Tokens,
    distance: Distance,
    settings: MapTraining,
) -> float:
    """Train one map, and return its smallest validation loss."""
    optimiser = torch.optim.Adam(module.parameters(), lr=settings.learning_rate)
    best = float("inf")
    for epoch in range(settings.max_epochs):
        for rows in _batches(epoch, len(train[1]), settings.batch_size):
            optimiser.zero_grad()
            loss(module(train[0][rows]), train[1][rows], distance).backward()
            optimiser.step()
        with torch.no_grad():
            best = min(best, loss(module(validation[0]), validation[1], distance).item())
    return best


def loss(guess: Tensor, target: Tensor, distance: Distance) -> Tensor:
    """Mean cosine distance, or mean squared difference."""
    if distance == "l2":
        return mse_loss(guess, target)
    return 1 - cosine_similarity(guess, target, dim=-1).mean()


def _module(kind: MapKind, width: int) -> nn.Module:
    """A module with the first parameters of `train_maps`."""
    parameters = glorot_parameters(
        kind, (width, width), layers=1, generator=torch.Generator().manual_seed(0)
    )
    modules: list[nn.Module] = []
    for place in range(0, len(parameters), 2):
        linear = nn.Linear(*parameters[place].shape[1:])
        with torch.no_grad():
            linear.weight.copy_(parameters[place][0].T)
            linear.bias.copy_(parameters[place + 1][0])
        modules += [nn.GELU(), linear] if modules else [linear]
    return nn.Sequential(*modules)


def _batches(epoch: int, tokens: int, size: int) -> tuple[Tensor, ...]:
    """The batches of `train_maps` with seed 0 and a single shard."""
    generator = torch.Generator().manual_seed(epoch + 1)
    torch.randperm(1, generator=generator)
    return torch.randperm(tokens, generator=generator).split(size)
