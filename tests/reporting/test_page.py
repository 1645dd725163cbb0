"""What goes into a report, read from its data."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import attnlens
from attnlens import (
    EffectiveAttention,
    HeadImportance,
    HeadStatistics,
    HiddenTokenAttribution,
    Lens,
    TokenIdentifiability,
)
from attnlens.attention.maps import AttentionMap
from attnlens.errors import InputError
from attnlens.recovery import MapTraining
from attnlens.reporting.examples import Wanted, maps_by_example
from attnlens.reporting.fitting import BITS, Detail, MapBlocks, notes_on
from attnlens.reporting.page import without_folders
from attnlens.reporting.quantising import packed, unit_of
from attnlens.results import LayeredResult
from tests.support import models
from tests.support.results import one_of_each


@pytest.fixture(scope="module")
def seen():
    model = models.build("bert")
    with Lens(model, HeadStatistics(), EffectiveAttention()) as lens, torch.no_grad():
        model(**models.inputs("bert"))
    return lens


def content(report):
    found = re.search(r'id="content">(.*?)</script>', report.html, re.DOTALL)
    return json.loads(found[1])


def unpacked(text, unit, bits):
    """Unpack as the page does."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    planes = planes.reshape((bits + 7) // 8, -1).astype(np.int64)
    folded = sum(plane << 8 * place for place, plane in enumerate(planes))
    whole = np.where(folded % 2, -(folded + 1) // 2, folded // 2)
    return np.where(folded == 2**bits - 1, np.nan, whole * unit)


def planes_of(block, place):
    """Raw attention and its null component, as one head's map in a page has them."""
    entry = block["maps"][place]
    numbers = unpacked(entry["packed"], entry["unit"], block["bits"])
    return numbers.reshape(2, block["rows"], block["columns"]), entry["unit"] / 2


def test_the_page_holds_the_maps_of_real_tokens(seen):
    found = content(attnlens.report(seen))
    assert len(found["maps"]) == 2 * 2 and not found["notes"]
    for block in found["maps"]:
        size = models.LENGTHS[block["example"]]
        kept = seen.observers[1].compute()[block["layer"]]
        real = (block["example"], slice(None), slice(size), slice(size))
        raw, effective = kept.raw[real].double(), kept.effective[real].double()
        assert block["heads"] == [0, 1, 2, 3] and (block["rows"], block["columns"]) == (size, size)
        assert block["bits"] == 24 and block["kind"] == "encoder" and block["first"] == 0
        for head, entry in enumerate(block["maps"]):
            (one, null), error = planes_of(block, head)
            assert np.abs(one - raw[head].numpy()).max() <= error * (1 + 1e-6)
            assert np.abs(null - (raw - effective)[head].numpy()).max() <= error * (1 + 1e-6)
            assert error <= raw[head].max().item() * 2**-23
            share = (effective[head].square().sum() / raw[head].square().sum()).item()
            assert entry["fraction"] == pytest.approx(share, rel=1e-5)
            entropy = -(raw[head] * raw[head].log()).sum(-1).mean().item()
            assert entry["entropy"] == pytest.approx(entropy, rel=1e-5)
            norms = kept.value_norm[block["example"], head, 0, :size]
            assert entry["norms"] == pytest.approx(norms.tolist(), rel=1e-3)


@given(
    arrays(
        np.float64,
        st.integers(0, 40),
        elements=st.floats(-1, 1) | st.sampled_from([np.nan, np.inf, -np.inf, 0.5, -0.0, 1e-300]),
    ),
    st.sampled_from((*BITS, 32)),
    st.floats(1e-3, 1e3),
)
def test_numbers_are_right_to_half_a_unit(values, bits, largest):
    unit = unit_of(largest, bits)
    found = unpacked(packed(torch.from_numpy(values * largest), unit, bits), unit, bits)
    finite = np.isfinite(values)
    assert np.isnan(found[~finite]).all()
    assert (np.abs(found - values * largest)[finite] <= unit / 2 * (1 + 1e-6)).all()


def test_a_map_of_zeros_is_zero():
    unit = unit_of(0.0, 8)
    assert unpacked(packed(torch.zeros(3), unit, 8), unit, 8).tolist() == [0, 0, 0]


def random_maps(examples=6, layers=4, heads=8, size=60):
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(1, 1, size, size, dtype=torch.bool)
    for layer in range(layers):
        for _ in range(examples):
            raw = (2 * torch.randn(1, heads, size, size, generator=generator)).softmax(-1)
            noise = torch.randn(raw.shape, generator=generator) * (layer + 1) / 100
            yield AttentionMap("s", layer, tuple(range(heads)), raw, raw + noise, mask)


@pytest.fixture(scope="module")
def many():
    return list(random_maps())


@pytest.mark.parametrize(
    ("kilobytes", "bits", "tokens", "heads", "examples"),
    [
        (6_000, 24, 128, 8, 6),
        (3_000, range(12, 20), 128, 8, 6),
        (800, 8, range(33, 60), 8, 6),
        (300, 8, 32, range(1, 8), 6),
        (30, 8, 32, 1, range(1, 6)),
        (0, 8, 32, 1, 0),
    ],
)
def test_what_does_not_fit_is_left_out_in_order(many, kilobytes, bits, tokens, heads, examples):
    blocks = MapBlocks(maps_by_example(many, Wanted()))
    detail, packs = blocks.fitted(128, 1000 * kilobytes)
    assert sum(len(json.dumps(pack)) for pack in packs if pack) <= 1000 * kilobytes
    for found, expected in (
        (detail.bits, bits),
        (detail.tokens, tokens),
        (detail.heads, heads),
        (detail.examples, examples),
    ):
        assert found in expected if isinstance(expected, range) else found == expected
    notes = " ".join(notes_on(detail, blocks, 128, [60] * 6))
    assert (f"rounded to {detail.bits} bits" in notes) == (detail.bits < 24)
    assert ("more than" in notes) == (detail.tokens < 60)
    assert ("heads per layer" in notes) == (0 < detail.examples and detail.heads < 8)
    assert ("of 6 examples are in the file" in notes) == (detail.examples < 6)
    assert ("--layers, --heads" in notes) == (detail.tokens < 60)


HOSTILE = ["</script><script>1</script>", "<!--", "{{ 7 * 7 }}", "{% raw %}", "'\"&\u2028\u2029"]


def test_nothing_from_outside_is_markup_or_template(seen):
    model = "{{content}}{{ 7 * 7 }}</title><script>1</script>"
    tokens = [(HOSTILE * 4)[:19], (HOSTILE * 2)[:6]]
    report = attnlens.report(seen, tokens=tokens, model=model, settings={"a": HOSTILE})
    assert report.html.count("<script") == report.html.count("</script>") == 2
    title = re.search(r"<title>(.*?)</title>", report.html)[1]
    assert html.unescape(title) == f"attnlens · {model}" and "<" not in title
    found = re.search(r'id="content">(.*?)</script>', report.html, re.DOTALL)[1]
    assert not set(found) & set("<>&'\u2028\u2029")
    assert json.loads(found)["model"] == model and json.loads(found)["settings"] == {"a": HOSTILE}
    assert [example["tokens"] for example in json.loads(found)["examples"]] == tokens


def test_only_the_scripts_of_the_page_may_run(seen):
    page = attnlens.report(seen).html
    *_, behaviour = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    allowed = f"'sha256-{base64.b64encode(sha256(behaviour.encode()).digest()).decode()}'"
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)[1].split("; ")
    assert policy[:2] == ["default-src 'none'", f"script-src {allowed}"]


