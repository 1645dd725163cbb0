"""NaN, Inf, and texts with nothing, or next to nothing, to recover tokens from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlens import AttnLensError, TokenIdentifiability
from attnlens.errors import AttnLensWarning, InputError, NonFiniteError
from attnlens.recovery.map_training import MapTraining, train_maps
from attnlens.recovery.ridge_maps import best_ridge_maps, normal_equations
from attnlens.recovery.token_maps import identified, recovery_rate
from tests.recovery.test_token_identifiability import QUICK, TABLE, WIDTH, capture, feed, texts

MASK = torch.ones(2, 5, dtype=torch.bool)
IDS = {"input_ids": torch.arange(10).reshape(2, 5)}
WAYS: dict[str, dict[str, Any]] = {
    "naive": {"map": "naive"},
    "trained": {"map": "linear", "training": QUICK},
    "solved": {"map": "linear", "distance": "l2"},
}


def give(
    observer: TokenIdentifiability,
    entered: Tensor,
    *left: Tensor,
    mask: Tensor = MASK,
    inputs: dict[str, Any] = IDS,
) -> None:
    """One pass with a layer for each state that left one."""
    observer.begin_forward(inputs)
    for layer, output in enumerate(left):
        observer.update_layer(
            capture(entered if layer == 0 else left[layer - 1], output, mask, layer)
        )
    observer.end_forward(True)


def spoilt(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    state = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(8)).to(dtype)
    state[1, 2, 3] = value
    return state


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
@pytest.mark.parametrize("way", WAYS)
def test_sequences_that_are_not_finite_are_left_out_and_counted(
    way: str, value: float, place: int
) -> None:
    """1e300 is finite in the float64 of a model, and Inf in the float32 of what is stored."""
    observers = [feed(TokenIdentifiability(**WAYS[way]), texts(120)) for _ in range(2)]
    states = [spoilt(0.0, torch.float64) for _ in range(3)]
    states[place] = spoilt(value, torch.float64)
    give(observers[0], *states)
    give(
        observers[1],
        *(state[:1] for state in states),
        mask=MASK[:1],
        inputs={"input_ids": IDS["input_ids"][:1]},
    )
    with pytest.warns(AttnLensWarning, match=r"1 sequence\(s\) held NaN or Inf and were left out"):
        found = observers[0].compute()
    for name, tensor in observers[1].compute().tensors().items():
        assert torch.equal(found.tensors()[name].nan_to_num(), tensor.nan_to_num()), name


def test_words_that_are_not_finite_are_left_out_and_counted() -> None:
    table = TABLE.clone()
    table[7] = torch.nan
    observer = feed(TokenIdentifiability("linear", "l2", words=table.__getitem__), texts(200))
    skipped = sum(bool((ids == 7).any()) for ids in texts(200))
    with pytest.warns(AttnLensWarning, match=rf"^{skipped} sequence"):
        found = observer.compute()
    assert found.sequences.sum() == 200 - skipped
    assert found.words.isfinite().all() and found.loss.isfinite().all()


def test_an_error_says_what_is_left_where_no_sequence_is_finite() -> None:
    observer = TokenIdentifiability("naive")
    give(observer, torch.full((2, 5, WIDTH), torch.nan), torch.ones(2, 5, WIDTH))
    with (
        pytest.warns(AttnLensWarning, match=r"2 sequence\(s\)"),
        pytest.raises(AttnLensError, match="split is empty: 0 of 0"),
    ):
        observer.compute()


@pytest.mark.parametrize("way", WAYS)
def test_empty_batches_and_padding_alone_count_for_nothing(way: str) -> None:
    observer = feed(TokenIdentifiability(**WAYS[way]), texts(120))
    expected = feed(TokenIdentifiability(**WAYS[way]), texts(120)).compute()
    state = torch.ones(2, 5, WIDTH)
    give(observer, state, state, state, mask=torch.zeros_like(MASK))
    for none in (state[:0], state[:, :0]):
        mask = torch.ones(none.shape[:2], dtype=torch.bool)
        give(observer, none, none, none, mask=mask, inputs={"input_ids": mask.long()})
        give(observer, none, none, none, mask=mask, inputs={})
    for name, tensor in observer.compute().tensors().items():
        torch.testing.assert_close(tensor, expected.tensors()[name], equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [False, True])
def test_single_tokens_are_always_identified_and_have_no_neighbours(way: str, stored: bool) -> None:
    sequences = [torch.tensor([word]) for word in range(40)]
    settings = {**WAYS[way], "neighbours": 1}
    if stored:
        observer = TokenIdentifiability("mlp", neighbours=1, training=QUICK)
        feed(observer, sequences)
        observer = observer.using(settings["map"], settings.get("distance"))
    else:
        observer = feed(TokenIdentifiability(**settings), sequences)
    found = observer.compute()
    assert found.chance == 1.0 and (found.rate == 1.0).all()
    assert found.neighbours.shape == (2, 2) and found.neighbours.isnan().all()


def test_a_single_test_sequence_has_no_standard_error() -> None:
    observer = TokenIdentifiability("naive")
    for sequence in texts(300):
        feed(observer, [sequence])
        if observer.sums[("layer.*", -1)]["sequences"][2] == 1:
            break
    feed(observer, [ids for ids in texts(20, seed=9) if observer_split(ids) != 2])
    assert observer.compute().error.isnan().all()


def observer_split(ids: Tensor) -> int:
    sums = feed(TokenIdentifiability("naive"), [ids]).sums[("layer.*", -1)]
    return int(sums["sequences"].argmax())


@pytest.mark.parametrize("way", WAYS)
def test_merging_with_an_observer_that_saw_nothing_changes_nothing(way: str) -> None:
    expected = feed(TokenIdentifiability(**WAYS[way]), texts(120)).compute().tensors()
    empty = TokenIdentifiability(**WAYS[way])
    full = feed(TokenIdentifiability(**WAYS[way]), texts(120))
    restored = TokenIdentifiability(**WAYS[way])
    restored.load_state_dict(TokenIdentifiability(**WAYS[way]).state_dict())
    for merged in (full.merge(empty), empty.merge(full), restored.merge(full)):
        for name, tensor in merged.compute().tensors().items():
            torch.testing.assert_close(tensor, expected[name], equal_nan=True)
    with pytest.raises(InputError, match="different label_names"):
        full.merge(TokenIdentifiability(**WAYS[way], label_names=("other",)))


def test_a_pass_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    refused = TokenIdentifiability("mlp", labels=torch.zeros(1, 2, dtype=torch.int64))
    small = torch.ones(2, 5, WIDTH)
    with pytest.raises(InputError, match="labels"):
        give(refused, small, small)
    half = TokenIdentifiability("mlp", folder=tmp_path / "states")
    with pytest.raises(InputError, match="float16"):
        give(half, small, 1e5 * small)
    words = TokenIdentifiability(
        "mlp", folder=tmp_path / "words", words=lambda ids: torch.full((*ids.shape, 4), 1e5)
    )
    with pytest.raises(InputError, match=r"1e\+05 do not fit .* folder=None"):
        give(words, small, small)
    for observer in (refused, half, words):
        assert not observer.sums and not observer.store.tokens
    refused.labels = None
    give(refused, small, small)
    assert refused.store.tokens == 10


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_results_have_the_shapes_they_say(way: str, layers: int) -> None:
    observer = TokenIdentifiability(**WAYS[way], neighbours=1, label_names=("a", "b", "c"))
    found = feed(observer, texts(120), layers=layers).compute().tensors()
    shapes = dict.fromkeys(found, (layers,)) | dict.fromkeys(("sequences", "tokens"), (3,))
    shapes |= {"transfer": (layers, layers), "by_label": (layers, 3), "neighbours": (layers, 2)}
    shapes |= dict.fromkeys(("position", "chance"), ())
    for name, tensor in found.items():
        assert tensor.shape == shapes[name] and tensor.dtype == torch.float64, name


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_nothing_is_identified_where_there_is_nothing(shape: tuple[int, ...]) -> None:
    target, mask = torch.zeros(shape), torch.ones(shape[:2], dtype=torch.bool)
    batch = (torch.zeros(3, *shape), target, mask)
    for distance in ("cosine", "l2"):
        for offset in (0, 1):
            assert identified(*batch, distance, offset).shape == (3, *shape[:2])
            assert recovery_rate([batch], distance, offset).isnan().all()


# What is not right is said by the functions themselves


def test_empty_splits_are_named() -> None:
    full, none = torch.ones(1, 4, 3), torch.ones(1, 0, 3)
    for train, validation, name in ((none, full, "training"), (full, none, "validation")):
        splits = [[lambda s=s: (s, s[0])] for s in (train, validation)]
        with pytest.raises(InputError, match=f"The {name} split has no tokens"):
            train_maps("linear", "l2", *splits)
        with pytest.raises(InputError, match="no tokens"):
            best_ridge_maps(*(normal_equations(s, s[0]) for s in (train, validation)))
    with pytest.raises(InputError, match="no tokens"):
        train_maps("linear", "l2", [], [])


def test_training_on_nan_ends_with_an_error() -> None:
    tokens = torch.ones(1, 4, 3)
    tokens[0, 1] = torch.nan
    split = [lambda: (tokens, torch.ones(4, 3))]
    with pytest.raises(NonFiniteError, match="look for NaN"):
        train_maps("linear", "l2", split, split, MapTraining(max_epochs=2))


# Files


def flipped(path: Path, share: float) -> bytes:
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    return bytes(content)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.99])
def test_damaged_checkpoints_are_refused(share: float, tmp_path: Path) -> None:
    settings = MapTraining(max_epochs=1, width=4, checkpoint=tmp_path)
    split = [lambda: (torch.ones(1, 4, 3), torch.ones(4, 3))]
    train_maps("mlp", "l2", split, split, settings)
    path = tmp_path / "maps.safetensors"
    path.write_bytes(flipped(path, share))
    with pytest.raises(InputError, match="not a complete checkpoint"):
        train_maps("mlp", "l2", split, split, settings)
