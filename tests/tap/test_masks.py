"""Every mask convention of transformers, checked by `attention() @ value == context`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import Capture, Lens
from attnlens.attention import Recording
from attnlens.tap.masks import normalise_mask
from tests.support import models
from tests.support.tiny import HEADS, TinyAttention, hidden_states

INPUTS = models.text_inputs()
IDS, PADDING = INPUTS["input_ids"], INPUTS["attention_mask"].bool()[:, None, None]
TOKENS = IDS.shape[1]
LARGE = torch.finfo(torch.float32).min


def captured(model: PreTrainedModel, kinds: Any = None, **inputs: Tensor) -> list[Capture]:
    """Captures of one forward whose attention reproduces the model's own context."""
    recording = Recording()
    with Lens(model, recording, kinds=kinds), torch.no_grad():
        model(**inputs)
    assert recording.captures
    for capture in recording.captures:
        rebuilt = capture.attention() @ capture.value
        torch.testing.assert_close(rebuilt, capture.context, rtol=1e-5, atol=2e-6)
    return recording.captures


def dense(capture: Capture) -> Tensor:
    """The mask of a capture, `[B, Q, K]`."""
    batch, _, queries, keys, _ = capture.shape
    if capture.mask is None:
        return torch.ones(batch, queries, keys, dtype=torch.bool)
    return capture.mask.expand(batch, -1, queries, keys)[:, 0]


def padded_everywhere() -> Tensor:
    """A padding mask under which one example has no token."""
    mask = INPUTS["attention_mask"].clone()
    mask[1] = 0
    return mask


def arbitrary() -> Tensor:
    """A 4-D mask that differs by row, with an empty one."""
    mask = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[..., 0] = True
    mask[0, 0, 5] = False
    return mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding(implementation: str) -> None:
    for capture in captured(models.build("bert", implementation), **INPUTS):
        assert torch.equal(dense(capture), PADDING[:, 0].expand(-1, TOKENS, -1))
        assert capture.bias is None and capture.support.shared
        assert capture.attention()[1, :, :, 6:].eq(0).all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_mask(implementation: str) -> None:
    for capture in captured(models.build("bert", implementation), input_ids=IDS):
        assert capture.mask is None and capture.bias is None
        assert not capture.masking.causal


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_causal_decoder(implementation: str) -> None:
    """Under sdpa no mask tensor exists at all."""
    inputs = models.inputs("bart")
    for capture in captured(models.build("bart", implementation), "decoder", **inputs):
        size = capture.shape[2]
        assert torch.equal(dense(capture)[0], torch.ones(size, size).tril().bool())
        assert capture.masking.causal == (implementation == "sdpa")
        assert (capture.masking.mask is None) == (implementation == "sdpa")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_sliding_window(implementation: str) -> None:
    first, second = captured(models.build("modernbert", implementation), **INPUTS)
    position = torch.arange(TOKENS)
    near = (position[:, None] - position).abs() <= 4
    assert torch.equal(dense(first), PADDING[:, 0] & near)
    assert torch.equal(dense(second), PADDING[:, 0].expand(-1, TOKENS, -1))


