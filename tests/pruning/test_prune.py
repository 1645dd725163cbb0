"""Pruning heads: the outputs of masking, fewer weights, and a model left alone when it fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from attnlens import HeadStatistics, Lens, mask_heads, prune_heads
from attnlens.errors import InputError, UnsupportedAttentionError
from attnlens.pruning.division import find_divisions, head_layout
from attnlens.tap.trial import Trial
from tests.support import heads, models
from tests.support.hooks import is_clean
from tests.support.models import HEADS, HIDDEN, LAYERS, WIDTH


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that pruning changes."""
    plain = {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | dict) and not key.startswith("_")
    }
    return {
        "parameters": {name: (id(p), p.clone()) for name, p in model.named_parameters()},
        "plain": copy.deepcopy(plain),
        "config": model.config.to_dict(),
    }


def unchanged(model: nn.Module, before: dict[str, Any]) -> bool:
    now = snapshot(model)
    same = all(
        now["parameters"][name][0] == identity and torch.equal(now["parameters"][name][1], value)
        for name, (identity, value) in before["parameters"].items()
    )
    return same and now["plain"] == before["plain"] and now["config"] == before["config"]


def rounded(difference: float, outputs: dict[str, Tensor]) -> bool:
    """Whether a difference from some outputs is nothing but rounding."""
    return difference <= heads.ROUNDING * heads.largest(outputs)


@pytest.mark.parametrize(("name", "implementation"), heads.CASES)
def test_pruned_equals_masked(name: str, implementation: str) -> None:
    model, given = heads.build(name, implementation), heads.inputs(name)
    plan = heads.some_heads(name, model)
    with mask_heads(model, plan, inputs=given):
        masked = heads.outputs(model, given)
    report = prune_heads(model, plan, inputs=given, repeats=1)
    assert rounded(heads.difference(masked, heads.outputs(model, given)), masked)
    assert rounded(report.difference, masked)
    assert report.after.parameters < report.before.parameters
    assert report.after.parameters == sum(p.numel() for p in model.parameters())
    counts = [layer.heads for layer in heads.layers_of(model, given)]
    assert sum(counts) == report.heads - len(report.plan)


WITHOUT_ANY = [name for name in heads.ALL if name not in ("albert", "deberta_v2", "gpt2")]


@pytest.mark.parametrize("name", WITHOUT_ANY)
def test_all_heads_of_a_layer_may_go(name: str) -> None:
    model, given = heads.build(name), heads.inputs(name)
    layer = heads.layers_of(model, given)[0]
    plan = {layer.key: list(range(layer.heads))}
    with mask_heads(model, plan, inputs=given):
        masked = heads.outputs(model, given)
    prune_heads(model, plan, inputs=given, repeats=1)
    assert rounded(heads.difference(masked, heads.outputs(model, given)), masked)
    statistics = HeadStatistics()
    with Lens(model, statistics), torch.no_grad():
        model(**given)
    assert layer.key not in statistics.compute().layers


@pytest.mark.parametrize("name", ["deberta_v2", "gpt2"])
def test_a_model_that_cannot_run_without_heads_stays_as_it_was(name: str) -> None:
    model, given = heads.build(name), heads.inputs(name)
    before, outputs = snapshot(model), heads.outputs(model, given)
    with pytest.raises(UnsupportedAttentionError, match="least one head"):
        prune_heads(model, {0: range(HEADS)}, inputs=given)
    assert unchanged(model, before) and is_clean(model)
    assert heads.difference(outputs, heads.outputs(model, given)) == 0.0


def rows(count: int, *gone: int) -> list[int]:
    """Indices that remain where `count` heads lie side by side."""
    return [h * WIDTH + i for h in range(count) if h not in gone for i in range(WIDTH)]


