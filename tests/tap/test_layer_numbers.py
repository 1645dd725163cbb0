"""Layers are numbered as the model numbers its blocks, also where not all of them attend."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import attnlens
from attnlens import EffectiveAttention, HeadStatistics, HiddenTokenAttribution, Lens, mask_heads
from attnlens.errors import InputError, UnsupportedAttentionError
from attnlens.pruning.checkpoint import load_pruned, save_pruned
from tests.support.zoo import build

HYBRIDS = (
    "bamba",
    "jamba",
    "lfm2",
    "minimax",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "zamba2",
)


def attending(name: str, *, layers=None) -> list[int]:
    example = build(name)
    statistics = HeadStatistics()
    with Lens(example.model, statistics, layers=layers), torch.no_grad():
        example.model(**example.inputs)
    return [layer for _, layer in statistics.compute().layers]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_has_gaps(name: str) -> None:
    assert attending(name) == [1, 3]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [([1], [1]), ([3], [3]), ([-1], [3]), ([-3, 3], [1, 3]), (["layers.3.self_attn"], [3])],
)
def test_layers_are_chosen_by_the_models_numbers(layers, expected) -> None:
    assert attending("jamba", layers=layers) == expected


def test_the_only_attention_of_a_hybrid_keeps_its_number() -> None:
    config = build("lfm2").model.config
    config.layer_types = ["conv", "conv", "full_attention", "conv"]
    model = AutoModelForCausalLM.from_config(config).eval()
    statistics = HeadStatistics()
    with Lens(model, statistics, layers=[-2]), torch.no_grad():
        model(**build("lfm2").inputs)
    assert [layer for _, layer in statistics.compute().layers] == [2]


def test_a_block_without_attention_is_none_to_look_at() -> None:
    example = build("jamba")
    with pytest.raises(UnsupportedAttentionError, match=r"none of it was chosen: layers=\[2\]"):
        attending("jamba", layers=[2])
    for layer in (4, -5):
        with pytest.raises(InputError, match="there are 4 layers"):
            Lens(example.model, layers=[layer])


@pytest.mark.parametrize("name", ["jamba", "lfm2"])
def test_every_part_speaks_of_the_same_layers(name: str) -> None:
    example = build(name)
    statistics, maps = HeadStatistics(), EffectiveAttention()
    attribution = HiddenTokenAttribution(probes=1, keep="matrices", layers=[1, 3])
    with Lens(example.model, statistics, maps, attribution) as lens, torch.no_grad():
        example.model(**example.inputs)
    assert [layer for _, layer in statistics.compute().layers] == [1, 3]
    assert [seen.layer for seen in maps.compute()] == [1, 3]
    assert [layer for _, layer in attribution.compute().layers] == [1, 3]
    assert statistics.compute().to_pandas().reset_index()["layer"].drop_duplicates().tolist() == [
        1,
        3,
    ]
    page = attnlens.report(lens).html
    assert '"layers":["1","3","1","3"]' in page.replace(" ", "").replace("\n", "")


@pytest.mark.parametrize("layer", [3, -1])
def test_masks_and_pruning_go_by_the_models_numbers(layer: int) -> None:
    example = build("jamba")
    W = example.model.get_submodule("layers.3.self_attn.o_proj").weight
    with torch.no_grad():
        with mask_heads(example.model, {layer: [1]}) as plan:
            masked = example.model(**example.inputs).last_hidden_state
        W.view(W.shape[0], 4, -1)[:, 1] = 0
        expected = example.model(**example.inputs).last_hidden_state
    assert list(plan.heads) == [("layers.*.self_attn", 3)]
    torch.testing.assert_close(masked, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"no layer 0: layers\.\*\.self_attn has layers \[1, 3\]"):
        mask_heads(example.model, {0: [1]}).__enter__()


def test_pruned_hybrids_keep_their_numbers(tmp_path) -> None:
    example = build("jamba")
    with torch.no_grad(), mask_heads(example.model, {3: [0, 1]}):
        expected = example.model(**example.inputs).last_hidden_state
    attnlens.prune_heads(example.model, {3: [0, 1]})
    save_pruned(example.model, tmp_path)
    with torch.no_grad():
        for model in (example.model, load_pruned(tmp_path)):
            found = model(**example.inputs).last_hidden_state
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            shapes = {c.layer: c.shape[1] for c in attnlens.record(model, **example.inputs)}
            assert shapes == {1: 4, 3: 2}
