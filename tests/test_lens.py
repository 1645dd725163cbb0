"""What a `Lens` looks at: layers, kinds, forwards; and that no gap is silent."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnlens import Capture, HeadStatistics, Lens, record
from attnlens.attention import Recording
from attnlens.errors import AttnLensWarning, InputError, UnsupportedAttentionError
from tests.support import models
from tests.support.hooks import Siamese, Watcher, hooks, is_clean

INPUTS = models.text_inputs()


def seen(
    model: nn.Module, *args: Any, lens: dict[str, Any] | None = None, **inputs: Any
) -> list[Any]:
    """Captures of one forward."""
    recording = Recording()
    with Lens(model, recording, **(lens or {})), torch.no_grad():
        model(*args, **inputs)
    return recording.captures


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [0, 1]),
        (1, [1]),
        ([0], [0]),
        ([-1], [1]),
        ([-2, 1], [0, 1]),
        ({1, 0, -1}, [0, 1]),
        ("encoder.layer.1.attention.self", [1]),
        (["encoder.layer.0.attention.self", 1], [0, 1]),
    ],
)
def test_layers(layers: Any, expected: list[int]) -> None:
    captures = seen(models.build("bert"), lens={"layers": layers}, **INPUTS)
    assert [capture.layer for capture in captures] == expected
    assert [capture.site for capture in captures] == [
        f"encoder.layer.{layer}.attention.self" for layer in expected
    ]


@pytest.mark.parametrize("layers", [[2], [-3], [0, 5], ["encoder.layer.0"], ["nowhere"], [1.5], []])
def test_bad_layers(layers: Any) -> None:
    model = models.build("bert")
    with pytest.raises(InputError, match="layers"):
        Lens(model, layers=layers)
    assert is_clean(model)


@pytest.mark.parametrize(
    "arguments",
    [{"every": 0}, {"every": True}, {"every": 1.5}, {"kinds": "cross"}, {"kinds": ["middle"]}],
)
def test_bad_settings(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Lens(models.build("bert"), **arguments)


def test_bad_model_and_observers() -> None:
    with pytest.raises(InputError, match="torch module"):
        Lens("bert")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Observers are instances"):
        Lens(models.build("bert"), HeadStatistics)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kinds", "count"), [(None, 2), ("decoder", 2), (["cross", "encoder"], 4)])
def test_kinds(kinds: Any, count: int) -> None:
    captures = seen(models.build("bart"), lens={"kinds": kinds}, **models.inputs("bart"))
    wanted = {"encoder"} if kinds is None else {kinds} if isinstance(kinds, str) else set(kinds)
    assert {capture.kind for capture in captures} == wanted
    assert len(captures) == count
    for capture in captures:
        assert {"encoder": (19, 19), "decoder": (7, 7), "cross": (7, 19)}[capture.kind] == (
            capture.shape[2:4]
        )


@pytest.mark.parametrize(("every", "looked"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (9, [0])])
def test_every(every: int, looked: list[int]) -> None:
    model, batches = models.build("bert"), [models.text_inputs((6 + i, 3)) for i in range(5)]
    recording = Recording()
    with Lens(model, recording, every=every), torch.no_grad():
        for batch in batches:
            model(**batch)
    assert [capture.shape[2] for capture in recording.captures[::2]] == [6 + i for i in looked]
    assert len(recording.captures) == 2 * len(looked)


def test_shared_modules_are_counted_by_call() -> None:
    """ALBERT runs one module for every layer."""
    config = models.FAMILIES["albert"].config()
    config.num_hidden_layers = 5
    model = models.initialise(hf.AlbertModel, config)
    captures = seen(model, **INPUTS)
    assert [capture.layer for capture in captures] == [0, 1, 2, 3, 4]
    assert len({capture.site for capture in captures}) == 1
    for layers in ([3], [-2], [captures[0].site]):
        chosen = [capture.layer for capture in seen(model, lens={"layers": layers}, **INPUTS)]
        assert chosen == ([0, 1, 2, 3, 4] if isinstance(layers[0], str) else [3])
    wrapped = Siamese(model)
    captures = seen(wrapped, INPUTS, INPUTS, lens={"layers": [3]})
    assert [(capture.layer, capture.call) for capture in captures] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert"])
def test_an_encoder_called_twice_counts_twice(name: str) -> None:
    encoder = models.build(name)
    wrapper = Siamese(encoder)
    together, apart = HeadStatistics(), HeadStatistics()
    with Lens(wrapper, together), torch.no_grad():
        wrapper(INPUTS, INPUTS)
        wrapper(INPUTS, INPUTS)
    with Lens(encoder, apart), torch.no_grad():
        for _ in range(4):
            encoder(**INPUTS)
    found, expected = together.compute(), apart.compute()
    assert [layer for _, layer in found.layers] == [0, 1]
    assert found.examples.eq(8).all()
    assert torch.equal(found.effective_norm, expected.effective_norm)


def test_lens_on_the_encoder_inside_a_task_model() -> None:
    task = models.initialise(hf.BertForSequenceClassification, hf.BertConfig(**models.TEXT))
    outside, inside = (seen(module, **INPUTS) for module in (task, task.bert))
    recording = Recording()
    with Lens(task.bert, recording), torch.no_grad():
        task(**INPUTS)
    for captures in (inside, recording.captures):
        assert [capture.layer for capture in captures] == [0, 1]
        for first, second in zip(outside, captures, strict=True):
            assert torch.equal(first.context, second.context)
            assert first.site == f"bert.{second.site}"
            assert torch.equal(first.projection, second.projection)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "modernbert", "bart"])
def test_gradient_checkpointing_counts_each_forward_once(name: str, reentrant: bool) -> None:
    model, inputs = models.build(name).train(), models.inputs(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    own_hooks = hooks(model)
    statistics, recording = HeadStatistics(), Recording()
    torch.manual_seed(0)
    with Lens(model, statistics, recording):
        for _ in range(3):
            model(**inputs)[0].square().sum().backward()
    assert statistics.compute().examples.eq(6).all()
    assert [capture.layer for capture in recording.captures] == [0, 1] * 3
    assert hooks(model) == own_hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_whole_encoder_counts_it_once(reentrant: bool) -> None:
    """Its forward runs again, from its root, inside the backward pass."""
    model = models.build("bert").train()
    embeddings = model.embeddings(INPUTS["input_ids"]).detach().requires_grad_()

    def encode(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=inputs)[0]

    statistics = HeadStatistics()
    with Lens(model, statistics, every=2):
        for _ in range(4):
            output = checkpoint(encode, embeddings, use_reentrant=reentrant)
            output.square().sum().backward()
    assert statistics.compute().examples.eq(4).all()


def test_no_forward_is_a_warning() -> None:
    with (
        pytest.warns(AttnLensWarning, match="No forward pass of BertModel"),
        Lens(models.build("bert")),
    ):
        pass


def test_a_model_without_attention_is_refused() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 20}
    model = hf.FNetModel(hf.FNetConfig(**sizes))
    with pytest.raises(UnsupportedAttentionError, match=r"encoder.layer.0.fourier \(FNetFourier"):
        with Lens(model):
            model(torch.tensor([[1, 2, 3]]))
    assert is_clean(model)
    linear = nn.Linear(3, 3)
    with pytest.raises(UnsupportedAttentionError, match="Linear"), Lens(linear):
        linear(torch.zeros(1, 3))


class OneOfTwo(nn.Module):
    """Two encoders, of which one runs, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = models.build("bert"), models.build("bert")

    def forward(self, run: bool) -> Any:
        return self.used(**INPUTS) if run else None


