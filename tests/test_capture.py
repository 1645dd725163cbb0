"""`Capture`: a frozen record, its derived tensors, and the output projection behind it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from attnlens import Capture, HeadStatistics, Lens, record
from attnlens.algebra import supports as support
from attnlens.algebra.effective import effective_attention
from attnlens.algebra.problem import problem
from attnlens.attention import Recording
from attnlens.errors import CaptureError
from tests.algebra.test_rowwise import random_mask
from tests.support import models, reference
from tests.support.captures import synthetic_capture
from tests.support.tiny import HEADS, WIDTH, TinyAttention, hidden_states

ALL_KINDS = ("encoder", "decoder", "cross")
PADDING = (torch.arange(26) < torch.tensor([26, 15, 5])[:, None])[:, None, None]


def captures_with_outputs(
    model: nn.Module, kinds: Any, **inputs: Tensor
) -> list[tuple[Capture, Tensor]]:
    """Captures of a second forward, each with the output of its projection module."""
    recording, outputs = Recording(), []
    with Lens(model, recording, kinds=kinds), torch.no_grad():
        model(**inputs)
        projections = {capture.output_projection.name for capture in recording.captures}
        handles = [
            model.get_submodule(name).register_forward_hook(
                lambda module, args, output: outputs.append(output)
            )
            for name in projections
        ]
        recording.reset()
        model(**inputs)
    for handle in handles:
        handle.remove()
    return list(zip(recording.captures, outputs, strict=True))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", models.FAMILIES)
def test_projection_rebuilds_the_output(name: str, implementation: str) -> None:
    """`Σ_h A_h V_h H_h + b` is what the model's own module returned."""
    kinds = ALL_KINDS if name == "bart" else None
    model = models.build(name, implementation)
    for capture, output in captures_with_outputs(model, kinds, **models.inputs(name)):
        batch, heads, queries, _, width = capture.shape
        assert capture.projection.shape == (heads, width, models.HIDDEN)
        assert capture.value_space == "T" and capture.projection_reason == ""
        rebuilt = (capture.attention() @ capture.projected_value()).sum(1)
        if capture.output_projection.bias is not None:
            rebuilt = rebuilt + capture.output_projection.bias
        expected = output.reshape(batch, queries, -1)
        torch.testing.assert_close(rebuilt, expected, rtol=1e-5, atol=1e-5)


def test_projection_of_a_transposed_weight() -> None:
    config = hf.GPT2Config(
        vocab_size=models.VOCABULARY, n_embd=32, n_head=4, n_layer=2, n_positions=64
    )
    model = models.initialise(hf.GPT2Model, config)
    for capture, output in captures_with_outputs(model, None, **models.text_inputs((19, 19))):
        assert capture.output_projection.name.endswith("attn.c_proj")
        rebuilt = (capture.attention() @ capture.projected_value()).sum(
            1
        ) + capture.output_projection.bias
        torch.testing.assert_close(rebuilt, output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "modernbert", "eurobert"])
def test_output_is_preserved_with_the_real_projection(name: str) -> None:
    for capture in record(models.build(name), **models.inputs(name)):
        real = capture.real_rows[..., None]  # what stands in rows of padding has no meaning
        attention, effective = capture.attention() * real, capture.effective_attention() * real
        mask = capture.mask.expand(attention.shape)
        expected = reference.effective_attention(attention, capture.value, mask, capture.projection)
        assert reference.relative_errors(effective, expected).max() <= 1e-5
        seen = capture.value.double() @ capture.projection.double()
        before, after = (a.double() @ seen for a in (attention, effective))
        assert reference.relative_errors(after, before).max() <= 1e-5
        assert (effective[~mask] == 0).all()
        simplex = capture.effective_attention(simplex=True) * real
        torch.testing.assert_close(simplex.sum(-1), attention.sum(-1), rtol=1e-5, atol=1e-5)
        alone = effective_attention(attention, capture.value, capture.mask)
        torch.testing.assert_close(alone, effective, rtol=1e-5, atol=1e-6)


def test_projection_is_read_again_after_an_update() -> None:
    model, hidden = TinyAttention(), hidden_states()
    recording = Recording()
    with Lens(model, recording), torch.no_grad():
        model(hidden)
        model(hidden)
        model.output.weight[0] = 0
        model(hidden)
    first, second, third = (capture.output_projection for capture in recording.captures)
    assert first is second
    assert third.weight[:, :, 0].eq(0).all()
    recording.reset()
    with torch.no_grad(), Lens(model, recording):
        model(hidden)
        model.output.weight = nn.Parameter(torch.ones_like(model.output.weight))
        model(hidden)
    assert recording.captures[1].projection.eq(1).all()


