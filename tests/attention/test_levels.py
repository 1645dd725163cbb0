"""What a layer and an answer see of attention, against dense projectors and least squares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnlens import (
    HeadImportance,
    Lens,
    effective_for,
    functional,
)
from attnlens.answering import EffectiveFor
from attnlens.attention import LayerStatistics, Recording
from attnlens.errors import CaptureError, InputError, MemoryBoundError
from tests.algebra.test_hypothesis import MASKS, draw_mask
from tests.attention.test_statistics import PADDED, PROBLEMS, PROJECTION
from tests.support import heads, models, reference
from tests.support.captures import synthetic_capture


def dense_layer(capture: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`A⊥` of a layer, from the projector of the stacked values of every row, and its nullity."""
    attention = capture.attention().double()
    dense = reference.dense_mask(mask, *attention.shape).numpy()
    result, nullity = np.zeros(attention.shape), np.zeros(attention.shape[::2])
    for example, row in np.ndindex(*nullity.shape):
        seen = [np.flatnonzero(keys) for keys in dense[example, :, row]]
        values = [
            reference.seen_values(capture.value[example, head], head, capture.projection)[keys]
            for head, keys in enumerate(seen)
        ]
        stacked = np.concatenate(values)
        left, sigma, _ = np.linalg.svd(stacked, full_matrices=False)
        kept = left[:, sigma > 1e-6 * sigma.max(initial=0.0)]
        given = np.concatenate([attention[example, h, row].numpy()[k] for h, k in enumerate(seen)])
        projected = np.split(kept @ (kept.T @ given), np.cumsum([len(k) for k in seen])[:-1])
        for head, keys in enumerate(seen):
            result[example, head, row, keys] = projected[head]
        nullity[example, row] = len(stacked) - kept.shape[1]
    return torch.from_numpy(result), torch.from_numpy(nullity)


def cut(projection: Tensor, rank: int) -> Tensor:
    """The projection with the stacked `W_O` reduced to a rank."""
    left, sigma, right = torch.linalg.svd(projection.double().flatten(0, 1), full_matrices=False)
    sigma[rank:] = 0
    return ((left * sigma) @ right).view_as(projection)


MASKED = ["no mask", "padding", "grouped heads", "causal with padding", "window with padding"]


@pytest.mark.parametrize("rank", [32, 16, 5])
@pytest.mark.parametrize("name", [*MASKED, "one mask for each head"])
def test_a_layer_equals_the_dense_projector(name: str, rank: int) -> None:
    settings, mask = PROBLEMS[name]
    projection = cut(PROJECTION, rank)
    capture = synthetic_capture(dtype=torch.float64, projection=projection, **settings)
    expected, nullity = dense_layer(capture, mask)
    rows = capture.real_rows.any(1)
    found = capture.effective_attention(level="layer") * rows[:, None, :, None]
    expected = expected * rows[:, None, :, None]
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    written = torch.einsum("bhqk,bhkm->bqm", found - capture.attention(), capture.projected_value())
    assert (written * rows[..., None]).abs().max() < 1e-9
    level = capture.layer_level()
    assert torch.equal(level.nullity[rows].double(), nullity[rows])
    square = expected.square().sum((1, 3))
    torch.testing.assert_close(level.square, square, rtol=1e-7, atol=1e-9)
    observer = LayerStatistics()
    observer.update(capture)
    result = observer.compute()
    raw = (capture.attention().square().sum((1, 3)) * rows).sum(-1)
    fraction = (square.sum(-1) / raw).mean()
    torch.testing.assert_close(result.layer_fraction[0], fraction, rtol=1e-7, atol=1e-9)
    assert result.layer_fraction[0] <= result.heads_fraction[0] + 1e-12
    if rank == 32:
        torch.testing.assert_close(result.layer_fraction, result.heads_fraction)
        alone = capture.effective_attention() * rows[:, None, :, None]
        torch.testing.assert_close(found, alone, rtol=1e-7, atol=1e-9)
    else:
        assert result.layer_fraction[0] < 0.999 * result.heads_fraction[0]