def test_long_tokens_leave_less_room_for_maps(many):
    tokens = [["<" * 500] * 60] * 6  # six bytes for each letter
    report = attnlens.report(many, tokens=tokens, max_bytes=5_000_000)
    assert 4_000_000 < len(report.html.encode()) <= 5_000_000
    assert content(report)["maps"] and "bits" in report.notes[0]


def test_heads_that_lose_most_stay(many):
    maps = [replace(entry, effective=entry.raw.clone()) for entry in many]
    for entry in maps:
        entry.effective[:, 5] *= 0.5
        entry.effective[:, 2] *= 0.7
    blocks = MapBlocks(maps_by_example(maps, Wanted()))
    assert blocks.heads_of(blocks.maps[0], Detail(8, 32, 2, 6)) == [2, 5]


def test_a_page_keeps_its_bound_and_says_what_it_left_out(seen, many):
    small = len(attnlens.report(seen).html.encode())
    report = attnlens.report(many, max_bytes=small + 1_000_000)
    assert small + 500_000 < len(report.html.encode()) <= small + 1_000_000
    assert content(report)["notes"] == list(report.notes) and "bits" in report.notes[0]
    with pytest.raises(InputError, match="above max_bytes"):
        attnlens.report(seen, max_bytes=1_000)


def test_long_examples_are_shown_through_a_window(seen):
    report = attnlens.report(seen, max_tokens=7, layers=[1], heads=[2])
    found = content(report)
    assert [len(example["tokens"]) for example in found["examples"]] == [7, 6]
    assert [(b["layer"], b["heads"], b["rows"]) for b in found["maps"]] == [
        (1, [2], 7),
        (1, [2], 6),
    ]
    assert "more than 7 tokens" in report.notes[0] and "--max-tokens" in report.notes[0]
    maps = seen.observers[1].compute()[1]
    (one, _), error = planes_of(found["maps"][0], 0)
    assert np.abs(one - maps.raw[0, 2, :7, :7].numpy()).max() <= error * (1 + 1e-6)


