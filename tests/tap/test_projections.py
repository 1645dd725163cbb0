"""W_O whose weight is no ordinary tensor: H is read where it can be, and is right; else refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import BertModel, PreTrainedModel

from attnlens import HeadStatistics, Lens, check, mask_heads, prune_heads, record
from attnlens.errors import InputError
from attnlens.pruning.checkpoint import export_masked
from tests.support import models
from tests.support.hooks import is_clean

NAMES = ["bert", "vit"]


def output_projections(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where each W_O of a BERT or a ViT hangs: its parent and its name there."""
    ends = ("attention.output.dense", "attention.o_proj", "attention.out_proj")
    names = [name for name, _ in model.named_modules() if name.endswith(ends)]
    assert len(names) == models.LAYERS
    pairs = (name.rpartition(".")[::2] for name in names)
    return [(model.get_submodule(parent), leaf) for parent, leaf in pairs]


class Int8Linear(nn.Module):
    """Keeps its weight as integers, as bitsandbytes does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(linear.weight.detach().abs().amax() / 127)
        integers = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight * self.scale, self.bias)


class Halved(Tensor):
    """A tensor that is not what its storage says."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            hidden, weight, *rest = args
            with torch._C.DisableTorchFunctionSubclass():
                return func(hidden, weight.as_subclass(Tensor) / 2, *rest)
        return super().__torch_function__(func, types, args, kwargs)


def quantised(model: nn.Module) -> None:
    for parent, leaf in output_projections(model):
        setattr(parent, leaf, Int8Linear(getattr(parent, leaf)))


def subclassed(model: nn.Module) -> None:
    for parent, leaf in output_projections(model):
        linear = getattr(parent, leaf)
        weight = linear.weight.detach().as_subclass(Halved)
        linear.weight = nn.Parameter(weight, requires_grad=False)


def each(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    def change_all(model: nn.Module) -> None:
        for parent, leaf in output_projections(model):
            change(getattr(parent, leaf))

    return change_all


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "int8": quantised,
    "subclass": subclassed,
    "weight_norm": each(parametrizations.weight_norm),
    "spectral_norm": each(parametrizations.spectral_norm),
    "old weight_norm": each(weight_norm),
    "old spectral_norm": each(spectral_norm),
    "prune": each(lambda linear: prune.l1_unstructured(linear, "weight", 0.3)),
    "offload": lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
}


def changed(name: str, change: str) -> PreTrainedModel:
    model = models.build(name)
    CHANGES[change](model)
    return model.eval()