def test_a_site_that_never_fires_is_named() -> None:
    model = OneOfTwo()
    with pytest.warns(AttnLensWarning, match=r"idle\.encoder\.layer\.0"), Lens(model):
        model(run=True)
    with pytest.raises(UnsupportedAttentionError, match=r"used\.encoder\.layer\.0"), Lens(model):
        model(run=False)
    assert is_clean(model)


def test_a_lens_without_gaps_does_not_warn() -> None:
    model = models.build("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Lens(model, layers=[1]):
            model(**INPUTS)


def test_record_and_summary() -> None:
    model = models.build("bert")
    captures = record(model, **INPUTS)
    assert [capture.layer for capture in captures] == [0, 1]
    assert all(isinstance(capture, Capture) for capture in captures)
    with Lens(model) as lens:
        model(**INPUTS)
    text = lens.summary()
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [
        ["head", "0"],
        ["layer", "0"],
        ["layer", "1"],
    ]
    value = lens.observers[0].compute().effective_fraction[1, 2].item()
    assert f"{value:.3f}" == text.splitlines()[3].split()[4]
    with pytest.raises(InputError, match="effective_fraction"):
        lens.summary("nothing")
    with pytest.raises(InputError, match="HeadStatistics"):
        Lens(model, Recording()).summary()


def test_observers_choose_their_layers() -> None:
    some, everything = HeadStatistics(layers=[1]), HeadStatistics()
    model = models.build("bert")
    with Lens(model, some, everything):
        model(**INPUTS)
    assert [layer for _, layer in some.compute().layers] == [1]
    assert [layer for _, layer in everything.compute().layers] == [0, 1]


@pytest.mark.parametrize("name", ["bert", "albert", "vit", "t5", "eurobert", "wav2vec2"])
def test_nothing_moves_to_the_host_in_a_hook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = models.build(name), models.inputs(name)

    def watched(method: str) -> Any:
        original = getattr(torch.Tensor, method)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame is not None:
                assert not frame.f_globals["__name__"].startswith("attnlens"), f"Tensor.{method}"
                frame = frame.f_back
            return original(self, *args, **kwargs)

        return call

    statistics = HeadStatistics()
    with monkeypatch.context() as patch:
        for method in ("item", "cpu", "tolist", "numpy"):
            patch.setattr(torch.Tensor, method, watched(method))
        with Lens(model, statistics), torch.no_grad():
            model(**inputs)
    assert statistics.compute().examples.sum() > 0


def test_observers_see_captures_in_order_of_layers() -> None:
    order: list[tuple[str, int]] = []
    watchers = [Watcher(lambda c, n=name: order.append((n, c.layer))) for name in "ab"]
    model = models.build("bert")
    with Lens(model, *watchers):
        model(**INPUTS)
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
