"""Maps back to tokens, their closed form and their training, against loops and plain modules."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor, nn

from attnlens.errors import InputError, NonFiniteError
from attnlens.recovery.map_training import MapTraining, train_maps
from attnlens.recovery.packed_tokens import neighbour_rows
from attnlens.recovery.ridge_maps import (
    added_equations,
    best_ridge_maps,
    mean_squared_error,
    normal_equations,
    ridge_maps,
)
from attnlens.recovery.token_maps import (
    Maps,
    apply_map,
    glorot_parameters,
    has_neighbour,
    identified,
    map_loss,
    rescaled,
    rotated,
)

METRICS = {"cosine": "cosine", "l2": "sqeuclidean"}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed + 31 * sum(shape)), dtype=torch.float64)


# Pure functions


def test_first_parameters_are_glorot_and_the_same_for_every_layer() -> None:
    weight, bias, second, _ = glorot_parameters(
        "mlp", (40, 60), layers=3, width=50, generator=seeded()
    )
    assert weight.shape == (3, 40, 50) and second.shape == (3, 50, 60)
    assert torch.equal(weight[0], weight[2]) and not bias.any()
    bound = math.sqrt(6 / 90)
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert glorot_parameters("naive", (4, 4), layers=2) == ()


@pytest.mark.parametrize("kind", ["naive", "linear", "mlp"])
def test_maps_are_applied_layer_by_layer(kind: str) -> None:
    parameters = tuple(
        torch.randn(part.shape, generator=seeded(), dtype=torch.float64)
        for part in glorot_parameters(kind, (4, 5), layers=3, width=6)
    )
    hidden = normal(3, 7, 4)
    found = apply_map(parameters, hidden)
    for layer in range(3):
        expected = hidden[layer]
        for place in range(0, len(parameters), 2):
            expected = nn.functional.gelu(expected) if place else expected
            expected = expected @ parameters[place][layer] + parameters[place + 1][layer]
        torch.testing.assert_close(found[layer], expected)


@pytest.mark.parametrize("distance", METRICS)
def test_losses_are_mean_distances(distance: str) -> None:
    guess, target = normal(2, 9, 5), normal(9, 5)
    for layer, loss in enumerate(map_loss(guess, target, distance)):
        pairs = cdist(guess[layer].numpy(), target.numpy(), METRICS[distance])
        expected = pairs.diagonal().mean() / (1 if distance == "cosine" else 5)
        assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("distance", METRICS)
@pytest.mark.parametrize("offset", [0, 1, -2])
def test_identified_tokens_are_those_of_a_loop(distance: str, offset: int) -> None:
    lengths = [6, 4, 1]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    target = normal(3, 6, 3)
    target[0, 4] = target[0, 1]  # two occurrences of a word, without a position
    guess = target.roll(-offset, 1) + 0.8 * normal(2, 3, 6, 3)
    guess[1, 1, 2] = torch.nan
    found = identified(guess, target, mask, distance, offset)
    count = 0
    for layer, s, i in np.ndindex(2, 3, 6):
        n, right = lengths[s], i + offset
        expected = False
        if i < n and 0 <= right < n and guess[layer, s, i].isfinite().all():
            candidates = target[s, :n].numpy()
            apart = cdist(guess[layer, s, i : i + 1].numpy(), candidates, METRICS[distance])[0]
            expected = bool((candidates[apart.argmin()] == candidates[right]).all())
        assert found[layer, s, i] == expected
        count += expected
    assert 4 < count < 22
    pairs = [sum(0 <= i + offset < n for i in range(n)) for n in lengths]
    assert has_neighbour(mask, offset).sum(1).tolist() == pairs


@pytest.mark.parametrize("offset", [-3, -1, 2])
def test_neighbours_do_not_cross_sequences(offset: int) -> None:
    lengths = [3, 1, 5, 2]
    starts = np.cumsum([0, *lengths])
    pairs = [
        (start + i, start + i + offset)
        for start, stop in pairwise(starts)
        for i in range(stop - start)
        if 0 <= i + offset < stop - start
    ]
    rows, neighbours = neighbour_rows(torch.tensor(lengths), offset)
    assert list(zip(rows.tolist(), neighbours.tolist(), strict=True)) == pairs


def test_rescaling_keeps_directions_and_rotation_keeps_norms() -> None:
    hidden = normal(2, 50, 7)
    changed = rescaled(hidden, 3.0, seeded())
    factor = changed.norm(dim=-1) / hidden.norm(dim=-1)
    torch.testing.assert_close(changed, hidden * factor[..., None])
    assert factor.min() >= 1 / 3 and factor.max() <= 3 and factor.log().std() > 0.5
    turned = rotated(hidden, 25.0, seeded())
    torch.testing.assert_close(turned.norm(dim=-1), hidden.norm(dim=-1))
    cosine = torch.cosine_similarity(turned, hidden, dim=-1)
    torch.testing.assert_close(cosine, torch.full_like(cosine, math.cos(math.radians(25))))
    assert not torch.allclose(turned, rotated(hidden, 25.0, seeded(1)))


# Closed form


def problem(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states whose last coordinates are nearly dependent, and targets."""
    hidden = normal(2, tokens, 6, seed=seed) + 1.5
    hidden[..., 5] = hidden[..., 0] + 1e-3 * hidden[..., 5]
    target = hidden[0] @ normal(6, 4, seed=9) + 0.5 * normal(tokens, 4, seed=seed) - 2
    return hidden, target