def check_projections(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """H of every layer makes of the context what the module itself makes of it."""
    outputs: dict[str, Tensor] = {}
    captures = record(model, **inputs)
    assert len(captures) == models.LAYERS
    handles = [
        model.get_submodule(capture.receiver).register_forward_hook(
            lambda module, args, output, name=capture.receiver: outputs.update({name: output})
        )
        for capture in captures
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    for capture in captures:
        assert capture.output_projection is not None, capture.projection_reason
        assert capture.value_space == "T"
        expected = torch.einsum("bhqd,hdm->bqm", capture.context, capture.projection)
        expected = expected + capture.output_projection.bias
        torch.testing.assert_close(outputs[capture.receiver], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_h_is_what_the_module_does(name: str, change: str) -> None:
    check_projections(changed(name, change), models.inputs(name))


def test_h_of_weights_on_disk(tmp_path: Path) -> None:
    for name in NAMES:
        model = models.build(name)
        disk_offload(model, str(tmp_path / name), execution_device=torch.device("cpu"))
        check_projections(model, models.inputs(name))


ADAPTERS: dict[str, Callable[[], Any]] = {
    "dora": lambda: peft.LoraConfig(
        r=3, target_modules=["dense"], use_dora=True, init_lora_weights=False
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["dense"], feedforward_modules=[], init_ia3_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(r=3, target_modules=["dense"], init_weights=False),
    "vera": lambda: peft.VeraConfig(
        r=3, target_modules=["attention.output.dense"], init_weights=False
    ),
    "oft": lambda: peft.OFTConfig(
        r=0, oft_block_size=4, target_modules=["dense"], init_weights=False
    ),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["dense"]),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_h_of_adapters_of_every_kind(kind: str, training: bool) -> None:
    model = peft.get_peft_model(models.build("bert"), ADAPTERS[kind]())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.manual_seed(1)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn_like(parameter)
    check_projections(model.train(training), models.inputs("bert"))
    assert all(module.training == training for module in model.modules())


def test_h_follows_a_weight_that_changes_and_an_adapter_that_is_switched() -> None:
    model = peft.get_peft_model(models.build("bert"), ADAPTERS["dora"]()).eval()
    inputs, seen = models.inputs("bert"), []
    with torch.no_grad(), Lens(model, statistics := HeadStatistics()):
        model(**inputs)
        seen.append(statistics.compute().output_norm.clone())
        statistics.reset()
        with model.disable_adapter():
            model(**inputs)
        seen.append(statistics.compute().output_norm.clone())
        statistics.reset()
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(2)
        model(**inputs)
        seen.append(statistics.compute().output_norm.clone())
    assert not torch.allclose(seen[0][0], seen[1][0])
    torch.testing.assert_close(seen[2][0], 2 * seen[0][0])


def test_random_numbers_of_the_user_are_not_drawn() -> None:
    config = peft.LoraConfig(r=3, target_modules=["dense"], lora_dropout=0.5, use_dora=True)
    model = peft.get_peft_model(models.build("bert"), config).train()
    inputs = models.inputs("bert")
    torch.manual_seed(0)
    expected = model(**inputs)[0]
    torch.manual_seed(0)
    with Lens(model):
        assert torch.equal(model(**inputs)[0], expected)


def test_h_is_refused_where_every_example_has_another_adapter() -> None:
    config = peft.LoraConfig(r=3, target_modules=["dense"], init_lora_weights=False)
    for name, end in (("bert", "attention.output.dense"), ("roberta", "attention.output.dense")):
        model = peft.get_peft_model(models.build(name), config)
        model.add_adapter("other", config)
        model.eval()
        with Lens(model.base_model.model, statistics := HeadStatistics()), torch.no_grad():
            model(**models.inputs(name), adapter_names=["default", "other"])
            model(**models.inputs(name), adapter_names=["other", "other"])
        assert statistics.compute().value_space == ("V", "V")
        with torch.no_grad():
            captures = record(model, **models.inputs(name), adapter_names=["default", "other"])
        assert captures[1].projection_reason == (
            f"base_model.model.encoder.layer.1.{end} applies another adapter to each example "
            f"(adapter_names)"
        )


class Rounded(nn.Linear):
    """Rounds what it receives, so that no matrix says what it does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.weight = nn.Parameter(
            (16 * linear.weight.detach()).to(torch.int8), requires_grad=False
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.round(), self.weight / 16, self.bias)


@pytest.mark.parametrize("name", NAMES)
def test_masking_needs_no_h_and_pruning_says_what_to_do(name: str) -> None:
    model, inputs = models.build(name), models.inputs(name)
    for parent, leaf in output_projections(model):
        setattr(parent, leaf, Rounded(getattr(parent, leaf)))
    verdict = check(model, inputs)
    assert verdict.supported, verdict.words
    assert all("is no linear map" in site.projection_reason for site in verdict.sites)
    plain = models.outputs(model(**inputs))
    with mask_heads(model, {0: [1]}, inputs=inputs):
        masked = models.outputs(model(**inputs))
    parent, leaf = output_projections(model)[0]
    getattr(parent, leaf).weight.data[:, models.WIDTH : 2 * models.WIDTH] = 0
    for path, expected in models.outputs(model(**inputs)).items():
        torch.testing.assert_close(masked[path], expected)
    assert not torch.equal(masked[".last_hidden_state"], plain[".last_hidden_state"])
    with pytest.raises(InputError, match=r"quantised weights \(Rounded\).*Prune first"):
        prune_heads(model, {0: [1]}, inputs=inputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("int8", "quantised weights"),
        ("subclass", "quantised weights"),
        ("weight_norm", "remove_parametrizations"),
        ("spectral_norm", "remove_parametrizations"),
        ("old weight_norm", "remove_parametrizations"),
        ("old spectral_norm", "remove_parametrizations"),
        ("prune", "remove_parametrizations"),
        ("offload", "Load the model onto one device first"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_cannot_be_cut_are_refused_and_masked(
    name: str, change: str, words: str
) -> None:
    model, inputs = changed(name, change), models.inputs(name)
    with torch.no_grad():
        before = model(**inputs)[0]
        with pytest.raises(InputError, match=words):
            prune_heads(model, {0: [1]}, inputs=inputs)
        assert torch.equal(model(**inputs)[0], before)
        with mask_heads(model, {0: [1]}, inputs=inputs):
            assert not torch.equal(model(**inputs)[0], before)
    assert is_clean(model) or change.startswith(("old", "prune"))  # which are hooks themselves
    assert check(model, inputs).supported


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_is_exported_masked(where: str, tmp_path: Path) -> None:
    model, inputs = models.build("bert"), models.inputs("bert")
    expected = copy.deepcopy(model)
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
    model.hf_device_map = {"": where}
    export_masked(model, {0: [1, 2], 1: [0]}, tmp_path / "masked")
    exported = BertModel.from_pretrained(tmp_path / "masked").eval()
    with torch.no_grad(), mask_heads(expected, {0: [1, 2], 1: [0]}):
        torch.testing.assert_close(exported(**inputs)[0], expected(**inputs)[0])