@pytest.mark.parametrize("seed", range(40))
def test_the_law_of_the_layer(seed: int) -> None:
    """Nullity `H n − min(rank W_O, H min(n, D))`, whatever the shapes; grouped values included."""
    draw = np.random.default_rng(seed)
    count, width, tokens = (int(draw.integers(1, high)) for high in (5, 9, 20))
    groups = int(draw.choice([g for g in range(1, count + 1) if count % g == 0]))
    hidden = int(draw.integers(1, 2 * count * width + 1))
    rank = int(draw.integers(1, min(hidden, count * width) + 1))
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(count, width, hidden, dtype=torch.float64, generator=generator)
    projection = cut(projection, rank)
    settings: dict[str, Any] = {"heads": count, "groups": groups, "width": width}
    capture = synthetic_capture(
        queries=tokens,
        keys=tokens,
        dtype=torch.float64,
        projection=projection,
        batch=1,
        seed=seed,
        **settings,
    )
    level = capture.layer_level()
    bound = count * min(tokens, width)
    assert (level.nullity == count * tokens - min(rank, bound)).all()
    alone = capture.effective_attention().square().sum()
    assert level.square.sum() <= alone * (1 + 1e-9)
    if rank == count * width:
        torch.testing.assert_close(level.square.sum(), alone, rtol=1e-9, atol=0)


def test_layers_stream_merge_and_leave_out_what_is_not_finite() -> None:
    projection = cut(PROJECTION, 16)
    first = synthetic_capture(projection=projection, mask=PADDED[:, None, None])
    second = synthetic_capture(projection=projection, seed=1)
    second.grouped_value[0, 1, 2, 0] = torch.nan
    one, other, whole = LayerStatistics(), LayerStatistics(), LayerStatistics()
    for observer, captures in ((one, [first]), (other, [second]), (whole, [first, second])):
        for capture in captures:
            observer.update(capture)
    with pytest.warns(UserWarning, match="held NaN"):
        expected = whole.compute()
    assert expected.examples.tolist() == [5] and expected.skipped.tolist() == [1]
    with pytest.warns(UserWarning):
        merged = one.merge(other).compute()
    for name, values in expected.tensors().items():
        torch.testing.assert_close(getattr(merged, name), values)
    with pytest.raises(CaptureError, match="no per-head output projection"):
        LayerStatistics().update(synthetic_capture())
    with pytest.raises(InputError, match="level must be"):
        first.effective_attention(level="answer")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="simplex=True"):
        first.effective_attention(simplex=True, level="layer")


