"""Token identifiability: sequences in, rates out, against loops; the store; controls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor

from attnlens import AttnLensError, Lens, TokenIdentifiability
from attnlens.capture import LayerCapture
from attnlens.errors import AttnLensWarning, InputError, UnsupportedAttentionError
from attnlens.recovery import MapTraining, token_store
from attnlens.recovery.packed_tokens import (
    TEST,
    TRAIN,
    VALIDATION,
    PackedTokens,
    summed_equations,
)
from attnlens.recovery.ridge_maps import best_ridge_maps
from attnlens.recovery.token_identifiability import ENTERED
from attnlens.recovery.token_store import TokenStore
from tests.conftest import Encoder
from tests.support.models import build, text_inputs

WIDTH, WORDS, POSITIONS = 8, 40, 16
TABLE = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1))
PLACES = torch.randn(POSITIONS, WIDTH, generator=torch.Generator().manual_seed(2))
MIX = 0.8 * torch.linalg.qr(TABLE[:WIDTH])[0]
NOISE = (0.2, 0.9)  # of what leaves each layer
QUICK = MapTraining(learning_rate=2e-2, batch_size=64, patience=4, max_epochs=30, width=16)


def texts(count: int, seed: int = 0) -> list[Tensor]:
    """Token ids of sequences of 3 to 11 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [torch.randint(WORDS, (length,), generator=generator) for length in lengths]


