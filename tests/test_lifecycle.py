"""All or nothing on entry, always off on exit, nothing kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnlens import AttnLensError, Capture, HeadStatistics, Lens
from attnlens.attention import Recording
from attnlens.errors import InputError, UnsupportedAttentionError
from tests.support import models
from tests.support.hooks import Watcher, hooks, is_clean, patched

INPUTS = models.text_inputs()


@pytest.fixture
def model() -> PreTrainedModel:
    return models.build("bert")


class Stop(Exception):
    """Raised on purpose."""


def fail(error: type[BaseException]) -> Watcher:
    def raise_it(capture: Capture) -> None:
        raise error

    return Watcher(raise_it)


def works(model: nn.Module, lens: Lens) -> bool:
    """Whether a lens still does its work, and leaves nothing."""
    recording = Recording()
    lens.observers = (recording,)
    with lens, torch.no_grad():
        model(**INPUTS)
    return [capture.layer for capture in recording.captures] == [0, 1] and is_clean(model)


def test_attached_inside_and_clean_outside(model: PreTrainedModel) -> None:
    lens = Lens(model)
    assert is_clean(model) and not lens.active
    with lens:
        assert hooks(model) > 0 and patched() and lens.active
        model(**INPUTS)
    assert is_clean(model) and not lens.active
    assert works(model, lens)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["body", "observer", "model"])
def test_clean_after_an_exception(
    model: PreTrainedModel, place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = Lens(model, fail(error)) if place == "observer" else Lens(model)

    def broken(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if place == "model":
            patch.setattr(model.encoder.layer[1].output, "forward", broken)
        with pytest.raises(error), lens:
            if place == "body":
                raise error
            model(**INPUTS)
    assert is_clean(model)
    assert works(model, lens)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("module", ["encoder.layer.1", "encoder.layer.0.attention.output.dense"])
def test_a_forward_that_was_torn_down_does_not_spoil_the_next(
    model: PreTrainedModel, module: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics, alone = HeadStatistics(), HeadStatistics()
    with Lens(model, alone), torch.no_grad():
        model(**INPUTS)

    def broken(*args: object, **kwargs: object) -> None:
        raise error

    with Lens(model, statistics), torch.no_grad():
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(model.get_submodule(module), "forward", broken)
            model(**INPUTS)
        statistics.reset()
        model(**INPUTS)
    expected = alone.compute()
    found = statistics.compute()
    assert found.layers == expected.layers
    assert found.value_space == expected.value_space == ("T", "T")
    assert torch.equal(found.effective_norm, expected.effective_norm)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_forward_that_was_torn_down_counts_once(
    model: PreTrainedModel, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording()

    def broken(*args: object, **kwargs: object) -> None:
        raise error

    with Lens(model, recording, every=2), torch.no_grad():
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(model.encoder.layer[1], "forward", broken)
            model(**INPUTS)
        recording.reset()
        seen = []
        for _ in range(4):
            model(**INPUTS)
            seen.append(len(recording.captures))
    assert seen == [0, 2, 2, 4]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_nothing_is_attached_when_attaching_fails(
    model: PreTrainedModel, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, calls = nn.Module.register_forward_pre_hook, iter(range(after + 1))

    def limited(self: nn.Module, *args: object, **kwargs: object) -> object:
        if next(calls) == after:
            raise Stop
        return register(self, *args, **kwargs)  # type: ignore[arg-type]

    lens = Lens(model)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "register_forward_pre_hook", limited)
        with pytest.raises(Stop):
            lens.__enter__()
    assert is_clean(model) and not lens.active
    assert works(model, lens)


def test_bad_layer_name_attaches_nothing(model: PreTrainedModel) -> None:
    with (
        pytest.raises(InputError, match=r"encoder\.layer\.7"),
        Lens(model, layers=["encoder.layer.7"]),
    ):
        raise AssertionError("must not be reached")
    assert is_clean(model)


def test_entering_twice_is_an_error_that_leaves_the_first_alone(model: PreTrainedModel) -> None:
    with Lens(model) as lens:
        attached = hooks(model)
        with pytest.raises(AttnLensError, match="active already"), lens:
            raise AssertionError("must not be reached")
        assert hooks(model) == attached and lens.active
        model(**INPUTS)
    assert is_clean(model)
    assert lens.observers[0].compute().examples.eq(2).all()


def test_generator_dropped_half_way(model: PreTrainedModel) -> None:
    def embeddings() -> Iterator[Tensor]:
        with Lens(model), torch.no_grad():
            while True:
                yield model(**INPUTS)[0]

    generator = embeddings()
    next(generator)
    assert not is_clean(model)
    del generator
    assert is_clean(model)


def test_lenses_nest_and_close_in_any_order(model: PreTrainedModel) -> None:
    outer, inner = Recording(), Recording()
    first, second = Lens(model, outer), Lens(model, inner, layers=[1])
    with first, torch.no_grad():
        with second:
            model(**INPUTS)
        model(**INPUTS)
    assert [capture.layer for capture in outer.captures] == [0, 1, 0, 1]
    assert [capture.layer for capture in inner.captures] == [1]
    with torch.no_grad():
        first.__enter__()
        second.__enter__()
        model(**INPUTS)
        first.__exit__(None, None, None)
        model(**INPUTS)
        second.__exit__(None, None, None)
    assert len(outer.captures) == 6 and len(inner.captures) == 3
    assert is_clean(model)


def test_two_threads_with_two_models_do_not_see_each_other() -> None:
    names = ("bert", "albert")
    encoders = {name: models.build(name) for name in names}
    alone, threaded = {}, {name: HeadStatistics() for name in names}
    for name, encoder in encoders.items():
        alone[name] = HeadStatistics()
        with Lens(encoder, alone[name]), torch.no_grad():
            encoder(**INPUTS)
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            with Lens(encoders[name], threaded[name]), torch.no_grad():
                for _ in range(5):
                    barrier.wait(timeout=1200)
                    encoders[name](**INPUTS)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for name in names:
        found, expected = threaded[name].compute(), alone[name].compute()
        assert found.examples.eq(10).all()
        torch.testing.assert_close(
            found.effective_norm, expected.effective_norm, rtol=1e-12, atol=0
        )
        assert is_clean(encoders[name])


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free memory: a cycle would keep what it holds."""
    gc.freeze()  # what is there already is not looked at
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "t5", "eurobert"])
def test_captures_die_when_their_observers_return(
    name: str, train: bool, no_collector: None
) -> None:
    model, inputs = models.build(name).train(train), models.inputs(name)
    seen: list[weakref.ref[Capture]] = []

    def look(capture: Capture) -> None:
        assert all(earlier() is None for earlier in seen)
        assert not any(t.requires_grad for t in (capture.query, capture.value, capture.context))
        seen.append(weakref.ref(capture))

    with Lens(model, Watcher(look), HeadStatistics()):
        for _ in range(3):
            model(**inputs)
            assert all(earlier() is None for earlier in seen)
    assert len(seen) == 6