def test_rows_and_columns_are_those_of_the_heads() -> None:
    model = heads.build("bert")
    before = copy.deepcopy(model)
    prune_heads(model, {1: [0, 2]})
    kept = rows(HEADS, 0, 2)
    old, new = (m.encoder.layer[1].attention for m in (before, model))
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(new.self, name).weight, getattr(old.self, name).weight[kept])
        assert torch.equal(getattr(new.self, name).bias, getattr(old.self, name).bias[kept])
        assert getattr(new.self, name).out_features == len(kept)
    assert torch.equal(new.output.dense.weight, old.output.dense.weight[:, kept])
    assert torch.equal(new.output.dense.bias, old.output.dense.bias)
    assert new.output.dense.in_features == len(kept)
    assert (new.self.num_attention_heads, new.self.all_head_size) == (2, len(kept))
    first = model.encoder.layer[0].attention.self
    assert (first.num_attention_heads, first.query.out_features) == (HEADS, HIDDEN)


def test_fused_projections_lose_a_row_block_in_each_third() -> None:
    model = heads.build("modernbert")
    before = model.layers[1].attn.Wqkv.weight.clone()
    prune_heads(model, {1: [3]})
    kept = [third * HIDDEN + row for third in range(3) for row in rows(HEADS, 3)]
    assert torch.equal(model.layers[1].attn.Wqkv.weight, before[kept])
    gpt2 = heads.build("gpt2")
    fused = gpt2.h[0].attn.c_attn.weight.clone()
    prune_heads(gpt2, {0: [3]})
    assert torch.equal(gpt2.h[0].attn.c_attn.weight, fused[:, kept])


def test_projections_of_positions_and_tables_are_cut_too() -> None:
    deberta = heads.build("deberta_v2")
    prune_heads(deberta, {0: [1]})
    attention = deberta.encoder.layer[0].attention.self
    assert attention.pos_key_proj.weight.shape[0] == attention.pos_query_proj.weight.shape[0] == 24
    swin = heads.build("swin")
    prune_heads(swin, {0: [1]}, inputs=heads.inputs("swin"))
    tables = {n: p.shape[1] for n, p in swin.named_parameters() if "position_bias_table" in n}
    assert sorted(tables.values()) == [3, 4]


def test_a_shared_position_bias_is_cut_layer_by_layer() -> None:
    model, given = heads.build("t5"), heads.inputs("t5")
    with mask_heads(model, {0: [0], 1: [3]}):
        expected = heads.outputs(model, given)
    prune_heads(model, {0: [0], 1: [3]})
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert table.shape[1] == HEADS
    for copied in (model, copy.deepcopy(model)):
        assert rounded(heads.difference(expected, heads.outputs(copied, given)), expected)
    longer = {name: tensor.repeat(1, 2) for name, tensor in given.items()}
    fresh = heads.build("t5")
    with mask_heads(fresh, {0: [0], 1: [3]}):
        expected = heads.outputs(fresh, longer)
    assert rounded(heads.difference(expected, heads.outputs(model, longer)), expected)


@pytest.mark.parametrize("name", ["bert", "t5", "modernbert", "mpnet"])
def test_pruning_twice_is_pruning_once(name: str) -> None:
    twice, once, given = heads.build(name), heads.build(name), heads.inputs(name)
    prune_heads(twice, {0: [1], 1: [0]})
    prune_heads(twice, {0: [1]})  # the third head of the first numbering
    prune_heads(once, {0: [1, 2], 1: [0]})
    assert heads.difference(heads.outputs(once, given), heads.outputs(twice, given)) == 0.0
    assert once.config.attnlens_pruned == twice.config.attnlens_pruned
    (record,) = next(iter(once.config.attnlens_pruned.values())).values()
    assert record["pruned"] == [1, 2]


def test_decoders_and_cross_attention_are_pruned_on_request() -> None:
    model, given = heads.build("bart"), heads.inputs("bart")
    plan = {
        ("decoder.layers.*.self_attn", 0): [0, 1],
        ("decoder.layers.*.encoder_attn", 1): [3],
    }
    with mask_heads(model, plan, kinds=("decoder", "cross")):
        masked = heads.outputs(model, given)
    report = prune_heads(model, plan, kinds=("decoder", "cross"))
    assert rounded(heads.difference(masked, heads.outputs(model, given)), masked)
    assert rounded(report.difference, masked)