def batches(sequences: list[Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded ids `[B, K]` and masks, padding on either side in turn."""
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        width = max(map(len, part))
        ids, mask = torch.zeros(len(part), width, dtype=torch.int64), torch.zeros(len(part), width)
        for row, sequence in enumerate(part):
            place = slice(0, len(sequence)) if row % 2 else slice(width - len(sequence), width)
            ids[row, place], mask[row, place] = sequence, 1
        yield ids, mask.bool()


def embed(ids: Tensor, mask: Tensor) -> Tensor:
    place = (mask.cumsum(1) - 1).clamp(min=0)
    return TABLE[ids] + 0.7 * PLACES[place]


def leave(entered: Tensor, ids: Tensor, layer: int) -> Tensor:
    """A hidden state that depends on the token, its word and its layer alone."""
    noise = torch.sin(37.0 * entered.roll(1, -1) + 11.0 * ids[..., None] + layer)
    return entered + entered @ MIX + NOISE[layer] * noise


def feed(
    observer: TokenIdentifiability, sequences: list[Tensor], size: int = 4, layers: int = 2
) -> TokenIdentifiability:
    """Drive an observer as a lens would."""
    for ids, mask in batches(sequences, size):
        observer.begin_forward({"input_ids": ids, "attention_mask": mask})
        hidden = entered = embed(ids, mask)
        for layer in range(layers):
            output = leave(entered, ids, layer)
            observer.update_layer(capture(hidden, output, mask, layer))
            hidden = output
        observer.end_forward(completed=True)
    return observer


def capture(
    hidden: Tensor, output: Tensor, mask: Tensor, layer: int, **fields: Any
) -> LayerCapture:
    fields = {"link": "next" if layer else "first", **fields}
    return LayerCapture(
        f"layer.{layer}", "layer.*", layer, hidden, output, mask, lambda state: state, **fields
    )


def stored(observer: TokenIdentifiability, split: int) -> list[Tensor]:
    """The input embeddings of every sequence of a split."""
    return [
        sequence.hidden[0]
        for shard in observer.store.shards(split)
        for sequence in shard().sequences()
    ]


def collected(count: int = 120, **settings: Any) -> TokenIdentifiability:
    return feed(
        TokenIdentifiability("mlp", training=QUICK, words=TABLE.__getitem__, **settings),
        texts(count),
    )


# Rates


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_naive_rates_are_those_of_a_loop(distance: str) -> None:
    sequences = texts(120)
    observer = TokenIdentifiability(
        "naive",
        distance,
        neighbours=1,
        words=TABLE.__getitem__,
        labels=lambda inputs: inputs["input_ids"] % 3,
        label_names=("a", "b"),
    )
    feed(observer, sequences)
    found = observer.compute()
    test = {tuple(x.flatten().tolist()) for x in stored(observer, TEST)}
    assert len(test) == found.sequences[2] > 8
    hits = {name: np.zeros(2) for name in ("rate", "words", "a", "b", -1, 1)}
    tokens = dict.fromkeys(hits, 0)
    metric = {"cosine": "cosine", "l2": "sqeuclidean"}[distance]
    per_sequence = []
    for ids in sequences:
        entered = embed(ids[None], torch.ones(1, len(ids), dtype=torch.bool))[0]
        if tuple(entered.flatten().tolist()) not in test:
            continue
        n = len(ids)
        outputs = [leave(entered, ids, layer) for layer in range(2)]
        near = [cdist(output, entered, metric).argmin(1) for output in outputs]
        words = [cdist(output, TABLE[ids], metric).argmin(1) for output in outputs]
        per_sequence.append((n, [int((row == np.arange(n)).sum()) for row in near]))
        for i in range(n):
            own = np.array([row[i] == i for row in near])
            for name, hit in (
                ("rate", own),
                ("words", np.array([ids[row[i]] == ids[i] for row in words])),
                ("ab!"[ids[i] % 3], own),
                (-1, np.array([row[i] == i - 1 for row in near]) if i else None),
                (1, np.array([row[i] == i + 1 for row in near]) if i < n - 1 else None),
            ):
                if name in hits and hit is not None:
                    hits[name] += hit
                    tokens[name] += 1
    rates = {name: hits[name] / tokens[name] for name in hits}
    assert 0.2 < rates["rate"][1] < rates["rate"][0] <= 1
    np.testing.assert_allclose(found.rate, rates["rate"])
    np.testing.assert_allclose(found.transfer, np.stack([rates["rate"]] * 2))
    np.testing.assert_allclose(found.words, rates["words"])
    np.testing.assert_allclose(found.by_label, np.stack([rates["a"], rates["b"]], 1))
    np.testing.assert_allclose(found.neighbours, np.stack([rates[-1], rates[1]], 1))
    lengths = np.array([n for n, _ in per_sequence])
    assert found.tokens[2] == lengths.sum() == tokens["rate"]
    assert found.chance == pytest.approx(len(lengths) / lengths.sum())
    residual = np.array([counts for _, counts in per_sequence]) - lengths[:, None] * rates["rate"]
    error = np.sqrt((residual**2).sum(0) * len(lengths) / (len(lengths) - 1)) / lengths.sum()
    np.testing.assert_allclose(found.error, error)


def test_trained_maps_identify_more_and_transfer_less() -> None:
    observer = collected()
    mlp, linear, naive = (
        observer.compute(), observer.using("linear").compute(), observer.using("naive").compute()
    )  # fmt: skip
    for trained in (mlp, linear):
        assert (trained.rate > naive.rate + 0.05).all()
        assert (trained.rate[0] > 0.95) and (trained.epochs >= 1).all()
        torch.testing.assert_close(trained.transfer.diagonal(), trained.rate)
        assert trained.transfer[1, 1] >= trained.transfer[0, 1]
    assert naive.loss.isnan().all() and naive.epochs.isnan().all()
    assert mlp.ridge.isnan().all()
    assert (mlp.map, linear.map, naive.map) == ("mlp", "linear", "naive")


def test_neighbours_have_maps_of_their_own() -> None:
    """Hidden states made of the next token alone: the map to it is linear, the own one is not."""
    observer = TokenIdentifiability("linear", "l2", neighbours=1)
    for ids, mask in batches(texts(150), 4):
        entered = embed(ids, mask)
        observer.begin_forward({"input_ids": ids})
        observer.update_layer(capture(entered, entered.roll(-1, 1), mask, 0))
        observer.end_forward(True)
    found = observer.compute()
    assert found.offsets == (-1, 1)
    assert found.neighbours[0, 1] == 1.0
    assert found.rate[0] < 0.5 and found.neighbours[0, 0] < 0.5


# The closed form


def test_streaming_closed_form_is_the_batch_solution() -> None:
    streaming = feed(TokenIdentifiability("linear", "l2"), texts(120), size=3)
    assert not stored(streaming, TRAIN) and not stored(streaming, VALIDATION)
    batch = collected().using("linear", "l2")
    found, expected = streaming.compute(), batch.compute()
    assert torch.equal(found.ridge, expected.ridge)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert torch.equal(found.rate, expected.rate)
    sums = streaming.sums["layer.*", ENTERED]
    equations = (summed_equations(sums, split, 0) for split in (TRAIN, VALIDATION))
    maps = best_ridge_maps(*equations).parameters
    hidden = torch.cat([shard().hidden for shard in batch.store.shards(TRAIN)], 1).double()
    for layer in range(2):
        e, x = hidden[layer + 1].numpy(), hidden[0].numpy()
        centred = e - e.mean(0)
        damping = float(found.ridge[layer]) * (centred**2).sum() / e.shape[1]
        rows = np.vstack([centred, np.sqrt(damping) * np.eye(WIDTH)])
        right = np.vstack([x - x.mean(0), np.zeros((WIDTH, WIDTH))])
        weight = np.linalg.lstsq(rows, right, rcond=None)[0]
        np.testing.assert_allclose(maps[0][layer], weight, rtol=1e-5, atol=1e-6)
    adam = batch.using("linear", "l2", solver="adam")
    assert adam.compute().loss.min() >= found.loss.min() - 1e-6


@pytest.mark.parametrize("map", ["linear", "mlp"])
def test_halves_merge_into_the_whole(map: str) -> None:
    sequences = texts(120)
    settings: dict[str, Any] = {"map": map, "distance": "l2", "training": QUICK}
    settings["words"] = TABLE.__getitem__
    whole = feed(TokenIdentifiability(**settings), sequences)
    halves = [
        feed(TokenIdentifiability(**settings), part, size=5)
        for part in (sequences[70:], sequences[:70])
    ]
    merged = halves[0].merge(halves[1])
    restored = TokenIdentifiability(**settings)
    restored.load_state_dict(merged.state_dict())
    expected = whole.compute()
    for observer in (merged, restored):
        found = observer.compute()
        for name, values in expected.tensors().items():
            torch.testing.assert_close(
                found.tensors()[name], values, rtol=1e-6, atol=1e-7, equal_nan=True, msg=name
            )


# Splits


def test_a_sequence_is_in_one_split_wherever_it_is_seen() -> None:
    sequences = texts(300)
    once = feed(TokenIdentifiability("mlp"), sequences)
    again = feed(TokenIdentifiability("mlp"), [*sequences[::-1], *sequences[:50]], size=7)
    splits = []
    for observer in (once, again):
        contents = [
            {tuple(x.flatten().tolist()) for x in stored(observer, split)}
            for split in (TRAIN, VALIDATION, TEST)
        ]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert not contents[one] & contents[other]
        splits.append(contents)
    assert splits[0] == splits[1]
    counts = once.sums[("layer.*", -1)]["sequences"]
    assert counts.sum() == 300 and again.sums[("layer.*", -1)]["sequences"].sum() == 350
    for count, share in zip(counts.tolist(), (0.70, 0.15, 0.15), strict=True):
        assert abs(count - 300 * share) < 4 * (300 * share * (1 - share)) ** 0.5
    other = feed(TokenIdentifiability("mlp", seed=1), sequences)
    assert other.sums[("layer.*", -1)]["sequences"].tolist() != counts.tolist()


def test_padding_and_batching_change_nothing() -> None:
    sequences = texts(60)
    alone = feed(TokenIdentifiability("naive"), sequences, size=1).compute()
    together = feed(TokenIdentifiability("naive"), sequences, size=10).compute()
    assert torch.equal(alone.rate, together.rate)
    assert torch.equal(alone.tokens, together.tokens) and alone.tokens.sum() == sum(
        map(len, sequences)
    )
    assert torch.equal(alone.rotated, together.rotated)


# Controls


def test_angles_and_magnitudes() -> None:
    still = collected(angle=0.0, rescaling=1.0).using("naive")
    cosine, l2 = still.compute(), still.using("naive", "l2").compute()
    for found in (cosine, l2):
        torch.testing.assert_close(found.rotated, found.rate, rtol=0, atol=0.01)
        assert torch.equal(found.rescaled, found.rate)
    moved = collected(angle=60.0, rescaling=8.0).using("naive")
    cosine, l2 = moved.compute(), moved.using("naive", "l2").compute()
    assert torch.equal(cosine.rescaled, cosine.rate)  # an angle does not depend on the norm
    assert (l2.rescaled < l2.rate - 0.02).all()
    assert (cosine.rotated < cosine.rate - 0.02).all()


@pytest.mark.parametrize(("of_word", "of_place"), [(1.0, 0.0), (0.05, 2.0)])
def test_the_position_control_knows_what_positions_tell(of_word: float, of_place: float) -> None:
    observer = TokenIdentifiability("naive")
    for ids, mask in batches(texts(300), 6):
        entered = of_word * TABLE[ids] + of_place * PLACES[(mask.cumsum(1) - 1).clamp(min=0)]
        observer.begin_forward({"input_ids": ids})
        observer.update_layer(capture(entered, entered, mask, 0))
        observer.end_forward(True)
    found = observer.compute()
    assert found.rate[0] == 1.0
    if of_place:
        assert found.position > 0.95
    else:
        assert found.position < 2 * found.chance


def test_positions_never_seen_in_training_are_not_guessed() -> None:
    few = feed(TokenIdentifiability("naive", positions=3), texts(120)).compute()
    many = feed(TokenIdentifiability("naive"), texts(120)).compute()
    assert 0 < few.position < many.position


def test_word_control_needs_words() -> None:
    assert feed(TokenIdentifiability("naive"), texts(60)).compute().words.isnan().all()
    wide = feed(
        TokenIdentifiability("naive", words=lambda ids: TABLE[ids].repeat(1, 1, 2)), texts(60)
    )
    assert wide.compute().words.isnan().all()  # no distance to vectors of another width
    observer = TokenIdentifiability(words=TABLE.__getitem__)
    mask = torch.ones(1, 4, dtype=torch.bool)
    observer.begin_forward({"inputs_embeds": torch.zeros(1, 4, WIDTH)})
    observer.update_layer(capture(torch.ones(1, 4, WIDTH), torch.ones(1, 4, WIDTH), mask, 0))
    with pytest.raises(InputError, match="input_ids"):
        observer.end_forward(True)


# The store


def test_memory_is_bounded_by_a_random_sample() -> None:
    sequences = texts(400)
    with pytest.warns(AttnLensWarning, match="random sample"):
        small = feed(TokenIdentifiability("mlp", max_tokens=500), sequences)
    with pytest.warns(AttnLensWarning):
        shuffled = feed(TokenIdentifiability("mlp", max_tokens=500), sequences[::-1], size=9)
    assert 450 < small.store.tokens <= 500
    assert small.store.identity() == shuffled.store.identity()
    kept = {tuple(x.flatten().tolist()) for s in range(3) for x in stored(small, s)}
    first = [
        embed(ids[None], torch.ones(1, len(ids), dtype=torch.bool))[0] for ids in sequences[:70]
    ]
    assert len(kept & {tuple(x.flatten().tolist()) for x in first}) < 0.5 * len(kept)
    with pytest.warns(AttnLensWarning):
        halves = [
            feed(TokenIdentifiability("mlp", max_tokens=500), part)
            for part in (sequences[:200], sequences[200:])
        ]
    assert halves[0].merge(halves[1]).store.identity() == small.store.identity()


def test_bytes_do_not_grow_with_the_number_of_batches() -> None:
    limit = 60_000
    with pytest.warns(AttnLensWarning):
        observer = feed(TokenIdentifiability("mlp", max_bytes=limit), texts(100))
    after_100 = observer.store.nbytes
    feed(observer, texts(300, seed=5))
    assert 0.9 * limit < after_100 <= limit and 0.9 * limit < observer.store.nbytes <= limit


def test_a_folder_holds_the_same_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "_SHARD_BYTES", 6_000)
    folder = tmp_path / "tokens"
    on_disk, in_memory = collected(folder=folder), collected()
    files = list(folder.iterdir())
    assert len(files) > 5 and {path.suffix for path in files} == {".safetensors"}
    assert on_disk.store.nbytes < 3 * 6_000 + 2_000
    assert on_disk.store.identity() == in_memory.store.identity()
    for split in (TRAIN, VALIDATION, TEST):
        disk = sorted(stored(on_disk, split), key=lambda x: x.half().tolist())
        memory = sorted(stored(in_memory, split), key=lambda x: x.half().tolist())
        for one, other in zip(disk, memory, strict=True):
            assert torch.equal(one, other.half().float())
    assert (on_disk.compute().rate - in_memory.compute().rate).abs().max() < 0.06
    with pytest.raises(InputError, match="holds files"):
        TokenIdentifiability(folder=folder)
    on_disk.reset()
    assert not list(folder.iterdir())
    with pytest.raises(AttnLensError, match="has seen no complete forward"):
        on_disk.compute()


def test_a_folder_does_not_grow_with_the_number_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "_SHARD_BYTES", 3_000)
    with pytest.warns(AttnLensWarning):
        observer = feed(TokenIdentifiability("mlp", max_tokens=600, folder=tmp_path), texts(700))
    with pytest.warns(AttnLensWarning):
        memory = feed(TokenIdentifiability("mlp", max_tokens=600), texts(700))
    assert observer.store.identity() == memory.store.identity()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 2 * 600 * (3 * WIDTH * 2 + 8) + 1_000 * len(list(tmp_path.iterdir()))
    tokens = sum(len(x) for split in range(3) for x in stored(observer, split))
    assert tokens == observer.store.tokens <= 600


def test_a_folder_refuses_what_half_precision_cannot_hold(tmp_path: Path) -> None:
    observer = TokenIdentifiability("mlp", folder=tmp_path)
    hidden, mask = torch.full((1, 4, WIDTH), 1e5), torch.ones(1, 4, dtype=torch.bool)
    observer.begin_forward({})
    observer.update_layer(capture(hidden, hidden, mask, 0))
    with pytest.raises(InputError, match=r"1e\+05 do not fit .* folder=None"):
        observer.end_forward(True)


def test_packing_and_unpacking() -> None:
    observer = collected(20)
    (packed,) = observer.store.packed()
    again = PackedTokens.of(packed.sequences())
    assert all(torch.equal(one, other) for one, other in zip(packed, again, strict=True))
    keep = torch.arange(len(packed.lengths)) % 2 == 0
    wanted = PackedTokens.of(packed.sequences()[::2])
    for one, other in zip(packed.select(keep), wanted, strict=True):
        assert torch.equal(one, other)


def test_equal_sequences_are_kept_or_left_out_together() -> None:
    sequences = texts(40)
    with pytest.warns(AttnLensWarning):
        observer = feed(TokenIdentifiability("mlp", max_tokens=150), sequences * 2)
    store: TokenStore = observer.store
    priorities = [int(p) for packed in store.packed() for p in packed.priority]
    assert priorities and all(priorities.count(p) == 2 for p in priorities)


# What cannot be done


def test_sequences_that_are_not_finite_are_left_out_and_reported() -> None:
    observer = collected()
    hidden, mask = torch.ones(2, 5, WIDTH), torch.ones(2, 5, dtype=torch.bool)
    broken = hidden.clone()
    broken[1, 2, 3] = torch.nan
    before = observer.store.tokens
    observer.begin_forward({"input_ids": torch.ones(2, 5, dtype=torch.int64)})
    observer.update_layer(capture(hidden, broken, mask, 0))
    observer.update_layer(capture(broken, hidden, mask, 1))
    observer.end_forward(True)
    assert observer.store.tokens == before + 5
    with pytest.warns(AttnLensWarning, match=r"1 sequence\(s\) held NaN"):
        observer.using("naive").compute()


def test_an_interrupted_pass_counts_for_nothing() -> None:
    observer = TokenIdentifiability()
    hidden, mask = torch.ones(1, 5, WIDTH), torch.ones(1, 5, dtype=torch.bool)
    observer.begin_forward({})
    observer.update_layer(capture(hidden, hidden, mask, 0))
    observer.end_forward(completed=False)
    assert not observer.sums and not observer.store.tokens


def test_layers_that_change_the_tokens_or_do_not_always_run_are_refused() -> None:
    observer = TokenIdentifiability()
    hidden, mask = torch.ones(1, 6, WIDTH), torch.ones(1, 6, dtype=torch.bool)
    observer.begin_forward({})
    observer.update_layer(capture(hidden, hidden[:, ::2], mask, 0))
    with pytest.raises(UnsupportedAttentionError, match=r"layer\.0 leaves \[1, 3, 8\]"):
        observer.end_forward(True)
    feed(observer, texts(4))
    with pytest.raises(UnsupportedAttentionError, match="LayerDrop"):
        feed(observer, texts(4), layers=1)


def test_wrong_arguments_are_named() -> None:
    for settings, message in (
        ({"map": "quadratic"}, "map must be"),
        ({"distance": "l1"}, "map must be"),
        ({"solver": "closed"}, "solver must be"),
        ({"split": (0.5, 0.5, 0.5)}, "split must be"),
        ({"angle": 200.0}, "angle in"),
    ):
        with pytest.raises(InputError, match=message):
            TokenIdentifiability(**settings)
    observer = feed(TokenIdentifiability("naive"), texts(60))
    with pytest.raises(InputError, match="stores test sequences only"):
        observer.using("linear")
    with pytest.raises(InputError, match="different seed cannot be merged"):
        observer.merge(TokenIdentifiability("naive", seed=2))
    with pytest.raises(AttnLensError, match="split is empty: 0 of 1"):
        feed(TokenIdentifiability("naive"), texts(1)).compute()
    with pytest.raises(InputError, match="labels must be integers, one for each token"):
        feed(TokenIdentifiability("naive", labels=torch.zeros(1, 2)), texts(4))


def test_tokens_of_two_stacks_are_not_mixed() -> None:
    observer = feed(TokenIdentifiability("naive"), texts(60))
    hidden, mask = torch.ones(1, 6, WIDTH), torch.ones(1, 6, dtype=torch.bool)
    observer.begin_forward({})
    observer.update_layer(
        LayerCapture("tower.0", "tower.*", 0, hidden, hidden, mask, lambda state: state)
    )
    observer.end_forward(True)
    with pytest.raises(AttnLensError, match=r"layer\.\*, tower\.\*"):
        observer.compute()


def test_towers_that_take_turns_are_told_apart() -> None:
    ids, mask = next(batches(texts(8), 8))
    entered = embed(ids, mask)
    observer = TokenIdentifiability("mlp")
    observer.begin_forward({"input_ids": ids})
    outputs = []
    for layer in range(2):
        hidden = outputs[-1].clone() if outputs else entered
        outputs.append(leave(entered, ids, layer))
        observer.update_layer(capture(hidden, outputs[-1], mask, layer))
        other = capture(entered, entered, mask, layer)
        observer.update_layer(replace(other, stack="tower.*"))
    kept = [output.clone() for output in outputs]
    for output in outputs:
        output.zero_()  # whatever follows the layers may work in place
    observer.end_forward(True)
    counts = {key: int(sums["tokens"]) for key, sums in observer.sums.items() if key[1] >= 0}
    assert counts == {(s, i): int(mask.sum()) for s in ("layer.*", "tower.*") for i in (0, 1)}
    sequences = [s for packed in observer.store.packed() for s in packed.sequences()]
    ours = [s for s in sequences if not torch.equal(s.hidden[1], s.hidden[0])]
    assert len(ours) == 8
    rows = {tuple(row.tolist()) for output in kept for row in output[mask]}
    assert all(tuple(row.tolist()) in rows for s in ours for row in s.hidden[1:].flatten(0, 1))
    assert {tuple(r.tolist()) for s in ours for r in s.hidden[0]} == {
        tuple(row.tolist()) for row in entered[mask]
    }


# Through a lens


def test_a_running_model_is_looked_at() -> None:
    model = build("bert")
    words = model.get_input_embeddings()
    observer = TokenIdentifiability("linear", "l2", words=words)
    naive = TokenIdentifiability("naive", layers=[1])
    seen: list[Tensor] = []
    hook = model.embeddings.register_forward_hook(lambda module, args, out: seen.append(out))
    with Lens(model, observer, naive), torch.no_grad():
        for seed in range(16):
            model(**text_inputs((9, 12, 7), seed=seed))
    hook.remove()
    found = observer.compute()
    assert found.layers == (("encoder.layer.*", 0), ("encoder.layer.*", 1))
    assert found.sequences.sum() == 48 and found.tokens.sum() == 16 * 28
    assert (found.rate > 0.8).all() and (found.words > 0.5).all()
    assert naive.compute().layers == (("encoder.layer.*", 1),)
    entered = {tuple(row.tolist()) for out in seen for row in out.flatten(0, 1)}
    assert all(tuple(row.tolist()) in entered for x in stored(observer, TEST) for row in x)


def test_a_trained_encoder(minilm: Encoder, real_text: list[str]) -> None:
    observer = TokenIdentifiability("naive", words=minilm.model.get_input_embeddings(), seed=3)
    with Lens(minilm.model, observer), torch.no_grad():
        minilm.model(**minilm.tokenize(real_text))
    found = observer.compute()
    assert found.rate[0] > 0.95 and found.rate[-1] < found.rate[0]
    assert found.words[0] > 0.95 and found.position < 0.9
