"""A trained sentence encoder on real text."""

from __future__ import annotations

import pytest
import torch

from attnlens import Capture, HeadStatistics, Lens
from attnlens.attention import Recording
from attnlens.attention.statistics import HeadStatisticsResult
from tests.conftest import Encoder
from tests.support import reference

WIDTH = 32


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def looked_at(
    minilm: Encoder, real_text: list[str], request: pytest.FixtureRequest
) -> tuple[HeadStatisticsResult, list[Capture]]:
    before = minilm.model.config._attn_implementation
    minilm.model.set_attn_implementation(request.param)
    statistics, recording = HeadStatistics(), Recording()
    with Lens(minilm.model, statistics, recording), torch.no_grad():
        minilm.model(**minilm.tokenize(real_text))
    minilm.model.set_attn_implementation(before)
    return statistics.compute(), recording.captures


def test_the_texts_are_short_and_long(minilm: Encoder, real_text: list[str]) -> None:
    lengths = minilm.tokenize(real_text)["attention_mask"].sum(1)
    assert len(real_text) == 12
    assert (lengths <= WIDTH).sum() >= 4 and (lengths > WIDTH + 1).sum() >= 4


def test_every_head(looked_at: tuple[HeadStatisticsResult, list[Capture]]) -> None:
    result, captures = looked_at
    assert [layer for _, layer in result.layers] == list(range(6))
    assert result.rank.shape == (6, 12)
    for name, values in result.tensors().items():
        assert values.isfinite().all(), name
    assert result.value_space == ("T",) * 6
    for capture in captures:
        lengths = capture.mask[:, 0, 0].sum(-1)
        basis = capture.value_basis()
        expected = lengths.clamp(max=WIDTH)[:, None].expand_as(basis.rank)
        assert torch.equal(basis.rank, expected)
        assert torch.equal(
            basis.rank, reference.ranks(capture.value, capture.mask[:, :, :1])[..., 0]
        )
        assert torch.equal(basis.nullity, (lengths - WIDTH).clamp(min=0)[:, None].expand(-1, 12))


def test_output_is_preserved(looked_at: tuple[HeadStatisticsResult, list[Capture]]) -> None:
    for capture in looked_at[1]:
        attention, effective = capture.attention(), capture.effective_attention()
        torch.testing.assert_close(attention @ capture.value, capture.context, rtol=1e-4, atol=1e-5)
        seen = capture.value.double() @ capture.projection.double()
        error = reference.relative_errors(effective.double() @ seen, attention.double() @ seen)
        assert error.max() <= 1e-5


def test_equals_the_scipy_loop(looked_at: tuple[HeadStatisticsResult, list[Capture]]) -> None:
    for capture in looked_at[1][::5]:
        attention = capture.attention()
        expected = reference.effective_attention(attention, capture.value, capture.mask)
        errors = reference.relative_errors(capture.effective_attention(), expected)
        assert errors.max() <= 1e-5


def test_short_texts_have_no_freedom_and_long_ones_have(
    looked_at: tuple[HeadStatisticsResult, list[Capture]],
) -> None:
    for capture in looked_at[1]:
        lengths = capture.mask[:, 0, 0].sum(-1)
        attention, effective = capture.attention(), capture.effective_attention()
        real = capture.real_rows[..., None]
        attention, effective = attention * real, effective * real
        short = lengths <= WIDTH
        assert reference.relative_errors(effective[short], attention[short]).max() < 1e-6
        fraction = effective.square().sum((-2, -1)) / attention.square().sum((-2, -1))
        assert fraction[lengths > WIDTH + 1].max() < 1
        assert fraction[lengths.argmax()].mean() < 0.95


def test_statistics_equal_the_dense_computation(
    looked_at: tuple[HeadStatisticsResult, list[Capture]],
) -> None:
    result, captures = looked_at
    capture = captures[3]
    mask = capture.mask.expand(-1, 1, -1, -1)
    attention = reference.attention(capture.query[:, :2], capture.key[:, :2], mask)
    expected = reference.head_statistics(
        attention, capture.value[:, :2], mask, mask[:, 0, 0], capture.projection[:2]
    )
    for name, values in expected.items():
        torch.testing.assert_close(
            result.tensors()[name][3, :2], values, rtol=1e-5, atol=1e-5, msg=name
        )