def test_streamed_ridge_maps_equal_the_batch_solution() -> None:
    hidden, target = problem(90)
    streamed = added_equations([
        normal_equations(hidden[:, rows], target[rows]) for rows in torch.arange(90).split(17)
    ])
    assert streamed.tokens.tolist() == [90, 90]
    for ridge, (weight, bias) in zip((1e-8, 1e-2), ridge_maps(streamed, (1e-8, 1e-2)), strict=True):
        for layer in range(2):
            e, x = hidden[layer].numpy(), target.numpy()
            centred = e - e.mean(0)
            damping = ridge * 90 * (centred**2).sum() / 90 / 6
            rows = np.vstack([centred, np.sqrt(damping) * np.eye(6)])
            right = np.vstack([x - x.mean(0), np.zeros((6, 4))])
            expected = np.linalg.lstsq(rows, right, rcond=None)[0]
            np.testing.assert_allclose(weight[layer], expected, rtol=1e-6, atol=1e-6)
            intercept = x.mean(0) - e.mean(0) @ expected
            np.testing.assert_allclose(bias[layer], intercept, rtol=1e-6, atol=1e-6)


def test_the_ridge_term_is_the_one_with_the_smallest_validation_error() -> None:
    train, validation = problem(14), problem(60, seed=5)
    candidates = (1e-9, 1e-3, 1e-1, 10.0)
    found = best_ridge_maps(normal_equations(*train), normal_equations(*validation), candidates)
    losses = []
    for parameters in ridge_maps(normal_equations(*train), candidates):
        loss = map_loss(apply_map(parameters, validation[0]), validation[1], "l2")
        torch.testing.assert_close(
            mean_squared_error(normal_equations(*validation), parameters), loss
        )
        losses.append(loss)
    best = torch.stack(losses).min(0)
    torch.testing.assert_close(found.loss, best.values)
    assert found.ridge.tolist() == [candidates[i] for i in best.indices.tolist()]
    for layer, ridge in enumerate(found.ridge.tolist()):
        (expected,) = ridge_maps(normal_equations(*train), (ridge,))
        assert torch.equal(found.parameters[0][layer], expected[0][layer])


# Training


def split(tokens: int, seed: int, layers: int = 3) -> tuple[Tensor, Tensor]:
    """Targets, and hidden states from which they are harder to recover in later layers."""
    target = normal(tokens, 5, seed=seed).float()
    mixed = target @ normal(5, 6, seed=100).float()
    noise = normal(layers, tokens, 6, seed=seed + 1).float()
    return mixed + 0.3 * torch.arange(layers)[:, None, None] ** 2 * noise, target


SETTINGS = MapTraining(learning_rate=3e-2, batch_size=16, patience=3, max_epochs=40, width=8)


def train(
    kind: str, distance: str, settings: MapTraining = SETTINGS, layers: slice = slice(None)
) -> Maps:
    parts = [split(50, 0), split(33, 7)]
    shards = [partial(lambda part: (part[0][layers], part[1]), part) for part in parts]
    hidden, target = split(40, 3)
    return train_maps(kind, distance, shards, [lambda: (hidden[layers], target)], settings, seed=4)


@pytest.mark.parametrize(("kind", "distance"), [("linear", "cosine"), ("mlp", "l2")])
def test_all_layers_together_take_the_course_of_each_alone(kind: str, distance: str) -> None:
    together = train(kind, distance)
    assert len(set(together.epochs.tolist())) > 1, "layers stop at different epochs"
    assert together.epochs.min() < 40
    for layer in range(3):
        alone = train(kind, distance, layers=slice(layer, layer + 1))
        assert alone.epochs[0] == together.epochs[layer]
        torch.testing.assert_close(alone.loss[0], together.loss[layer], rtol=1e-5, atol=1e-6)
        for one, all_ in zip(alone.parameters, together.parameters, strict=True):
            torch.testing.assert_close(one[0], all_[layer], rtol=1e-4, atol=1e-5)