def live_tensors() -> int:
    return sum(type(thing) is Tensor for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_memory_does_not_grow_with_batches(name: str, no_collector: None) -> None:
    model, inputs = models.build(name), models.inputs(name)
    counts = []
    with Lens(model), torch.no_grad():
        for _ in range(4):
            model(**inputs)
            counts.append(live_tensors())
    assert counts[1:] == [counts[1]] * 3


def test_a_discovery_that_is_cut_short_is_not_remembered() -> None:
    """A model that fails half-way at first shows all its traced attention the next time."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=20,
        vocab_size=40,
    )
    model, ids = DebertaV2Model(config).eval(), torch.tensor([[1, 2, 3, 4]])

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("half-way")

    broken = model.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"), Lens(model):
        model(ids)
    broken.remove()
    statistics = HeadStatistics()
    with Lens(model, statistics):
        model(ids)
    assert len(statistics.compute().layers) == 3
    assert is_clean(model)


class TorchAttention(PreTrainedModel):
    """torch's own attention module, called in one of several ways."""

    config_class = PreTrainedConfig

    def __init__(self, way: str) -> None:
        super().__init__(PreTrainedConfig())
        self.way = way
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.queries = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        other = self.queries(hidden)
        calls = {
            "same": lambda: self.attention(hidden, hidden, hidden),
            "same by name": lambda: self.attention(query=hidden, key=hidden, value=hidden),
            "other by name": lambda: self.attention(query=other, key=hidden, value=hidden),
            "other value": lambda: self.attention(hidden, key=hidden, value=other),
        }
        return calls[self.way]()[0]


@contextmanager
def fast_path_restored() -> Iterator[None]:
    """Leave torch's switch as it was."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("way", ["same", "same by name", "other by name", "other value"])
def test_torch_attention_is_seen_unless_its_kernel_is_fused(way: str) -> None:
    model, hidden, recording = TorchAttention(way).eval(), torch.randn(2, 5, 8), Recording()
    with torch.no_grad(), fast_path_restored():
        if way.startswith("same"):
            with pytest.raises(UnsupportedAttentionError, match="fused"), Lens(model, recording):
                model(hidden)
            torch.backends.mha.set_fastpath_enabled(False)  # what the error says
        plain = model(hidden)
        with Lens(model, recording):
            assert torch.equal(model(hidden), plain)
    (capture,) = recording.captures
    assert torch.allclose(capture.attention() @ capture.value, capture.context, atol=1e-6)