@pytest.mark.parametrize("name", ["bert", "modernbert", "t5", "eurobert"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_example_of_padding_alone(implementation: str, name: str) -> None:
    """A row with nothing to attend to is zero under sdpa and uniform under eager attention."""
    model = models.build(name, implementation)
    inputs = {"input_ids": IDS, "attention_mask": padded_everywhere()}
    for capture in captured(model, **inputs):
        sums = capture.attention()[1].sum(-1)
        uniform = implementation == "eager" or name == "t5"  # T5's bias makes the mask additive
        torch.testing.assert_close(sums, torch.full_like(sums, float(uniform)))


def test_four_dimensional_boolean_mask_under_sdpa() -> None:
    mask = arbitrary()
    for capture in captured(models.build("bert"), input_ids=IDS, attention_mask=mask):
        assert torch.equal(dense(capture), mask[:, 0])
        assert not capture.support.shared
        assert capture.attention()[0, :, 5].eq(0).all()


def test_eager_attention_adds_a_boolean_mask_and_masks_nothing() -> None:
    mask = arbitrary()
    for capture in captured(models.build("bert", "eager"), input_ids=IDS, attention_mask=mask):
        assert capture.mask is None
        assert torch.equal(capture.bias, mask.float())
        assert capture.attention().gt(0).all()


@pytest.mark.parametrize("fill", [LARGE, -1e4, -torch.inf])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_four_dimensional_additive_mask(implementation: str, fill: float) -> None:
    mask = arbitrary()
    mask[0, 0, 5, 0] = True
    bias = torch.randn(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": IDS, "attention_mask": bias.masked_fill(~mask, fill)}
    for capture in captured(models.build("bert", implementation), **inputs):
        assert torch.equal(dense(capture), mask[:, 0])
        assert torch.equal(capture.bias[mask], bias[mask])
        assert capture.bias.isfinite().all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_position_bias(implementation: str) -> None:
    first, second = captured(models.build("t5", implementation), **INPUTS)
    assert first.bias.shape[1] == models.HEADS
    assert not torch.equal(first.bias[:, 0], first.bias[:, 1])
    for capture in (first, second):
        assert capture.scaling == 1.0
        assert torch.equal(dense(capture), PADDING[:, 0].expand(-1, TOKENS, -1))
        assert capture.support.shared


def test_position_bias_that_holds_the_mask() -> None:
    """A finite mask within the bias leaves rows with nothing to attend to uniform."""
    mask = arbitrary()[:, :, :, :TOKENS]
    mask[0, 0, 5] = False
    bias = torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(6))
    both = bias.masked_fill(~mask, LARGE)

    class Biased(TinyAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.function()(self, query, key, value, None, position_bias=both)[0]

    recording = Recording()
    with Lens(Biased(), recording) as lens, torch.no_grad():
        lens.model(hidden_states(tokens=TOKENS))
    (capture,) = recording.captures
    assert torch.equal(dense(capture), mask[:, 0])
    torch.testing.assert_close(capture.attention() @ capture.value, capture.context)
    torch.testing.assert_close(
        capture.attention()[0, :, 5], torch.full((HEADS, TOKENS), 1 / TOKENS)
    )


@pytest.fixture(scope="module")
def flex() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # flex attention compiles itself otherwise
        yield


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["bert", "modernbert", "eurobert", "bart"])
def test_flex_attention(name: str, flex: None) -> None:
    kinds = ("encoder", "decoder") if name == "bart" else None
    model, twin = (models.build(name, which) for which in ("flex_attention", "sdpa"))
    captures = captured(model, kinds, **models.inputs(name))
    others = captured(twin, kinds, **models.inputs(name))
    for capture, other in zip(captures, others, strict=True):
        assert capture.implementation == "flex_attention"
        assert torch.equal(dense(capture), dense(other))


def test_softcap() -> None:
    config = hf.Gemma2Config(
        **models.TEXT, num_key_value_heads=2, head_dim=8, sliding_window=5, pad_token_id=1
    )
    config.attn_logit_softcapping = 0.5
    model = models.initialise(hf.Gemma2Model, config, "eager")
    for capture in captured(model, **INPUTS):
        assert capture.softcap == 0.5
        logits = capture.query @ capture.key.mT * capture.scaling
        assert logits.abs().max() > 0.5


def test_sinks() -> None:
    config = hf.GptOssConfig(
        **models.TEXT,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
        pad_token_id=1,
        eos_token_id=2,
    )
    model = models.initialise(hf.GptOssModel, config, "eager")
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    for capture in captured(model, **INPUTS):
        assert capture.sinks.shape == (models.HEADS,)
        sums = capture.attention()[:1].sum(-1)
        assert sums.gt(0).all() and sums.lt(1).all()


def flash_mask(**settings: Any) -> Tensor:
    query = torch.zeros(2, 4, 9, 8)
    raw = settings.pop("raw", None)
    masking = normalise_mask(raw, "flash_attention_2", query, query, settings)
    mask = torch.ones(2, 9, 9, dtype=torch.bool)
    if masking.mask is not None:
        mask = mask & masking.mask.expand(2, -1, 9, 9)[:, 0]
    return mask & mask.new_ones(9, 9).tril() if masking.causal else mask


def test_flash_arguments() -> None:
    """As flash kernels read them: no such kernel runs on a CPU."""
    position, padding = torch.arange(9), torch.arange(9) < torch.tensor([[9], [4]])
    everywhere = torch.ones(2, 9, 9, dtype=torch.bool)
    near = (position[:, None] - position).abs() < 3
    segment = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    bounds = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    assert torch.equal(flash_mask(is_causal=False), everywhere)
    assert torch.equal(flash_mask(is_causal=True), everywhere.tril())
    assert torch.equal(flash_mask(raw=padding), everywhere & padding[:, None])
    assert torch.equal(flash_mask(sliding_window=3), everywhere & near)
    both = flash_mask(sliding_window=3, is_causal=True, raw=padding)
    assert torch.equal(both, (everywhere & near & padding[:, None]).tril())
    packed = flash_mask(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    assert torch.equal(packed, everywhere & (segment[:, None] == segment))