def test_training_is_that_of_plain_modules() -> None:
    """One layer, one shard: `nn.Linear` and `torch.optim.Adam`, batch by batch."""
    hidden, target = (part[:1] if part.ndim == 3 else part for part in split(50, 0))
    held, wanted = split(40, 3)
    settings = MapTraining(learning_rate=1e-2, batch_size=16, max_epochs=6)
    shards = [lambda: (hidden, target)], [lambda: (held[:1], wanted)]
    found = train_maps("mlp", "cosine", *shards, settings, seed=2)
    weight, bias, second, offset = glorot_parameters(
        "mlp", (6, 5), layers=1, width=1000, generator=seeded(2)
    )
    module = nn.Sequential(nn.Linear(6, 1000), nn.GELU(), nn.Linear(1000, 5))
    with torch.no_grad():
        for layer, (w, b) in zip(module[::2], ((weight, bias), (second, offset)), strict=True):
            layer.weight.copy_(w[0].T)
            layer.bias.copy_(b[0])
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for epoch in range(6):
        generator = seeded((2 << 32) + epoch + 1)
        torch.randperm(1, generator=generator)  # the order of the shards
        for rows in torch.randperm(50, generator=generator).split(16):
            optimiser.zero_grad()
            cosine = torch.cosine_similarity(module(hidden[0, rows]), target[rows], dim=-1)
            (1 - cosine.mean()).backward()
            optimiser.step()
        with torch.no_grad():
            cosine = torch.cosine_similarity(module(held[0]), wanted, dim=-1)
            losses.append(1 - cosine.mean().item())
    assert found.epochs[0].item() == int(np.argmin(losses)) + 1
    assert found.loss[0].item() == pytest.approx(min(losses), abs=1e-5)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_training_that_is_interrupted_goes_on_as_if_it_had_not_been(
    kind: str, tmp_path: Path
) -> None:
    whole = train(kind, "cosine")
    again = MapTraining(**{**vars(SETTINGS), "checkpoint": tmp_path, "checkpoint_seconds": 0})
    loads = 0

    def shard() -> tuple[Tensor, Tensor]:
        nonlocal loads
        loads += 1
        if loads == 12:
            raise KeyboardInterrupt
        return split(50, 0)

    hidden, target = split(40, 3)
    rest = [lambda: split(33, 7)], [lambda: (hidden, target)]
    with pytest.raises(KeyboardInterrupt):
        train_maps(kind, "cosine", [shard, *rest[0]], rest[1], again, seed=4)
    assert [path.name for path in tmp_path.iterdir()] == ["maps.safetensors"]
    resumed = train(kind, "cosine", again)
    assert torch.equal(resumed.loss, whole.loss) and torch.equal(resumed.epochs, whole.epochs)
    for one, other in zip(resumed.parameters, whole.parameters, strict=True):
        assert torch.equal(one, other)
    finished = train(kind, "cosine", again)
    assert torch.equal(finished.loss, whole.loss)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    settings = MapTraining(max_epochs=1, checkpoint=tmp_path)
    train("linear", "cosine", settings)
    with pytest.raises(InputError, match=r"other batch_size, distance\. Remove it"):
        train("linear", "l2", MapTraining(max_epochs=1, checkpoint=tmp_path, batch_size=9))
    with pytest.raises(InputError, match="other hidden states"):
        train("linear", "cosine", settings, slice(0, 2))
    (tmp_path / "maps.safetensors").write_bytes(b"half a file")
    with pytest.raises(InputError, match="not a complete checkpoint"):
        train("linear", "cosine", settings)


def test_losses_that_are_no_numbers_end_the_training() -> None:
    with pytest.raises(NonFiniteError, match=r"epoch \d+\. Lower learning_rate=1e\+25"):
        train("mlp", "l2", MapTraining(learning_rate=1e25))


def test_a_bar_shows_progress_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    train("linear", "cosine", MapTraining(max_epochs=2))
    assert capsys.readouterr().err == ""
    train("linear", "cosine", MapTraining(max_epochs=2, progress=True))
    assert "learning=3" in capsys.readouterr().err


def test_training_works_inside_inference_mode_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode():
        inside = train("linear", "cosine")
    assert torch.equal(inside.loss, train("linear", "cosine").loss)
    assert torch.equal(torch.get_rng_state(), state)
