import random
import socket

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from tests.support import zoo
from tests.support.models import outputs
from tests.support.zoo.catalogue import Catalogue
from tests.support.zoo.example import select


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("The zoo must not reach the network.")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def global_state() -> tuple[object, ...]:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


# These mark padded words and pixels by infinite scores and coordinates.
INFINITE_PADDING = {"grounding-dino", "mm-grounding-dino"}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_builds_runs_and_is_finite(name: str) -> None:
    before = global_state()
    example = zoo.build(name)
    assert global_state() == before
    assert example.name == name
    assert not example.model.training
    with torch.no_grad():
        tensors = list(outputs(example.model(**example.inputs)).values())
    assert tensors
    for output in tensors:
        if name in INFINITE_PADDING:
            output = output[~output.isinf()]
        assert torch.isfinite(output).all()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="fewer architectures exist"
)
def test_covers_transformers() -> None:
    assert len(zoo.NAMES) >= 340


def test_leaves_out_what_transformers_lacks() -> None:
    text = Catalogue("text")
    text.add("bert", "not_yet_invented")
    assert list(select([text], known={"bert", "vit"})) == ["bert"]


def test_refuses_an_unknown_modality() -> None:
    with pytest.raises(ValueError, match="smell"):
        zoo.names("smell")


def test_refuses_a_model_type_registered_twice() -> None:
    first, second = Catalogue("text"), Catalogue("vision")
    first.add("bert")
    with pytest.raises(ValueError, match="bert"):
        first.add("bert")
    second.add("bert")
    with pytest.raises(ValueError, match="bert"):
        select([first, second], known={"bert"})


@pytest.mark.parametrize("name", ["bert", "swin", "wav2vec2", "t5", "clip", "detr", "llama"])
def test_is_deterministic(name: str) -> None:
    torch.manual_seed(1)
    first = zoo.build(name)
    torch.manual_seed(2)
    second = zoo.build(name)
    for one, other in zip(
        first.model.state_dict().values(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    assert first.inputs.keys() == second.inputs.keys()
    for argument, value in first.inputs.items():
        assert torch.equal(value, second.inputs[argument])


def test_no_bias_is_zero_and_no_norm_weight_is_one() -> None:
    parameters = dict(zoo.build("bert").model.named_parameters())
    biases = [value for key, value in parameters.items() if key.endswith("bias")]
    norms = [value for key, value in parameters.items() if key.endswith("LayerNorm.weight")]
    assert biases and norms
    assert all((bias != 0).all() for bias in biases)
    assert all((norm != 1).all() for norm in norms)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "clip", "t5"])
def test_attention_implementation_reaches_every_part(name: str, implementation: str) -> None:
    model = zoo.build(name, attn_implementation=implementation).model
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} == {implementation}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "vit", "wav2vec2", "clip"])
def test_dtype_applies_to_parameters_and_inputs(name: str, dtype: torch.dtype) -> None:
    usual, example = zoo.build(name), zoo.build(name, dtype=dtype)
    for one, other in zip(usual.model.parameters(), example.model.parameters(), strict=True):
        assert torch.equal(one.to(dtype), other)
    for argument, value in example.inputs.items():
        assert value.dtype == (
            dtype if usual.inputs[argument].is_floating_point() else usual.inputs[argument].dtype
        )
    with torch.no_grad():
        output, *_ = outputs(example.model(**example.inputs)).values()
    assert output.dtype == dtype


def token_states(example: zoo.Example, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the final states of encoder and decoder, or the pooled state if there is no other."""
    torch.manual_seed(0)
    with torch.no_grad():
        output = example.model(**inputs)
    fields = {"last_hidden_state", "encoder_last_hidden_state"} & output.keys()
    return {field: output[field] for field in fields or {"pooler_output"}}


@pytest.mark.parametrize("name", zoo.names("text", "encoder_decoder"))
def test_padded_batch_equals_one_by_one(name: str) -> None:
    example = zoo.build(name)
    singles = example.singles()
    if singles is None or "input_ids" not in example.inputs:
        assert example.padding_leaks or not {"input_ids", "attention_mask"} <= example.inputs.keys()
        return
    batch = token_states(example, example.inputs)
    for row, inputs in enumerate(singles):
        length = inputs["input_ids"].shape[1]
        for field, single in token_states(example, inputs).items():
            torch.testing.assert_close(
                batch[field][row, :length], single[0, :length], atol=2e-5, rtol=1e-4
            )


def test_singles_are_cut_to_their_length() -> None:
    first, second = zoo.build("longformer").singles() or []
    assert {value.shape for value in first.values()} == {(1, 12)}
    assert {value.shape for value in second.values()} == {(1, 9)}


def test_singles_keep_whole_what_is_not_per_token() -> None:
    _, second = zoo.build("t5").singles() or []
    assert second["input_ids"].shape == (1, 7)
    assert second["decoder_input_ids"].shape == (1, 6)