def test_maps_of_the_first_tokens_alone_are_taken_as_such(seen):
    whole = seen.observers[1].compute()
    cut = [
        replace(
            entry,
            raw=entry.raw[..., :9, :9],
            effective=entry.effective[..., :9, :9],
            value_norm=entry.value_norm[..., :9],
        )
        for entry in whole
    ]
    expected, found = (content(attnlens.report(maps, max_tokens=9)) for maps in (whole, cut))
    assert found == expected and found["examples"][0]["length"] == 19


def test_maps_that_were_not_kept_are_asked_for_in_vain(seen):
    with pytest.raises(InputError, match="heads must be some of 0, 1, 2, 3"):
        attnlens.report(seen, heads=[4])
    with pytest.raises(InputError, match="layers must be some of 0, 1"):
        attnlens.report(seen, layers=[-1])


def test_importance_and_attribution_have_their_places():
    model = models.build("bert")
    statistics, importance = HeadStatistics(), HeadImportance()
    attribution = HiddenTokenAttribution(2, keep="matrices")
    with Lens(model, statistics, importance) as lens:
        model(**models.inputs("bert")).last_hidden_state.square().sum().backward()
    with Lens(model, attribution), torch.no_grad():
        model(**models.inputs("bert"))
    found = content(attnlens.report([lens, attribution]))
    names = [grid["name"] for grid in found["grids"]]
    assert names[:4] == ["effective fraction", "rank", "entropy", "importance"]
    assert "examples, head importance" in names
    assert found["curves"][0]["name"] == "Hidden token attribution: own"
    block = found["attribution"][1]
    shares = attribution.matrices[0].contribution[:, 1, :6, :6]
    error = np.abs(unpacked(block["packed"], 1e-4, 32) - shares.double().numpy().ravel()).max()
    assert error <= 5e-5 * (1 + 1e-6)
    assert block["sources"] == block["targets"] == list(range(6))


def test_drift_shows_grids(seen):
    drift = attnlens.compare(models.build("bert"), models.build("bert"), models.inputs("bert"))
    found = content(attnlens.report(drift))
    assert [grid["name"] for grid in found["grids"]][1:3] == ["raw cosine", "effective cosine"]
    assert found["grids"][1]["values"] == [[1.0] * 4] * 2