def test_training_goes_on() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    model.encoder.layer[0].attention.self.key.weight.requires_grad_(False)
    prune_heads(model, {0: [0], 1: [1, 2]})
    assert not model.encoder.layer[0].attention.self.key.weight.requires_grad
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    losses = []
    for _ in range(5):
        loss = model(**given).last_hidden_state.square().sum(-1)[:, 0].sub(1).square().sum()
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    value = model.encoder.layer[1].attention.self.value.weight
    assert value.grad is not None and value.grad.shape == (2 * WIDTH, HIDDEN)


def test_an_optimizer_must_not_hold_what_is_replaced() -> None:
    model = heads.build("bert")
    before = snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for given in (optimizer, [optimizer]):
        with pytest.raises(InputError, match="Prune first"):
            prune_heads(model, {0: [0]}, optimizer=given)
    assert unchanged(model, before)
    elsewhere = torch.optim.SGD(model.encoder.layer[1].parameters(), 0.1)
    prune_heads(model, {0: [0]}, optimizer=elsewhere)


def test_the_report_counts_by_the_formula() -> None:
    model = heads.build("bert")
    report = prune_heads(model, {0: [1], 1: [0, 3]}, repeats=2)
    each = WIDTH * (4 * HIDDEN + 3)  # rows of q, k, v with biases, columns of W_O
    assert report.before.parameters - report.after.parameters == 3 * each
    assert report.before.flops == 2 * LAYERS * 4 * HIDDEN * HIDDEN
    assert report.before.flops - report.after.flops == 2 * 3 * 4 * WIDTH * HIDDEN
    assert report.before.seconds > 0 and report.after.seconds > 0
    assert "8 → 5" in str(report)


def test_groups_that_share_a_key_go_as_a_whole() -> None:
    model = heads.build("eurobert")
    before = snapshot(model)
    with pytest.raises(InputError, match=r"heads \[2, 3\] share one key"):
        prune_heads(model, {0: [0, 1, 3]})
    assert unchanged(model, before)
    prune_heads(model, {0: [2, 3]})
    attention = model.layers[0].self_attn
    assert attention.q_proj.out_features == 48 and attention.k_proj.out_features == 24


def test_layers_that_share_weights_go_alike() -> None:
    model = heads.build("albert")
    before = snapshot(model)
    for plan in ({0: [1]}, {0: [1], 1: [2]}):
        with pytest.raises(InputError, match="share the weights"):
            prune_heads(model, plan)
    assert unchanged(model, before)


def test_tied_weights_stay_tied() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    first, second = (layer.attention.self for layer in model.encoder.layer)
    first.key.weight = first.query.weight
    with mask_heads(model, {0: [1]}):
        masked = heads.outputs(model, given)
    prune_heads(model, {0: [1]})
    assert first.key.weight is first.query.weight and second.key.weight is not first.query.weight
    assert rounded(heads.difference(masked, heads.outputs(model, given)), masked)


def test_weights_shared_between_layers_are_refused() -> None:
    model, given = heads.build("bert"), heads.inputs("bert")
    first, second = (layer.attention.self for layer in model.encoder.layer)
    second.query.weight = first.query.weight
    before, outputs = snapshot(model), heads.outputs(model, given)
    for plan in ({0: [1]}, {0: [1], 1: [2]}):
        with pytest.raises(UnsupportedAttentionError, match="does not run"):
            prune_heads(model, plan)
    assert unchanged(model, before)
    assert heads.difference(outputs, heads.outputs(model, given)) == 0.0


def test_heads_mixed_after_the_projection_are_refused() -> None:
    """A norm across the heads makes each query depend on all rows."""
    model = heads.build("bert")
    attention = model.encoder.layer[0].attention.self
    attention.query = nn.Sequential(attention.query, nn.LayerNorm(HIDDEN))
    before = snapshot(model)
    with pytest.raises(UnsupportedAttentionError, match="as it was before"):
        prune_heads(model, {0: [1]})
    assert unchanged(model, before) and is_clean(model)


