"""Pruned models on disk, and plans for tools that know nothing of pruning."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import mask_heads, prune_heads
from attnlens.errors import InputError
from attnlens.pruning import Plan, export_masked, load_pruned, save_pruned
from tests.support import heads, models
from tests.support.hooks import is_clean


def pruned(name: str) -> PreTrainedModel:
    model = heads.build(name)
    prune_heads(model, heads.some_heads(name, model), inputs=heads.inputs(name), repeats=1)
    return model


def step(model: PreTrainedModel, given: dict[str, Tensor]) -> None:
    """One step of training without randomness."""
    output = model(**given)
    loss = next(tensor for tensor in output.values() if isinstance(tensor, Tensor)).square().sum()
    loss.backward()
    torch.optim.AdamW(model.parameters(), 1e-3).step()


@pytest.mark.parametrize("name", heads.ALL)
def test_a_pruned_model_comes_back_bit_for_bit_and_trains_on(name: str, tmp_path: Path) -> None:
    model, given = pruned(name), heads.inputs(name)
    save_pruned(model, tmp_path)
    before = torch.random.get_rng_state()
    loaded = load_pruned(tmp_path, attn_implementation=model.config._attn_implementation)
    assert torch.equal(before, torch.random.get_rng_state())
    assert type(loaded) is type(model) and not loaded.training
    assert heads.difference(heads.outputs(model, given), heads.outputs(loaded, given)) == 0.0
    for each in (model, loaded):
        step(each, given)
    assert heads.difference(heads.outputs(model, given), heads.outputs(loaded, given)) == 0.0


def test_a_loaded_model_can_be_pruned_and_saved_again(tmp_path: Path) -> None:
    model, given = heads.build("t5"), heads.inputs("t5")
    prune_heads(model, {0: [1], 1: [0]})
    save_pruned(model, tmp_path / "once")
    loaded = load_pruned(tmp_path / "once")
    for each in (model, loaded):
        prune_heads(each, {0: [1]})
    save_pruned(loaded, tmp_path / "twice")
    again = load_pruned(tmp_path / "twice")
    expected = heads.outputs(model, given)
    for each in (loaded, again, copy.deepcopy(again)):
        assert heads.difference(expected, heads.outputs(each, given)) == 0.0
    assert again.config.attnlens_pruned == model.config.attnlens_pruned


def test_layers_without_heads_and_half_precision_come_back(tmp_path: Path) -> None:
    model, given = heads.build("bert").bfloat16(), heads.inputs("bert")
    prune_heads(model, {0: range(4), 1: [2]})
    save_pruned(model, tmp_path)
    loaded = load_pruned(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert heads.difference(heads.outputs(model, given), heads.outputs(loaded, given)) == 0.0


def test_tied_weights_come_back_tied(tmp_path: Path) -> None:
    model = models.initialise(hf.BertForMaskedLM, hf.BertConfig(**models.TEXT))
    prune_heads(model, {0: [1]})
    save_pruned(model, tmp_path)
    loaded = load_pruned(tmp_path)
    words = loaded.bert.embeddings.word_embeddings.weight
    assert loaded.cls.predictions.decoder.weight is words
    given = heads.inputs("bert")
    assert heads.difference(heads.outputs(model, given), heads.outputs(loaded, given)) == 0.0


def test_a_model_pruned_inside_a_task_model_is_saved_from_outside(tmp_path: Path) -> None:
    model = models.initialise(hf.BertForSequenceClassification, hf.BertConfig(**models.TEXT))
    given = heads.inputs("bert")
    prune_heads(model.bert, {1: [0]})
    save_pruned(model, tmp_path)
    loaded = load_pruned(tmp_path)
    assert heads.difference(heads.outputs(model, given), heads.outputs(loaded, given)) == 0.0


def test_checkpoints_of_a_trainer_load_too(tmp_path: Path) -> None:
    model, given = pruned("bert"), heads.inputs("bert")
    model.save_pretrained(tmp_path)
    loaded = load_pruned(tmp_path)
    assert heads.difference(heads.outputs(model, given), heads.outputs(loaded, given)) == 0.0


@pytest.mark.parametrize("name", ["bert", "t5", "modernbert", "vit", "eurobert"])
def test_plain_loading_fails_loudly(name: str, tmp_path: Path) -> None:
    save_pruned(pruned(name), tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        heads.ALL[name].model.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", heads.ALL)
def test_exports_are_masked_models_of_ordinary_shape(name: str, tmp_path: Path) -> None:
    model, given = heads.build(name), heads.inputs(name)
    plan = heads.some_heads(name, model)
    plain = heads.outputs(model, given)
    with mask_heads(model, plan, inputs=given):
        masked = heads.outputs(model, given)
    export_masked(model, plan, tmp_path, inputs=given)
    loaded = (
        heads
        .ALL[name]
        .model.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
        .eval()
    )
    assert heads.difference(masked, heads.outputs(loaded, given)) == 0.0
    assert heads.difference(plain, heads.outputs(model, given)) == 0.0
    assert is_clean(model)


def test_only_pruned_models_are_saved_and_only_unpruned_ones_exported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no pruned heads"):
        save_pruned(heads.build("bert"), tmp_path)
    with pytest.raises(InputError, match="PreTrainedModel"):
        save_pruned(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(InputError, match="unpruned"):
        export_masked(pruned("bert"), {0: [0]}, tmp_path)
    with pytest.raises(InputError, match="share the weights"):
        export_masked(heads.build("albert"), {0: [0]}, tmp_path)
    with pytest.raises(InputError, match="names no head"):
        export_masked(heads.build("bert"), {}, tmp_path)
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="folder"):
        save_pruned(pruned("bert"), file)


def test_loading_is_strict(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Cannot read"):
        load_pruned(tmp_path)
    model = pruned("bert")
    save_pruned(model, tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "encoder.layer.1.output.dense.bias"
    for damaged, message in (
        ({k: v for k, v in tensors.items() if k != name}, f"missing .*{name}"),
        ({**tensors, "more": tensors[name].clone()}, "unknown .*more"),
        ({**tensors, name: tensors[name][:-1].clone()}, "size mismatch"),
    ):
        save_file(damaged, weights)
        with pytest.raises(InputError, match=message):
            load_pruned(tmp_path)
    weights.write_bytes(b"broken")
    with pytest.raises(InputError, match="Cannot read"):
        load_pruned(tmp_path)
    save_file(tensors, weights)
    load_pruned(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = {"encoder.layer.7.attention": config["attnlens_pruned"]["encoder.layer.0.attention"]}
    for changes, message in (
        ({"attnlens_pruned": None}, "no attnlens_pruned"),
        ({"attnlens_pruned": other}, "not one of BertModel"),
        ({"architectures": ["MyModel"]}, "model_class"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InputError, match=message):
            load_pruned(tmp_path)
    loaded = load_pruned(tmp_path, model_class=hf.BertModel)
    assert isinstance(loaded, hf.BertModel)


def test_plans_are_plain_json(tmp_path: Path) -> None:
    with mask_heads(heads.build("bert"), {0: [2, 1]}) as plan:
        pass
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan.to_dict(), "score": "random"}))
    assert Plan.read(path) == plan and len(plan) == 2
    with mask_heads(heads.build("bert"), Plan.read(path)) as again:
        assert again == plan
    for content in ("{", "[]", "{}", '{"format": 1, "heads": [{"stack": "a"}]}', '{"format": 2}'):
        path.write_text(content)
        with pytest.raises(InputError):
            Plan.read(path)
    path.write_text('{"format": 2, "heads": []}')
    with pytest.raises(InputError, match="format 2"):
        Plan.read(path)