def test_token_identifiability_is_a_curve_for_each_map():
    model = models.build("bert")
    training = MapTraining(max_epochs=1, width=8)
    collector = TokenIdentifiability(
        "linear", label_names=("even", "odd"), neighbours=1, training=training
    )
    with Lens(model, collector), torch.no_grad():
        for seed in range(8):
            batch = models.text_inputs(tuple(range(4, 16)), seed)
            collector.labels = batch["input_ids"] % 2
            model(**batch)
    results = [collector.using(kind).compute() for kind in ("naive", "linear")]
    curves = content(attnlens.report(results))["curves"]
    assert curves[0]["labels"] == [
        "naive, cosine",
        "linear, cosine",
        "control: position alone",
        "control: chance",
    ]
    assert curves[0]["values"][1] == pytest.approx(results[1].rate.tolist(), rel=1e-5)
    assert curves[0]["values"][3] == pytest.approx([results[0].chance.item()] * 2, rel=1e-5)
    by_name = {curve["name"]: curve for curve in curves}
    assert by_name["Neighbours identified, linear"]["labels"] == ["−1", "+1"]
    labelled = by_name["Tokens identified by label, linear"]
    assert labelled["values"][1] == pytest.approx(results[1].by_label[:, 1].tolist(), rel=1e-5)


def test_attention_to_labels_is_a_line_for_each_label():
    result = one_of_each()["LabelAttentionResult"]
    page = content(attnlens.report(result))
    curves = {curve["name"]: curve for curve in page["curves"]}
    effective = curves["Label attention: effective"]
    assert effective["labels"] == ["even", "odd"] and "output can see" in effective["meaning"]
    for line, values in zip(effective["values"], result.effective.mean(1).T, strict=True):
        assert line == pytest.approx(values.tolist(), rel=1e-5)
    assert page["grids"] == []


def test_tokens_that_do_not_fit_are_refused(seen):
    with pytest.raises(InputError, match="19 real tokens"):
        attnlens.report(seen, tokens=[["a"] * 3, ["b"] * 6])
    with pytest.raises(InputError, match="nothing to show"):
        attnlens.report([])
    with pytest.raises(InputError, match="no view of float, str"):
        attnlens.report([seen, 1.0, "a"])


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ("/home/me/model", "model"),
        ("C:\\Users\\me\\text.txt", "text.txt"),
        ("~/model", "model"),
        ("org/model", "org/model"),
        ({"a": ["/x/y"]}, {"a": ["y"]}),
    ],
)
def test_folders_stay_on_the_machine(entry, shown):
    assert without_folders(entry) == shown


def test_a_lens_and_a_capture_show_themselves(seen):
    tokens = [[f"a{i}" for i in range(19)], [f"b{i}" for i in range(6)]]
    page = seen.show(example=1, tokens=tokens)
    found = content(page)
    assert {block["example"] for block in found["maps"]} == {1} and found["model"] == "BertModel"
    assert [example["tokens"] for example in found["examples"]] == [[], tokens[1]]
    with pytest.raises(InputError, match=r"No maps of example 2 .* 0, 1 were"):
        seen.show(example=2)
    capture = attnlens.record(models.build("bert"), **models.inputs("bert"))[1]
    alone = content(capture.show(tokens=tokens))
    assert alone["layers"] == ["1"] and alone["grids"][0]["examples"] == 2
    whole = [block["maps"] for block in content(seen.show())["maps"] if block["layer"] == 1]
    assert [block["maps"] for block in alone["maps"]] == whole


def test_a_lens_without_maps_says_how_to_keep_them():
    model = models.build("bert")
    with Lens(model) as lens, torch.no_grad():
        model(**models.inputs("bert"))
    assert content(lens.show())["maps"] == []
    with pytest.raises(InputError, match=r"Use EffectiveAttention\(\)"):
        lens.show(example=0)


def test_in_a_notebook_the_page_is_in_a_frame_of_its_own(seen):
    page = seen.show()
    frame = page._repr_html_()
    source = re.search(r'srcdoc="([^"]*)"', frame)[1]
    assert html.unescape(source) == page.html
    assert 'sandbox="allow-scripts allow-downloads"' in frame and "<script" not in frame


