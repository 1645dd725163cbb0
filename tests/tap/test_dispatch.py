"""The ways in which models call attention functions, and contexts reach their projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnlens import HeadStatistics, Lens
from attnlens.attention import Recording
from tests.support.hooks import is_clean
from tests.support.tiny import HEADS, HIDDEN, WIDTH, TinyAttention, hidden_states


class Keywords(TinyAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = {"query": query, "key": key, "value": value}
        return self.function()(self, **tensors, attention_mask=None, scaling=0.3)[0]


class Positional(TinyAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.function()(self, query, key, value, None, 0.0, 0.3, False)[0]


class Indexing(TinyAttention):
    """As remote code does."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, query, key, value, None, scaling=0.3)[0]


class Eager(TinyAttention):
    """By the module's own default."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface("eager", self.own)
        return function(self, query, key, value, None, scaling=0.3)[0]

    @staticmethod
    def own(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float
    ) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT * scaling).softmax(-1)
        return (weights @ v).transpose(1, 2), weights


class SequenceMajor(TinyAttention):
    """Tokens first, examples second, when it comes to the projection."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).transpose(0, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(query, key, value).transpose(0, 1)


class Packed(TinyAttention):
    """One call for each of two sequences in a row, as packed vision towers do."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(t.split([5, 8], dim=2) for t in (query, key, value)), strict=True)
        return torch.cat([super(Packed, self).attend(*part) for part in parts], 1)


STYLES = [TinyAttention, Keywords, Positional, Indexing, Eager, SequenceMajor, Packed]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_seen(style: type[TinyAttention]) -> None:
    batch = 1 if style is Packed else 2
    model, hidden = style(), hidden_states(batch)
    recording, statistics = Recording(), HeadStatistics()
    with torch.no_grad():
        before = model(hidden)
        with Lens(model, recording, statistics):
            for _ in range(2):
                assert torch.equal(model(hidden), before)
    assert is_clean(model)
    calls = [0, 1] if style is Packed else [0]
    assert [capture.call for capture in recording.captures] == calls * 2
    for capture in recording.captures:
        assert capture.layer == 0 and capture.scaling == 0.3
        torch.testing.assert_close(capture.attention() @ capture.value, capture.context)
        assert torch.equal(capture.projection, model.output.weight.T.reshape(HEADS, WIDTH, HIDDEN))
    assert statistics.compute().examples.eq(2 * batch * len(calls)).all()


def test_other_models_are_not_listened_to() -> None:
    watched, other = TinyAttention(), TinyAttention()
    recording = Recording()
    with Lens(watched, recording), torch.no_grad():
        other(hidden_states())
        watched(hidden_states())
        other(hidden_states())
    assert len(recording.captures) == 1


def test_a_function_fetched_inside_a_lens_outlives_it() -> None:
    """A wrapped function that someone kept still works, and tells nobody."""
    model, recording = TinyAttention(), Recording()
    with Lens(model, recording), torch.no_grad():
        kept = model.function()
        expected = model(hidden_states())
    model.function = lambda: kept  # type: ignore[method-assign]
    with torch.no_grad():
        assert torch.equal(model(hidden_states()), expected)
    assert len(recording.captures) == 1
    with Lens(model, recording), torch.no_grad():
        model(hidden_states())
    assert len(recording.captures) == 2


class OwnSoftmax(nn.Module):
    """Attention outside the interface."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        inner = TinyAttention()
        self.inputs, self.output = inner.inputs, inner.output

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for linear in self.inputs
        )
        context = (query @ key.mT * 0.3).softmax(-1) @ value
        return self.output(context.transpose(1, 2).flatten(2))


def test_a_stack_may_use_the_interface_in_some_layers_only() -> None:
    model = nn.Sequential(TinyAttention(), OwnSoftmax(), TinyAttention())
    recording = Recording()
    with Lens(model, recording), torch.no_grad():
        model(hidden_states())
    assert [capture.site for capture in recording.captures] == ["0", "1", "2"]
    assert len({(capture.stack, capture.layer) for capture in recording.captures}) == 3
    for capture in recording.captures:
        torch.testing.assert_close(capture.attention() @ capture.value, capture.context)
        assert capture.projection is not None
