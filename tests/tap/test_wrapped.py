"""Models inside other things: adapters, compilers, copies, quantisation, wrappers."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnlens import HeadStatistics, Lens, record
from attnlens.attention import Recording
from attnlens.demo import model_folder
from attnlens.errors import InputError
from attnlens.tap.hooks import no_hook
from tests.support import models
from tests.support.hooks import is_clean


def inputs() -> dict[str, torch.Tensor]:
    return models.inputs("bert")


def bert() -> PreTrainedModel:
    return models.build("bert")


@pytest.mark.parametrize("merged", [False, True])
def test_lora_on_the_output_projection(merged: bool) -> None:
    config = LoraConfig(r=3, target_modules=["query", "dense"], init_lora_weights=False)
    model = get_peft_model(bert(), config).eval()
    if merged:
        model.merge_adapter()
    captures = record(model, **inputs())
    assert len(captures) == 2
    for capture in captures:
        assert capture.output_projection is not None, capture.projection_reason
        module = model.get_submodule(capture.output_projection.name)
        context = capture.context.transpose(1, 2).flatten(2)
        expected = torch.einsum("bhqd,hdm->bqm", capture.context, capture.projection)
        with torch.no_grad():
            torch.testing.assert_close(module(context), expected + capture.output_projection.bias)


def test_lora_that_is_switched_off_is_the_base_weight() -> None:
    config = LoraConfig(r=3, target_modules=["dense"], init_lora_weights=False)
    model = get_peft_model(bert(), config).eval()
    with model.disable_adapter():
        capture = record(model, **inputs())[0]
    assert capture.output_projection is not None
    base = model.get_submodule(capture.output_projection.name).base_layer.weight
    torch.testing.assert_close(capture.projection.flatten(0, 1).T, base.detach())


@pytest.mark.parametrize("how", ["function", "method", "before", "around"])
def test_compiled(how: str) -> None:
    model, given = bert(), inputs()
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        if how == "method":
            model.compile(backend="eager")
            run = target = model
        elif how == "around":
            run, target = torch.compile(lambda **kw: model(**kw), backend="eager"), model
        else:
            run = target = torch.compile(model, backend="eager")
        if how != "function":
            run(**given)  # compiled before the lens
        statistics = HeadStatistics()
        with Lens(target, statistics):
            seen = run(**given).last_hidden_state
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-6)
    assert statistics.compute().examples.eq(2).all()
    assert len(statistics.compute().layers) == 2
    assert is_clean(model)


def test_data_parallel_on_one_device_works_and_on_several_is_refused() -> None:
    parallel = nn.DataParallel(bert())
    assert len(record(parallel, **inputs())) == 2
    parallel.device_ids = [0, 1]
    with pytest.raises(InputError, match="DataParallel"), Lens(parallel):
        pass
    assert is_clean(parallel.module)


def test_copies_are_not_looked_at() -> None:
    model, given = bert(), inputs()
    statistics = HeadStatistics()
    with Lens(model, statistics), torch.no_grad():
        model(**given)
        copied = copy.deepcopy(model)
        copied(**given)
        unpickled = pickle.loads(pickle.dumps(model))
        unpickled(**given)
    assert statistics.compute().examples.eq(2).all()
    assert is_clean(model)
    for other in (copied, unpickled):  # hooks were copied, and do nothing
        hooks = [h for m in other.modules() for h in m._forward_pre_hooks.values()]
        assert hooks
        assert all(hook is no_hook for hook in hooks)
        assert len(record(other, **given)) == 2


def test_quantised_linears_are_captured_and_their_projection_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(bert(), {nn.Linear}, dtype=torch.qint8)
    for capture in record(model, **inputs()):
        torch.testing.assert_close(
            capture.attention() @ capture.value, capture.context, rtol=0, atol=1e-5
        )
        assert capture.projection is None
        assert "no floating-point weight" in capture.projection_reason


def test_code_that_indexes_the_interface() -> None:
    model, given = bert(), inputs()

    def forward(self, hidden, mask=None, **kwargs):  # type: ignore[no-untyped-def]
        shape = (*hidden.shape[:-1], -1, self.attention_head_size)
        query, key, value = (
            linear(hidden).view(shape).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        context, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](self, query, key, value, mask)
        return context.flatten(2), None

    cls = type(model.encoder.layer[0].attention.self)
    remote = type("RemoteAttention", (cls,), {"forward": forward})
    for layer in model.encoder.layer:
        layer.attention.self.__class__ = remote
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        recording = Recording()
        with Lens(model, recording):
            assert torch.equal(model(**given).last_hidden_state, expected)
    assert [capture.implementation for capture in recording.compute()] == ["sdpa", "sdpa"]


def test_sentence_transformers() -> None:
    model = SentenceTransformer(str(model_folder()))
    expected = model.encode(["hello there", "this is a longer sentence"])
    with Lens(model) as lens:
        found = model.encode(["hello there", "this is a longer sentence"])
    assert (found == expected).all()
    assert len(lens.observers[0].compute().layers) == 6