def test_decoder_cross_and_encoder_attention_have_the_tokens_of_their_axes():
    model = models.build("bart")
    maps = EffectiveAttention()
    with Lens(model, maps, kinds={"encoder", "decoder", "cross"}), torch.no_grad():
        model(**models.inputs("bart"))
    tokens = [[f"a{i}" for i in range(19)], [f"b{i}" for i in range(6)]]
    targets = [[f"c{i}" for i in range(7)]] * 2
    found = content(attnlens.report(maps, tokens=tokens, targets=targets))
    assert [example["tokens"] for example in found["examples"]] == tokens
    assert [example["targets"] for example in found["examples"]] == targets
    sizes = {
        (block["kind"], block["example"]): (block["rows"], block["columns"])
        for block in found["maps"]
    }
    assert sizes == {
        ("encoder", 0): (19, 19), ("encoder", 1): (6, 6), ("decoder", 0): (7, 7),
        ("decoder", 1): (7, 7), ("cross", 0): (7, 19), ("cross", 1): (7, 6),
    }  # fmt: skip
    with pytest.raises(InputError, match="Got 3 targets"):
        attnlens.report(maps, tokens=tokens, targets=[["c"] * 3] * 2)


def gpt2():
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=96)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def test_steps_of_a_generation_are_one_map():
    model, maps, whole = gpt2(), EffectiveAttention(), EffectiveAttention()
    prompt = torch.tensor([[5, 6, 7, 8]])
    with Lens(model, maps, kinds={"decoder"}), torch.no_grad():
        written = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
        maps_of_two = len(maps.compute())
    assert maps_of_two == 2 * 5
    with Lens(model, whole, kinds={"decoder"}), torch.no_grad():
        model(written[:, :-1])
    tokens = [[str(i) for i in written[0].tolist()]]
    found = content(attnlens.report(maps, tokens=[tokens[0][:-1]]))
    assert found["examples"][0]["steps"] == [3, 4, 5, 6, 7]
    assert [(block["rows"], block["columns"], block["first"]) for block in found["maps"]] == [
        (8, 8, 0)
    ] * 2
    for block, kept in zip(found["maps"], whole.compute(), strict=True):
        for head in range(2):
            (raw, null), error = planes_of(block, head)
            assert raw == pytest.approx(kept.raw[0, head].numpy(), abs=error + 1e-6)
            expected = (kept.raw - kept.effective)[0, head].numpy()
            assert null == pytest.approx(expected, abs=error + 1e-5)


def test_a_second_generation_is_a_second_example():
    model, maps = gpt2(), EffectiveAttention()
    with Lens(model, maps, kinds={"decoder"}), torch.no_grad():
        for prompt in ([5, 6, 7], [9, 10, 11]):
            model.generate(torch.tensor([prompt]), max_new_tokens=2, pad_token_id=0)
    found = content(attnlens.report(maps))
    assert [block["example"] for block in found["maps"]] == [0, 0, 1, 1]
    assert [example["steps"] for example in found["examples"]] == [[2, 3]] * 2


def test_an_encoder_and_a_decoder_that_generates_are_one_example():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=96, decoder_start_token_id=0, **sizes)
    model, maps = T5ForConditionalGeneration(config).eval(), EffectiveAttention()
    batch = models.text_inputs((7, 5))
    with Lens(model, maps, kinds={"encoder", "decoder", "cross"}), torch.no_grad():
        answer = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    targets = [[str(i) for i in row] for row in answer[:, :-1].tolist()]
    found = content(attnlens.report(maps, targets=targets))
    assert [example["targets"] for example in found["examples"]] == targets
    assert [example["steps"] for example in found["examples"]] == [[0, 1, 2, 3]] * 2
    sizes = {
        (block["kind"], block["example"]): (block["rows"], block["columns"])
        for block in found["maps"]
    }
    assert len(found["maps"]) == 3 * 2 * 2 and sizes == {
        ("encoder", 0): (7, 7), ("encoder", 1): (5, 5), ("decoder", 0): (4, 4),
        ("decoder", 1): (4, 4), ("cross", 0): (4, 7), ("cross", 1): (4, 5),
    }  # fmt: skip
    (cut, *_) = content(attnlens.report(maps, max_tokens=2))["examples"]
    assert cut["steps"] == [0, 1] and len(cut["targets"]) == len(cut["tokens"]) == 2


