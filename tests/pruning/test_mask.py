"""Masking heads: what replaces their contexts, and that nothing else happens."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnlens
from attnlens import HeadStatistics, HiddenTokenAttribution, Lens, mask_heads, prune_heads
from attnlens.errors import CaptureError, InputError, UnsupportedAttentionError
from attnlens.pruning.division import output_weight
from attnlens.pruning.mask import masking
from attnlens.pruning.plan import resolve
from tests.support import heads, models
from tests.support.hooks import hooks, is_clean, patched


def silenced(model: Any, given: dict[str, Tensor], plan: heads.Plan) -> Any:
    """The twin of zero masking: a copy whose W_O ignores the masked heads."""
    model = copy.deepcopy(model)
    for layer in heads.layers_of(model, given):
        weight = output_weight(layer)
        for head in plan.get(layer.key, ()):
            for column in range(head * layer.width, (head + 1) * layer.width):
                weight.tensor.data.select(weight.dim, column).zero_()
    return model


@pytest.mark.parametrize(("name", "implementation"), heads.CASES)
def test_zero_masking_is_a_silent_output_projection(name: str, implementation: str) -> None:
    model, given = heads.build(name, implementation), heads.inputs(name)
    plan = heads.some_heads(name, model)
    plain = heads.outputs(model, given)
    with mask_heads(model, plan, inputs=given):
        masked = heads.outputs(model, given)
    assert heads.difference(masked, heads.outputs(silenced(model, given, plan), given)) == 0.0
    assert heads.difference(masked, plain) > 0.01
    assert heads.difference(plain, heads.outputs(model, given)) == 0.0
    assert is_clean(model)


def received(model: nn.Module, name: str, given: dict[str, Tensor]) -> Tensor:
    """The first input that a module gets."""
    kept: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: kept.append(args[0])
    )
    with torch.no_grad():
        model(**given)
    handle.remove()
    return kept[0]


@pytest.mark.parametrize("mode", ["mean", "uniform"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "t5", "eurobert", "gpt2", "vit"])
def test_replacements_match_loops(name: str, mode: Any) -> None:
    model, given = heads.build(name), heads.inputs(name)
    captures = attnlens.record(model, **given)
    if name == "gpt2":
        recording = attnlens.attention.Recording()
        with Lens(model, recording, kinds="decoder"), torch.no_grad():
            model(**given)
        captures = recording.compute()
    first = captures[0]
    assert first.output_projection is not None
    masked = [1, 2]
    batch, count, queries, keys, width = first.shape
    support = torch.ones(batch, count, queries, keys, dtype=torch.bool)
    if first.mask is not None:
        support &= first.mask
    expected = first.context.transpose(1, 2).double().clone()
    for example in range(batch):
        real = first.real_rows[example, 0].nonzero()[:, 0].tolist()
        for head in masked:
            rows = [first.context[example, head, row].double() for row in real]
            for query in range(queries):
                if mode == "mean":
                    replacement = torch.stack(rows).mean(0)
                else:
                    seen = support[example, head, query].nonzero()[:, 0].tolist()
                    values = [first.value[example, head, key].double() for key in seen]
                    replacement = torch.stack(values).mean(0) if values else torch.zeros(width)
                expected[example, query, head] = replacement
    with mask_heads(model, {0: masked}, mode):
        got = received(model, first.output_projection.name, given)
    assert torch.allclose(got.double(), expected.flatten(2), rtol=1e-5, atol=1e-6)


def test_uniform_attention_passes_what_uniform_logits_give() -> None:
    """Zero query and key weights make every row of A uniform over its keys."""
    model, given = heads.build("bert"), heads.inputs("bert")
    with mask_heads(model, {0: [0, 1, 2, 3]}, "uniform"):
        masked = heads.outputs(model, given)
    attention = model.encoder.layer[0].attention.self
    for parameter in (*attention.query.parameters(), *attention.key.parameters()):
        parameter.data.zero_()
    assert heads.difference(masked, heads.outputs(model, given)) < 1e-5


def test_gates_of_zero_mask_and_gates_of_one_do_nothing() -> None:
    model, given = heads.build("roberta"), heads.inputs("roberta")
    gates = torch.ones(2, 4)
    with mask_heads(model, gates=gates):
        assert heads.difference(heads.outputs(model, given), heads.outputs(model, given)) == 0.0
        ones = heads.outputs(model, given)
    assert heads.difference(ones, heads.outputs(model, given)) == 0.0
    gates[1, 2] = 0
    with mask_heads(model, gates=gates):
        gated = heads.outputs(model, given)
    with mask_heads(model, {1: [2]}):
        assert heads.difference(gated, heads.outputs(model, given)) == 0.0


def test_gradients_of_gates_match_differences() -> None:
    model, given = heads.build("bert").double(), heads.inputs("bert")
    gates = torch.ones(2, 4, dtype=torch.double, requires_grad=True)

    def loss(gates: Tensor) -> Tensor:
        with mask_heads(model, {1: [3]}, gates=gates):
            total: Tensor = model(**given).last_hidden_state.square()[:, 0].sum()
        return total

    (gradient,) = torch.autograd.grad(loss(gates), gates)
    step = 1e-5
    for layer in range(2):
        for head in range(4):
            change = torch.zeros(2, 4, dtype=torch.double)
            change[layer, head] = step
            with torch.no_grad():
                slope = (loss(gates + change) - loss(gates - change)) / (2 * step)
            assert abs(float(slope - gradient[layer, head])) < 1e-6 * max(1.0, abs(float(slope)))
    assert gradient[1, 3] == 0 and (gradient[0] != 0).all()


def test_layers_that_share_weights_are_masked_one_by_one() -> None:
    model, given = heads.build("albert"), heads.inputs("albert")
    calls: list[int] = []
    dense = model.encoder.albert_layer_groups[0].albert_layers[0].attention.dense

    def by_hand(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (context,) = args
        calls.append(len(calls))
        masked = [1] if calls[-1] == 0 else [0, 3]
        context = context.clone()
        for head in masked:
            context[..., head * models.WIDTH : (head + 1) * models.WIDTH] = 0
        return (context,)

    with dense.register_forward_pre_hook(by_hand):
        expected = heads.outputs(model, given)
    assert len(calls) == 2
    with mask_heads(model, {0: [1], 1: [0, 3]}):
        for _ in range(2):
            assert heads.difference(heads.outputs(model, given), expected) == 0.0


def test_a_lens_inside_still_finds_the_output_projection() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    statistics = HeadStatistics()
    with mask_heads(model, {0: [1]}), Lens(model, statistics), torch.no_grad():
        model(**given)
    assert statistics.compute().value_space == ("T", "T")
    plain = HeadStatistics()
    with Lens(model, plain), torch.no_grad():
        model(**given)
    first, second = statistics.compute().output_norm, plain.compute().output_norm
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


def test_nothing_but_the_masked_heads_changes() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    model.train()
    model.encoder.layer[1].eval()
    model.encoder.layer[0].output.dense.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    needed = [parameter.requires_grad for parameter in model.parameters()]
    torch.manual_seed(5)
    with torch.no_grad():
        expected = model(**given).last_hidden_state
    torch.manual_seed(5)
    with mask_heads(model, gates=torch.ones(2, 4)), torch.no_grad():
        assert torch.equal(model(**given).last_hidden_state, expected)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == needed
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_every_hook_goes_whatever_happens(error: type[BaseException], mode: Any) -> None:
    model = heads.build("bert")
    with pytest.raises(error), mask_heads(model, {0: [0]}, mode):
        assert not is_clean(model)
        raise error
    assert is_clean(model)


def test_gradient_checkpointing_masks_the_replay_too() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            model.get_submodule(name).p = 0.0

    def gradient() -> Tensor:
        with mask_heads(model, {0: [1], 1: [2]}):
            model(**given).last_hidden_state.square().sum().backward()
        weight = model.encoder.layer[0].attention.self.value.weight
        found, weight.grad = weight.grad, None
        assert found is not None
        return found

    expected = gradient()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    own = hooks(model)  # of the checkpointing
    assert torch.allclose(gradient(), expected, rtol=1e-6, atol=1e-7)
    with (
        pytest.raises(CaptureError, match="Gradient checkpointing"),
        mask_heads(model, {0: [1]}, "mean"),
    ):
        model(**given).last_hidden_state.sum().backward()
    assert hooks(model) == own and not patched()


def test_compiled_models_are_masked() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    with mask_heads(model, {0: [1]}):
        expected = heads.outputs(model, given)
    model.compile(backend="eager")
    heads.outputs(model, given)
    with mask_heads(model, {0: [1]}):
        assert heads.difference(heads.outputs(model, given), expected) == 0.0


def test_a_plan_may_be_a_tensor_and_count_from_the_end() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    chosen = torch.zeros(2, 4, dtype=torch.bool)
    chosen[1, 2] = True
    with mask_heads(model, chosen) as plan:
        expected = heads.outputs(model, given)
    assert list(plan.heads.values()) == [(2,)]
    with mask_heads(model, {-1: [2]}):
        assert heads.difference(heads.outputs(model, given), expected) == 0.0


WRONG: list[tuple[Any, str]] = [
    ({2: [0]}, "no layer 2"),
    ({"0": [0]}, "no layer '0'"),
    ({True: [0]}, "no layer True"),
    ({0: [4]}, "heads 0 to 3. Got 4"),
    ({0: [-1]}, "heads 0 to 3. Got -1"),
    ({0: [1.0]}, "heads 0 to 3. Got 1.0"),
    ({0: [1, 1]}, "duplicates"),
    ({1: [1], -1: [2]}, "twice"),
    ({}, "names no head"),
    ({0: []}, "names no head"),
    ([0, 1], "must be"),
    (torch.zeros(2, 4), "must be bool"),
    (torch.ones(3, 4, dtype=torch.bool), r"must be bool \[2, 4\]"),
    (torch.zeros(2, 4, dtype=torch.bool), "names no head"),
]


@pytest.mark.parametrize(("plan", "message"), WRONG)
def test_wrong_plans_are_refused(plan: Any, message: str) -> None:
    model = heads.build("bert")
    with pytest.raises(InputError, match=message), mask_heads(model, plan):
        pass
    assert is_clean(model)


def test_wrong_arguments_are_refused() -> None:
    model = heads.build("bert")
    mode: Any = "half"
    with pytest.raises(InputError, match="mode"), mask_heads(model, {0: [0]}, mode):
        pass
    with (
        pytest.raises(InputError, match=r"gates must be floating-point \[2, 4\]"),
        mask_heads(model, gates=torch.ones(4, 2)),
    ):
        pass
    with pytest.raises(InputError, match="stack"), mask_heads(heads.build("clip"), {0: [0]}):
        pass


def test_means_need_tokens_in_batch_order() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    layers = [replace(layer, in_order=False) for layer in heads.layers_of(model, given)]
    plan = resolve({0: [0]}, layers)
    with (
        pytest.raises(UnsupportedAttentionError, match="batch order"),
        masking(model, layers, plan, "mean"),
    ):
        pass
    assert is_clean(model)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_attribution_sees_the_masked_layers(name: str) -> None:
    """Layers are called again for their derivatives, and must be masked then too."""
    masked, pruned, given = heads.build(name), heads.build(name), heads.inputs(name)
    plan = {0: [0], 1: [1, 2]}
    prune_heads(pruned, plan)

    def own(model: nn.Module) -> Tensor:
        attribution = HiddenTokenAttribution()
        with Lens(model, attribution), torch.no_grad():
            model(**given)
        return attribution.compute().own

    with mask_heads(masked, plan):
        found = own(masked)
    assert torch.allclose(found, own(pruned), rtol=1e-5)
    assert not torch.allclose(found, own(masked), rtol=1e-2)
