"""Notebook displays, tables and layouts for other tools."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
import torch

from attnlens import (
    EffectiveAttention,
    HeadImportance,
    HeadStatistics,
    HiddenTokenAttribution,
    Lens,
    TokenIdentifiability,
    TokenSaliency,
    compare,
)
from attnlens.attention import Recording
from attnlens.errors import InputError
from attnlens.results import facts_html, heads_html
from attnlens.saving import load, read_header
from tests.support import models
from tests.support.results import one_of_each
from tests.test_saving import assert_same


@pytest.fixture(scope="module")
def lens():
    model = models.build("bert")
    observers = HeadStatistics(), EffectiveAttention(), Recording(), HiddenTokenAttribution(2)
    with Lens(model, *observers) as lens, torch.no_grad():
        model(**models.inputs("bert"))
    return lens


def test_a_lens_shows_its_observers_and_every_head(lens):
    html = lens._repr_html_()
    assert "BertModel" in html and "HeadStatistics, EffectiveAttention" in html
    fraction = lens.observers[0].compute().effective_fraction
    for value in fraction.flatten().tolist():
        assert f">{value:.4g}</td>" in html
    assert "<script" not in html and "http" not in html


def test_a_lens_that_saw_nothing_can_be_shown():
    assert "HeadStatistics" in Lens(models.build("bert"))._repr_html_()


def test_a_capture_shows_where_it_is_from_and_its_shape(lens):
    html = lens.observers[2].compute()[0]._repr_html_()
    assert "encoder.layer.0.attention.self" in html and "19 × 19" in html


def test_displays_escape_what_they_show():
    assert "<img" not in facts_html("<img>", [("<img>", "<img onerror=alert(1)>")])
    html = heads_html("<img>", [("<img>", 0), ("b", 0)], torch.tensor([[1.0, torch.nan]] * 2))
    assert "<img" not in html and "–" in html


def test_effective_maps_have_the_layout_of_attentions(lens):
    model = models.build("bert", "eager")
    with torch.no_grad():
        expected = model(**models.inputs("bert"), output_attentions=True).attentions
    real = models.inputs("bert")["attention_mask"].bool()
    raw, effective = lens.as_attentions(raw=True), lens.as_attentions()
    assert isinstance(raw, tuple) and len(raw) == len(effective) == len(expected)
    for layer, seen in enumerate(lens.observers[1].compute()):
        assert effective[layer].shape == expected[layer].shape
        assert torch.equal(effective[layer], seen.effective)
        rows = real[:, None, :, None].expand_as(raw[layer])
        torch.testing.assert_close(raw[layer][rows], expected[layer][rows])


def test_batches_of_one_size_follow_each_other_and_others_are_refused():
    model, maps = models.build("bert"), EffectiveAttention()
    with Lens(model, maps) as lens, torch.no_grad():
        model(**models.text_inputs((9, 9)))
        model(**models.text_inputs((9,)))
    assert [tuple(layer.shape) for layer in lens.as_attentions()] == [(3, 4, 9, 9)] * 2
    with lens, torch.no_grad():
        model(**models.text_inputs((7,)))
    with pytest.raises(InputError, match="different size"):
        lens.as_attentions()
    with pytest.raises(InputError, match="stack must be one of"):
        lens.as_attentions("nowhere")
    with pytest.raises(InputError, match="given none"):
        Lens(model).as_attentions()


def test_bertviz_takes_effective_maps_as_they_are():
    from bertviz import head_view, model_view

    model, maps = models.build("bert"), EffectiveAttention()
    with Lens(model, maps) as lens, torch.no_grad():
        model(**models.text_inputs((9,)))
    tokens = [f"token{index}" for index in range(9)]
    for view in (head_view, model_view):
        html = view(lens.as_attentions(), tokens, html_action="return").data
        assert all(token in html for token in tokens)
        value = lens.as_attentions()[1][0, 3, 8, 2].item()
        assert repr(value)[:8] in html


RESULTS = (
    "HeadStatisticsResult HeadImportanceResult LabelAttentionResult HiddenTokenAttributionResult "
    "AttributionMatrices TokenSaliencyResult PassSaliency TokenIdentifiabilityResult HeadDrift "
    "Identifiability SimplexWitness SoftmaxWitness RealisabilityRank Verdict PruningCurve "
    "PruningReport AttentionMap"
).split()


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_shows_itself(kind):
    result = one_of_each()[kind]
    text, html = repr(result), result._repr_html_()
    assert text.startswith(f"{kind}(") and len(text) < 4000 and "tensor(" not in text
    assert all(f"{field.name}=" in text for field in fields(result))
    assert html.startswith("<table>") and "<script" not in html and len(html) < 20_000


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_becomes_plain_values_arrays_and_a_file(kind, tmp_path):
    result = one_of_each()[kind]
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain.keys() >= {field.name for field in fields(result)}
    arrays = result.to_numpy()
    assert arrays.keys() == result.tensors().keys()
    for name, tensor in result.tensors().items():
        np.testing.assert_array_equal(arrays[name], tensor.numpy())
        if name in plain:
            assert np.array(plain[name]).shape == arrays[name].shape
    result.save(tmp_path / "a", model="some/model")
    assert read_header(tmp_path / "a")["model"] == "some/model"
    assert_same(load(tmp_path / "a"), result)


ROWS = {  # levels of the index, rows, and a column
    "HeadStatisticsResult": ("stack layer head", 2 * 4, "entropy"),
    "HeadImportanceResult": ("stack layer head", 2 * 4, "importance"),
    "HeadDrift": ("stack layer head", 2 * 4, "raw_cosine"),
    "LabelAttentionResult": ("stack layer head", 2 * 4, "effective[odd]"),
    "HiddenTokenAttributionResult": ("stack layer label", 2, "by_label[all]"),
    "TokenSaliencyResult": ("stack layer label", 3, "norm"),
    "TokenIdentifiabilityResult": ("stack layer", 2, "neighbours[-1]"),
    "AttributionMatrices": ("layer example source target", 2 * 2 * 19 * 19, "contribution"),
    "PassSaliency": ("stack layer example token", 3 * 12 * 15, "product"),
    "AttentionMap": ("example head query key", 2 * 2 * 19 * 19, "effective"),
    "Identifiability": ("example head", 2 * 4, "nullity"),
    "SimplexWitness": ("example head", 2 * 4, "total_variation[18]"),
    "SoftmaxWitness": ("example head", 2 * 4, "distance"),
    "RealisabilityRank": ("example head", 2 * 4, "rank"),
    "PruningCurve": ("score run seed fraction", 3, "value"),
    "PruningReport": ("", 2, "parameters"),
    "Verdict": ("", 2, "context_error"),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_turns_into_a_table(kind):
    table = one_of_each()[kind].to_pandas()
    levels, rows, column = ROWS[kind]
    assert [name for name in table.index.names if name] == levels.split()
    assert len(table) == rows and column in table and table.index.is_unique


def test_tables_hold_the_numbers_of_their_places():
    maps, saliency = one_of_each()["AttentionMap"], one_of_each()["PassSaliency"]
    assert maps.to_pandas().loc[(1, 3, 4, 5), "raw"] == maps.raw[1, 1, 4, 5].item()
    assert maps.to_pandas()["mask"].sum() == 2 * maps.mask.sum()  # of two heads
    table = saliency.to_pandas()
    assert table.loc[(*saliency.layers[2], 7, 3), "norm"] == saliency.norm[2][7, 3].item()
    matrices = one_of_each()["AttributionMatrices"]
    row = matrices.to_pandas().loc[(1, 0, 2, 5)]
    assert row["contribution"] == matrices.contribution[1, 0, 2, 5].item()
    curve = one_of_each()["PruningCurve"].to_pandas()
    assert curve.loc[("rising", 0, 0, 0.5), "heads"] == 4


def test_attention_to_labels_keeps_their_names():
    result = one_of_each()["LabelAttentionResult"]
    html = result._repr_html_()
    assert "effective: even" in html and "effective: odd" in html
    for value in result.effective.flatten().tolist():
        assert f">{value:.4g}</td>" in html
    table = result.to_pandas()
    row = table.loc[(*result.layers[1], 3)]
    assert row["raw[odd]"] == result.raw[1, 3, 1].item()
    assert row["examples"] == result.examples[1, 3].item()


def test_meanings_are_of_fields_of_their_class():
    for result in one_of_each().values():
        names = {field.name for field in fields(result)}
        for told in ("meanings", "ends"):
            assert set(vars(type(result)).get(told, {})) <= names
        for told in ("axes", "ends"):
            assert set(getattr(result, told, {}).values()) - {""} <= names
    statistics = one_of_each()["HeadStatisticsResult"]
    assert statistics.meanings.keys() == statistics.tensors().keys()


def test_results_turn_into_tables(lens):
    result = lens.observers[0].compute()
    table = result.to_pandas()
    assert len(table) == 2 * 4 and list(table.columns) == list(result.tensors())
    stack = result.layers[1][0]
    assert table.loc[(stack, 1, 2), "entropy"] == result.entropy[1, 2].item()
    attribution = lens.observers[3].compute()
    assert "<th>all</th>" in attribution._repr_html_()
    table = attribution.to_pandas()
    row = table.loc[(attribution.layers[1][0], 1, "all")]
    assert row["own"] == attribution.own[1, 0].item()
    assert row["distance[2]"] == attribution.distance[1, 0, 2].item()


def test_a_table_of_saliency_is_by_label():
    model, saliency = models.build("bert"), TokenSaliency(label_names=("all", "none"))
    with Lens(model, saliency):
        model(**models.inputs("bert")).last_hidden_state.sum().backward()
    result = saliency.compute()
    table = result.to_pandas()
    assert list(table.columns) == ["tokens", "skipped", "norm", "product", "magnitude"]
    assert table.loc[(*result.layers[0], "all"), "norm"] == result.norm[0, 0].item()


def test_tables_of_importance_drift_and_identifiability():
    model, importance = models.build("bert"), HeadImportance()
    collector = TokenIdentifiability("naive", neighbours=1, label_names=("all",))
    with Lens(model, importance, collector):
        for seed in range(8):
            batch = models.text_inputs(tuple(range(4, 16)), seed)
            model(**batch).last_hidden_state.square().sum().backward()
    result = importance.compute()
    row = result.to_pandas().loc[(*result.layers[1], 2)]
    assert row["importance"] == result.importance[1, 2].item() and row["seen"] == 96
    drift = compare(model, model, models.inputs("bert"))
    assert drift.to_pandas().shape == (8, 5) and "before" not in drift.to_pandas()
    rates = collector.compute()
    for shown, title, value in (
        (result, "importance", result.importance[0, 0]),
        (drift, "effective cosine", drift.effective_cosine[0, 0]),
        (rates, "rate", rates.rate[0]),
    ):
        assert f"<b>{title}</b>" in shown._repr_html_() and f">{value:.4g}<" in shown._repr_html_()
    table = rates.to_pandas()
    assert table.index.tolist() == list(rates.layers)
    assert table["rate"].tolist() == rates.rate.tolist()
    assert table["neighbours[1]"].tolist() == rates.neighbours[:, 1].tolist()
    assert np.isnan(table["loss"]).all() and list(table)[-2:] == ["neighbours[-1]", "neighbours[1]"]