def test_steps_of_a_padded_prompt_are_counted_without_its_padding():
    model, maps = gpt2(), EffectiveAttention()
    prompt = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with Lens(model, maps, kinds={"decoder"}), torch.no_grad():
        model.generate(prompt, attention_mask=mask, max_new_tokens=3, pad_token_id=0)
    found = content(attnlens.report(maps))
    assert [example["steps"] for example in found["examples"]] == [[3, 4, 5], [1, 2, 3]]
    assert [block["rows"] for block in found["maps"]] == [6, 4, 6, 4]


def test_segments_and_pictures_join_the_tokens():
    model, maps = models.build("vit"), EffectiveAttention()
    with Lens(model, maps), torch.no_grad():
        model(**models.inputs("vit"))
    picture = np.linspace(0, 1, 16 * 16 * 3).reshape(16, 16, 3)
    found = content(attnlens.report(maps, pictures=[picture, picture]))
    example = found["examples"][0]
    assert {**example["picture"], "source": ""} == {
        "source": "", "rows": 4, "columns": 4, "first": 1,
    }  # fmt: skip
    assert example["tokens"][:3] == ["[CLS]", "row 1, column 1", "row 1, column 2"]
    assert example["picture"]["source"].startswith("data:image/png;base64,")
    found = content(attnlens.report(maps, segments=[[0] * 9 + [1] * 8] * 2))
    assert found["examples"][1]["segments"] == [0] * 9 + [1] * 8
    with pytest.raises(InputError, match="Got 2 segments"):
        attnlens.report(maps, segments=[[0, 1]] * 2)
    with pytest.raises(InputError, match=r"arrays \[height, width, 3\]. Got \[16, 16\]"):
        attnlens.report(maps, pictures=[picture[..., 0]] * 2)


def test_maps_that_are_not_finite_have_no_numbers():
    raw = torch.full((1, 1, 3, 3), 1 / 3)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    entry = AttentionMap("s", 0, (0,), raw, torch.full_like(raw, torch.nan), mask)
    (block,) = content(attnlens.report([entry]))["maps"]
    (one, null), error = planes_of(block, 0)
    assert one == pytest.approx(1 / 3, abs=error) and np.isnan(null).all()
    assert block["maps"][0]["fraction"] is None and "norms" not in block["maps"][0]


def test_the_simplest_distribution_is_a_third_plane():
    model, maps = models.build("bert"), EffectiveAttention(minimal=True)
    with Lens(model, maps), torch.no_grad():
        model(**models.inputs("bert"))
    for block in content(attnlens.report(maps))["maps"]:
        size = models.LENGTHS[block["example"]]
        kept = maps.compute()[block["layer"]].minimal[block["example"], :, :size, :size]
        assert kept.sum(-1) == pytest.approx(torch.ones(4, size).numpy(), abs=1e-5)
        for head, entry in enumerate(block["maps"]):
            numbers = unpacked(entry["packed"], entry["unit"], block["bits"]).reshape(3, size, size)
            assert numbers[2] == pytest.approx(kept[head].numpy(), abs=entry["unit"])


def test_every_quantity_of_heads_is_a_grid():
    results = [result for result in one_of_each().values() if isinstance(result, LayeredResult)]
    assert len(results) > 12
    for result in results:
        page = content(attnlens.report(result))
        of_heads = "head" in result.axes and not hasattr(result, "labels")
        expected = {
            name.replace("_", " "): values.double()
            for name, values in result.tensors().items()
            if of_heads and values.dim() == 2
        }
        assert {grid["name"] for grid in page["grids"]} == expected.keys()
        for grid in page["grids"]:
            values = expected[grid["name"]]
            rows = [[np.nan if value is None else value for value in row] for row in grid["values"]]
            finite = torch.where(values.isfinite(), values, torch.nan).numpy()
            assert np.array(rows) == pytest.approx(finite, rel=1e-5, nan_ok=True)
        assert page["grids"] or page["curves"]