@st.composite
def answers(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    tokens, width = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    seed, count = draw(st.integers(0, 2**31)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    mask = draw_mask(draw(st.sampled_from(MASKS)), 2, 2, tokens, seed)
    dense = reference.dense_mask(mask, 2, 2, tokens, tokens)
    attention = normal(2, 2, tokens, tokens).masked_fill(~dense, -torch.inf).softmax(-1)
    gradient = normal(count, 2, 2, tokens, width)
    gradient[count // 2 :] = gradient[: count - count // 2].clone()  # some are others again
    return attention.nan_to_num(0.0), normal(2, 2, tokens, width), gradient, mask


@given(answers())
def test_answers_equal_least_squares(problem: tuple[Tensor, Tensor, Tensor, Any]) -> None:
    attention, value, gradient, mask = problem
    found = functional.answer_attention(attention, value, gradient, mask)
    dense = reference.dense_mask(mask, *attention.shape).numpy()
    head_level = reference.effective_attention(attention, value, mask)
    for place in np.ndindex(*attention.shape[:2]):
        counted = dense[place].any(1) & dense[place].any(0)  # own tokens that are keys
        seen = dense[place] & counted[:, None]
        if not np.array_equal(dense[place[0]].any((0, 1)), dense[place].any(0)):
            continue
        slopes = np.stack([((g[place] @ value[place].T).numpy() * seen).ravel() for g in gradient])
        rows = attention[place].numpy() * seen
        weights = np.linalg.lstsq(slopes.T, rows.ravel(), rcond=1e-9)[0]
        expected = (slopes.T @ weights).reshape(rows.shape)
        x = found[place].numpy()
        scale = np.linalg.norm(rows) + 1e-300
        assert np.linalg.norm(x - expected) <= 1e-6 * scale
        visible = head_level[place].numpy() * seen
        assert np.linalg.norm(x) <= np.linalg.norm(visible) * (1 + 1e-9) + 1e-12 * scale


def llama() -> tuple[Any, dict[str, Tensor]]:
    config = hf.LlamaConfig(**models.TEXT, num_key_value_heads=2)
    return models.initialise(hf.LlamaModel, config), {
        "input_ids": models.text_inputs()["input_ids"]
    }


ENCODERS = ["bert", "modernbert", "t5", "vit", "gpt2", "llama"]


@pytest.mark.parametrize("name", ENCODERS)
def test_levels_of_models(name: str) -> None:
    """Slopes along what is left out are zero, and each reader sees no more than the one before."""
    if name == "llama":
        model, inputs = llama()
    else:
        model, inputs = heads.build(name), heads.inputs(name)
    kinds: Any = "decoder" if name in ("gpt2", "llama") else None
    with torch.no_grad():
        bare = model(**inputs).last_hidden_state
    recording = Recording()
    parameters = [p.grad for p in model.parameters()]
    with Lens(model, recording, kinds=kinds):
        found = effective_for(
            model, inputs, lambda out: out.last_hidden_state.mean(1)[:, :6], maps=True, kinds=kinds
        )
    assert parameters == [None] * len(parameters)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, bare)
    assert (found.answer >= 0).all() and (found.answer <= found.head + 1e-6).all()
    assert (found.head <= 1).all()
    assert (found.layer <= found.heads + 1e-9).all() and (found.heads <= 1).all()
    assert found.directions.max() <= 6
    for capture, answer in zip(recording.compute(), found.maps, strict=True):
        effective = capture.effective_attention().double()
        rows = capture.real_rows[..., None]
        left, kept = (t * rows for t in (effective, answer))
        inner = (left * kept).sum((-1, -2))
        torch.testing.assert_close(inner, kept.square().sum((-1, -2)), rtol=2e-3, atol=1e-6)


def test_one_output_is_the_importance_of_the_head() -> None:
    model, batch = models.build("bert"), models.text_inputs((19,))

    def score(output: Any) -> Tensor:
        return output.last_hidden_state.square().sum((1, 2))[:, None]

    found = effective_for(model, batch, score)
    importance = HeadImportance()
    with Lens(model, importance):
        score(model(**batch)).sum().backward()
    expected = importance.compute().importance
    torch.testing.assert_close(found.importance, expected, rtol=1e-5, atol=0)
    assert (found.directions == 1).all()


def test_less_memory_takes_more_passes_and_gives_the_same() -> None:
    model, batch = models.build("bert"), models.text_inputs()
    whole = effective_for(model, batch)
    one_layer = models.HIDDEN * 2 * 19 * models.HIDDEN * 4
    parts = effective_for(model, batch, max_bytes=one_layer)
    for name, values in whole.tensors().items():
        torch.testing.assert_close(getattr(parts, name), values)
    with pytest.raises(MemoryBoundError, match="max_bytes"):
        effective_for(model, batch, max_bytes=one_layer - 1)


def test_answers_by_name() -> None:
    config = hf.BertConfig(**models.TEXT, num_labels=3)
    model = models.initialise(hf.BertForSequenceClassification, config)
    batch = models.text_inputs()
    logits = effective_for(model, batch, "logits")
    same = effective_for(model, batch, lambda out: out.logits)
    assert torch.equal(logits.answer, same.answer) and logits.directions.max() <= 3
    loss = effective_for(model, {**batch, "labels": torch.tensor([0, 2])}, "loss")
    assert (loss.directions <= 1).all() and (loss.answer <= logits.answer + 1e-6).all()
    frozen = effective_for(model.requires_grad_(False), batch, "logits")
    torch.testing.assert_close(frozen.answer, logits.answer)
    for wanted, message in (
        ("loss", "needs loss"),
        ("embedding", "needs last_hidden_state"),
        ("other", "must be"),
        (lambda out: out.logits.detach(), "without one"),
        (lambda out: out.logits[:, None], "scalar"),
    ):
        with pytest.raises(InputError, match=message):
            effective_for(model, batch, wanted)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="training mode"):
        effective_for(model.train(), batch, "logits")
    encoder = models.build("bert")
    with pytest.raises(CaptureError, match="does not depend on"):
        effective_for(encoder, batch, lambda out: encoder.embeddings.word_embeddings.weight[:2, :3])
    assert not [m for m in encoder.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert EffectiveFor is type(logits)
