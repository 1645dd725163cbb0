"""Attention that is not where or what it seems: registered, fused, skipped, without derivative."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DebertaV2Config,
    DebertaV2Model,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attnlens import HeadStatistics, HiddenTokenAttribution, Lens, check, record
from attnlens.attention import Recording
from attnlens.errors import AttnLensWarning, UnsupportedAttentionError
from attnlens.tap import scope
from tests.support import models
from tests.support.hooks import is_clean

Function = Callable[..., tuple[Tensor, Tensor | None]]


def logits(q: Tensor, k: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = q @ k.mT * scaling
    return scores if mask is None else scores.masked_fill(~mask, torch.finfo(q.dtype).min)


def function(weights: Callable[[Tensor], Tensor], gate: float = 1.0, heat: float = 1.0) -> Function:
    """An attention function as users register them; it returns the A that ran."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        attention = weights(logits(q, k, mask, (kw.get("scaling") or q.shape[-1] ** -0.5) * heat))
        return ((attention @ v) * gate).transpose(1, 2).contiguous(), attention

    return attend


def with_sink(scores: Tensor) -> Tensor:
    return torch.cat([scores, 0 * scores[..., :1]], -1).softmax(-1)[..., :-1]


SOFTMAX = {
    "plain": function(lambda scores: scores.softmax(-1)),
    "temperature": function(lambda scores: scores.softmax(-1), heat=0.5),
    "sink": function(with_sink),
    "gated": function(lambda scores: scores.softmax(-1), gate=2.0),
}


@pytest.fixture
def registered() -> Iterator[Callable[[Function], str]]:
    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)

    def register(attend: Function) -> str:
        AttentionInterface.register("someones", attend)
        AttentionMaskInterface.register("someones", sdpa_mask)
        return "someones"

    yield register
    for table in tables:
        table.pop("someones", None)


@pytest.mark.parametrize("kind", SOFTMAX)
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_registered_function_shows_the_a_that_ran(
    name: str, kind: str, registered: Callable[[Function], str]
) -> None:
    model, inputs = models.build(name), models.inputs(name)
    model.set_attn_implementation(registered(SOFTMAX[kind]))
    with torch.no_grad():
        expected = model(**inputs)[0]
        recording = Recording()
        with Lens(model, recording):
            for _ in range(2):
                assert torch.equal(model(**inputs)[0], expected)
    captures = recording.compute()
    assert len(captures) == 2 * models.LAYERS
    for capture in captures:
        attention = capture.attention()
        torch.testing.assert_close(attention @ capture.value, capture.context, rtol=0, atol=1e-5)
        rows = attention.sum(-1)
        assert (rows < 0.999).any() if kind == "sink" else torch.allclose(rows, rows * 0 + 1)
        assert (capture.output_projection is None) == (kind == "gated")
    if kind == "temperature":
        plain = models.build(name)
        with torch.no_grad():
            (usual, *_) = record(plain, **inputs)
        heated = usual.query @ usual.grouped_key.mT * usual.scaling * 0.5
        if usual.mask is not None:
            heated = heated.masked_fill(~usual.mask, -1e30)
        torch.testing.assert_close(captures[0].attention(), heated.softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_function_without_softmax_is_refused(
    name: str, registered: Callable[[Function], str]
) -> None:
    model, inputs = models.build(name), models.inputs(name)
    model.set_attn_implementation(registered(function(torch.sigmoid)))
    site = {"bert": "encoder.layer.0.attention.self", "vit": "attention"}[name]
    with pytest.raises(UnsupportedAttentionError) as error, Lens(model):
        model(**inputs)
    words = str(error.value)
    assert site in words and "runs the attention function 'attend' ('someones')" in words
    assert "does not compute softmax(QKᵀ)V of its arguments, and no product" in words
    verdict = check(model, inputs)
    assert not verdict.supported and "'attend' ('someones')" in verdict.reason
    assert is_clean(model)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_function_of_transformers_under_another_name(
    name: str, registered: Callable[[Function], str]
) -> None:
    model, inputs = models.build(name), models.inputs(name)
    expected = HeadStatistics()
    with Lens(model, expected), torch.no_grad():
        model(**inputs)
    model.set_attn_implementation(registered(sdpa_attention_forward))
    with Lens(model, found := HeadStatistics()), torch.no_grad():
        model(**inputs)
    torch.testing.assert_close(found.compute().effective_norm, expected.compute().effective_norm)


class Encoder(PreTrainedModel):
    """torch's own encoder in a pretrained model."""

    config_class = PreTrainedConfig

    def __init__(self, nested: bool) -> None:
        super().__init__(PreTrainedConfig())
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, hidden: Tensor, pad: Tensor | None = None) -> Tensor:
        return self.inner(hidden, src_key_padding_mask=pad)