def test_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(heads.build("bert"), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(InputError, match="merge_and_unload"):
        prune_heads(model, {0: [0]})


@pytest.mark.parametrize(
    "plan", [{5: [0]}, {0: [9]}, {0: [1, 1]}, {}, torch.zeros(2, 4, dtype=torch.bool)]
)
def test_wrong_plans_are_refused_before_anything_changes(plan: Any) -> None:
    model = heads.build("bert")
    before = snapshot(model)
    with pytest.raises(InputError):
        prune_heads(model, plan)
    assert unchanged(model, before) and is_clean(model)


def test_a_model_without_attention_is_refused() -> None:
    import transformers as hf

    model = hf.FNetModel(
        hf.FNetConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=96)
    )
    with pytest.raises(UnsupportedAttentionError, match="No attention"):
        prune_heads(model, {0: [0]})


@examples(
    groups=st.integers(2, 5),
    share=st.integers(1, 3),
    block=st.integers(1, 4),
    repeats=st.integers(1, 3),
    blind=st.floats(0, 0.3),
    seed=st.integers(0, 1000),
)
def test_layouts_are_found_again(
    groups: int, share: int, block: int, repeats: int, blind: float, seed: int
) -> None:
    size = repeats * groups * block
    owners = torch.zeros(groups * share, size, dtype=torch.bool)
    for index in range(size):
        group = index // block % groups
        owners[group * share : (group + 1) * share, index] = True
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(size, generator=generator) < blind
    seen = owners & ~hidden
    found = head_layout(seen)
    if all(seen[group * share].any() for group in range(groups)):
        assert found is not None and bool((found & seen == seen).all())
        if not hidden.any():
            assert torch.equal(found, owners)


@pytest.mark.parametrize(
    "support",
    [
        torch.ones(4, 8, dtype=torch.bool),  # shared by all heads
        torch.zeros(4, 8, dtype=torch.bool),
        torch.eye(4, dtype=torch.bool)[:, [0, 1, 2, 3, 3]],  # uneven
        torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.bool),  # overlapping
        torch.eye(2, dtype=torch.bool)[:, [0, 1, 1, 0]],  # irregular
    ],
)
def test_what_is_not_divided_among_heads_is_left_alone(support: Tensor) -> None:
    assert head_layout(support) is None


def test_every_divided_weight_of_bert_is_found_and_no_other() -> None:
    model = heads.build("bert")
    layers = heads.layers_of(model, heads.inputs("bert"))
    found = find_divisions(Trial(model, heads.inputs("bert")), layers)
    names = {module: name for name, module in model.named_modules()}
    for index, layer in enumerate(found):
        got = {(names[w.module].split(f"layer.{index}.")[1], w.name) for w in layer.weights}
        kinds = ("query", "key", "value")
        expected = {(f"attention.self.{k}", n) for k in kinds for n in ("weight", "bias")}
        assert got == expected | {("attention.output.dense", "weight")}
        assert not layer.arguments


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_heads_go_one_by_one_until_none_is_left(name: str) -> None:
    model, inputs = models.build(name), models.inputs(name)
    with torch.no_grad(), mask_heads(model, {0: range(models.HEADS)}, inputs=inputs):
        expected = model(**inputs)[0]
    for _ in range(models.HEADS):
        prune_heads(model, {0: [0]}, inputs=inputs)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_the_only_head_of_a_model_born_with_one(name: str) -> None:
    family = models.FAMILIES[name]
    config = family.config()
    setattr(config, "num_heads" if name == "t5" else "num_attention_heads", 1)
    model, inputs = models.initialise(family.model, config), models.inputs(name)
    before = sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad(), mask_heads(model, {1: [0]}, inputs=inputs):
        expected = model(**inputs)[0]
    prune_heads(model, {1: [0]}, inputs=inputs)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=0, atol=1e-5)
    assert sum(parameter.numel() for parameter in model.parameters()) < before
