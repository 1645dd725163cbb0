"""Nothing changes: outputs, gradients, random state, configuration and masks with a lens on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import EffectiveAttention, HeadStatistics, Lens
from attnlens.attention import Recording
from tests.support import models
from tests.support.hooks import hooks, patched

CASES = pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, which) for name in models.FAMILIES for which in ("sdpa", "eager")],
)
ALL_KINDS = {"bart": ("encoder", "decoder", "cross")}


def lens_on(model: PreTrainedModel, name: str, *observers: Any) -> Lens:
    return Lens(model, *observers, kinds=ALL_KINDS.get(name))


@CASES
def test_outputs_in_evaluation(name: str, implementation: str) -> None:
    model, inputs = models.build(name, implementation), models.inputs(name)
    settings = {"output_hidden_states": True}
    with torch.no_grad():
        before = models.outputs(model(**inputs, **settings))
        own_hooks = hooks(model)  # transformers collects hidden states with hooks that stay
        recording = Recording()
        with lens_on(model, name, HeadStatistics(), EffectiveAttention(), recording):
            during = models.outputs(model(**inputs, **settings))
        after = models.outputs(model(**inputs, **settings))
    assert before.keys() == during.keys() == after.keys()
    for path, tensor in before.items():
        assert torch.equal(during[path], tensor), path
        assert torch.equal(after[path], tensor), path
    assert hooks(model) == own_hooks and not patched()
    for capture in recording.captures:
        assert capture.dropout == 0
        rebuilt = capture.attention() @ capture.value
        torch.testing.assert_close(rebuilt, capture.context, rtol=1e-5, atol=2e-6)


@CASES
def test_training_step(name: str, implementation: str) -> None:
    """The same seed gives the same outputs, gradients and random state."""
    model, inputs = models.build(name, implementation).train(), models.inputs(name)

    def step() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        model.zero_grad()
        torch.manual_seed(11)
        outputs = models.outputs(model(**inputs))
        sum(tensor.square().sum() for tensor in outputs.values()).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return outputs, gradients, torch.get_rng_state()

    outputs, gradients, state = step()
    statistics = HeadStatistics()
    with lens_on(model, name, statistics, EffectiveAttention()):
        watched_outputs, watched_gradients, watched_state = step()
    for before, during in ((outputs, watched_outputs), (gradients, watched_gradients)):
        assert before.keys() == during.keys()
        for path, tensor in before.items():
            assert torch.equal(during[path], tensor), path
    assert torch.equal(watched_state, state)
    torch.manual_seed(12)
    other = models.outputs(model(**inputs))
    assert any(not torch.equal(other[path], outputs[path]) for path in outputs)  # dropout acts
    assert all(not tensor.requires_grad for tensor in statistics.compute().tensors().values())


@CASES
def test_model_and_inputs(name: str, implementation: str) -> None:
    model, inputs = models.build(name, implementation), models.inputs(name)
    settings, given = model.config.to_dict(), copy.deepcopy(inputs)
    weights = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    with lens_on(model, name), torch.no_grad():
        assert model.config._attn_implementation == implementation
        model(**inputs)
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(inputs[key], given[key]) for key in given)
    assert all(torch.equal(tensor, weights[path]) for path, tensor in model.state_dict().items())
    assert not model.training


def test_under_autocast() -> None:
    model, inputs = models.build("bert"), models.inputs("bert")
    statistics = HeadStatistics()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = models.outputs(model(**inputs))
        with Lens(model, statistics):
            during = models.outputs(model(**inputs))
    assert all(torch.equal(during[path], before[path]) for path in before)
    assert statistics.compute().effective_norm.isfinite().all()


def test_under_inference_mode() -> None:
    model, inputs = models.build("modernbert"), models.inputs("modernbert")
    statistics, plain = HeadStatistics(), HeadStatistics()
    with Lens(model, plain), torch.no_grad():
        model(**inputs)
    with Lens(model, statistics), torch.inference_mode():
        model(**inputs)
    assert torch.equal(statistics.compute().effective_norm, plain.compute().effective_norm)