def padded(padding: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 32, generator=generator)
    pad = torch.arange(7) >= torch.tensor([7, 4, 6])[:, None]
    return hidden, pad if padding else None


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_torchs_encoder_keeps_its_fused_path(nested: bool, padding: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Encoder(nested).eval(), padded(padding)
    before = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        expected = model(*inputs)
        for observers in [(HeadStatistics(),), (HiddenTokenAttribution(),)]:
            with pytest.raises(UnsupportedAttentionError) as error, Lens(model, *observers):
                for _ in range(2):
                    assert torch.equal(model(*inputs), expected)
            assert "inner.layers.0.self_attn ran torch's fused attention kernel" in str(error.value)
            assert "torch.backends.mha.set_fastpath_enabled(False)" in str(error.value)
        with pytest.warns(AttnLensWarning, match="No forward pass"), Lens(model, on="train"):
            assert torch.equal(model(*inputs), expected)
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            slow = model(*inputs)
            with Lens(model, statistics := HeadStatistics()):
                assert torch.equal(model(*inputs), slow)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
    assert len(statistics.compute().layers) == 2
    assert is_clean(model)


def test_torchs_encoder_is_seen_in_training_and_told_of_in_evaluation() -> None:
    torch.manual_seed(0)
    model, (hidden, pad) = Encoder(False), padded(True)
    statistics = HeadStatistics()
    with pytest.warns(AttnLensWarning) as told, Lens(model, statistics):
        model.train()(hidden, pad)
        with torch.no_grad():
            model.eval()(hidden, pad)
        model.train()(hidden, pad)
    (warning,) = (str(w.message) for w in told if w.category is AttnLensWarning)
    assert "ran torch's fused attention, which hides A" in warning
    assert "did not run" not in warning
    assert statistics.compute().examples.eq(6).all()
    assert is_clean(model)


class Dropping(DebertaV2Model):
    """DeBERTa whose later layers may be left out."""

    depth = 3

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        every = self.encoder.layer
        self.encoder.layer = every[: self.depth]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.encoder.layer = every


class Early(PreTrainedModel):
    """Attention of its own, in layers that may be left out."""

    config_class = PreTrainedConfig
    depth = 3

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        self.layers = nn.ModuleList(OwnAttention() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            hidden = layer(hidden)
        return hidden


class OwnAttention(nn.Module):
    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inputs(hidden).chunk(3, -1)
        )
        context = (query @ key.mT / 2).softmax(-1) @ value
        return hidden + self.output(context.transpose(1, 2).flatten(2))


def dropping() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes = {**models.SIZES, "vocab_size": models.VOCABULARY, "num_hidden_layers": 3}
    return Dropping(DebertaV2Config(**sizes)).eval(), models.text_inputs()


def early() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Early().eval(), {"hidden": torch.randn(2, 5, 8)}


@pytest.mark.parametrize("build", [dropping, early])
def test_layers_that_did_not_run_at_first_are_seen_when_they_do(build: Any) -> None:
    model, inputs = build()
    with torch.no_grad():
        model.depth = 2
        with pytest.warns(AttnLensWarning, match=r"did not run inside the lens: .*2"):
            with Lens(model, first := HeadStatistics()):
                model(**inputs)
                model(**inputs)
        assert [layer for _, layer in first.compute().layers] == [0, 1]
        model.depth = 3
        with warnings.catch_warnings():
            warnings.simplefilter("error", AttnLensWarning)
            for _ in range(2):
                with Lens(model, later := HeadStatistics()):
                    model(**inputs)
                assert [layer for _, layer in later.compute().layers] == [0, 1, 2]
        other, _ = build()  # another model of the class has a memory of its own
        with Lens(other, fresh := HeadStatistics()):
            other(**inputs)
        assert len(fresh.compute().layers) == 3


@pytest.mark.parametrize("build", [dropping, early])
def test_what_is_remembered_of_a_model_goes_with_it(build: Any) -> None:
    gc.collect()
    before = len(scope._remembered)
    model, inputs = build()
    with Lens(model), torch.no_grad():
        model(**inputs)
    assert len(scope._remembered) == before + 1
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and len(scope._remembered) == before


class Without(nn.Module):
    """A module from which no derivative comes."""

    def __init__(self, inner: nn.Module, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, hidden: Tensor) -> Tensor:
        return self.way(self.inner(hidden))


@pytest.mark.parametrize("way", ["int8", "detach"])
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_attribution_refuses_derivatives_that_vanish(name: str, way: str) -> None:
    model, inputs = models.build(name), models.inputs(name)
    if way == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    else:
        ends = ("attention.self.value", "SelfAttention.v")
        for path in [path for path, _ in model.named_modules() if path.endswith(ends)]:
            parent, _, leaf = path.rpartition(".")
            module = model.get_submodule(parent)
            setattr(module, leaf, Without(getattr(module, leaf), Tensor.detach))
    layer = {"bert": r"encoder\.layer\.0", "t5": r"encoder\.block\.0"}[name]
    words = rf"Tokens cannot be followed through {layer}: its derivative is \d+% off"
    for probes in (None, 4):
        with pytest.raises(UnsupportedAttentionError, match=words), torch.no_grad():
            with Lens(model, HiddenTokenAttribution(probes=probes)):
                model(**inputs)
    assert is_clean(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "t5", "modernbert", "vit"])
def test_attribution_accepts_derivatives_that_are_there(name: str, dtype: torch.dtype) -> None:
    model, inputs = models.build(name).to(dtype), models.inputs(name)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    with Lens(model, observer := HiddenTokenAttribution()), torch.no_grad():
        model(**inputs)
    assert len(observer.compute().layers) == models.LAYERS