class Quantised(nn.Module):
    """A stand-in for an eight-bit linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(32, 32, dtype=torch.int8))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.to(hidden.dtype)


NO_PROJECTION = {
    "a norm between": (TinyAttention(between=nn.LayerNorm(32)), "sits between"),
    "a gate between": (TinyAttention(between=nn.Sigmoid()), "sits between"),
    "no projection": (TinyAttention(output=nn.Identity()), "no linear module"),
    "not a linear module": (TinyAttention(output=Quantised()), "no linear module"),
}


@pytest.mark.parametrize(("model", "reason"), NO_PROJECTION.values(), ids=NO_PROJECTION.keys())
def test_no_projection_and_why(model: TinyAttention, reason: str) -> None:
    statistics, recording = HeadStatistics(), Recording()
    hidden = hidden_states()
    with torch.no_grad():
        before = model(hidden)
        with Lens(model, statistics, recording):
            for _ in range(2):
                assert torch.equal(model(hidden), before)
    assert len(recording.captures) == 2
    for capture in recording.captures:
        assert capture.projection is None and capture.value_space == "V"
        with pytest.raises(CaptureError, match=reason):
            capture.projected_value()
        torch.testing.assert_close(capture.attention() @ capture.value, capture.context)
    result = statistics.compute()
    assert result.value_space == ("V",)
    assert result.effective_norm.isfinite().all()


@pytest.mark.parametrize("between", [None, nn.Dropout(0.5)])
def test_identity_between_is_seen_through(between: nn.Module | None) -> None:
    model = TinyAttention(between=between).eval()
    (capture,) = record(model, hidden_states())
    assert capture.output_projection.name == "output"
    per_head = model.output.weight.T.reshape(HEADS, WIDTH, -1)
    assert torch.equal(capture.projection, per_head)


def test_grouped_heads_are_repeated_only_when_asked() -> None:
    capture = record(models.build("eurobert"), **models.inputs("eurobert"))[0]
    assert capture.grouped_value.shape[1] == capture.grouped_key.shape[1] == 2
    assert capture.value.shape[1] == capture.key.shape[1] == 4
    for head in range(4):
        assert torch.equal(capture.value[:, head], capture.grouped_value[:, head // 2])
        assert torch.equal(capture.key[:, head], capture.grouped_key[:, head // 2])
    assert problem(capture).values.shape[1] == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mask": PADDING},
        {"causal": True, "mask": PADDING},
        {"causal": True, "queries": 7},
        {"causal": True, "queries": 33},
        {"mask": PADDING & random_mask(26, 26)},
        {"groups": 2},
    ],
)
def test_rows_and_chunks_of_attention(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = synthetic_capture(dtype=torch.float64, **settings)
    whole = capture.attention()
    expected = reference.attention(capture.query, capture.key, capture.mask)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(whole @ capture.value, capture.context, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(capture.attention(slice(2, 5)), whole[:, :, 2:5])
    monkeypatch.setattr(support, "_CHUNK_ELEMENTS", 3 * 3 * 4 * 26)
    rows, blocks = zip(*capture.rows.chunks(), strict=True)
    assert len(blocks) > 2 and rows[0] == slice(0, 3)
    torch.testing.assert_close(torch.cat(blocks, 2), whole)


def test_rows_of_a_position_bias() -> None:
    for capture in record(models.build("t5"), **models.inputs("t5")):
        torch.testing.assert_close(capture.attention(slice(3, 7)), capture.attention()[:, :, 3:7])


def test_nan_stays_nan() -> None:
    """Only rows with nothing to attend to are zero."""
    capture = synthetic_capture(mask=PADDING)
    capture.query[1, 2, 3] = torch.nan
    attention = capture.attention()
    assert attention[1, 2, 3, :15].isnan().all()
    assert attention.isnan().any(-1).sum() == 1


def test_a_capture_is_frozen() -> None:
    capture = synthetic_capture()
    with pytest.raises(FrozenInstanceError):
        capture.layer = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        capture.masking.causal = True  # type: ignore[misc]


def test_attention_that_cannot_be_recomputed_is_an_error() -> None:
    capture = synthetic_capture()
    object.__setattr__(capture, "query", None)
    with pytest.raises(CaptureError, match=r"layer\.0\.attention \(layer 0\)"):
        capture.attention()


def test_everything_is_detached() -> None:
    model = models.build("bert").train()
    recording = Recording()
    with Lens(model, recording):
        output = model(**models.text_inputs())[0]
    assert output.requires_grad
    for capture in recording.captures:
        tensors = [value for value in vars(capture).values() if isinstance(value, Tensor)]
        tensors += [capture.projection, capture.output_projection.bias, capture.attention()]
        assert len(tensors) > 5
        assert not any(tensor.requires_grad for tensor in tensors)


def test_dropout_is_recorded() -> None:
    model = models.build("bert")
    assert record(model, **models.text_inputs())[0].dropout == 0
    training = record(model.train(), **models.text_inputs())[0]
    assert training.dropout == pytest.approx(0.1)
    assert not training.exact_context
    assert record(model.eval(), **models.text_inputs())[0].exact_context
    assert not record(model.bfloat16(), **models.text_inputs())[0].exact_context
