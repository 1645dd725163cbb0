"""What goes into a report, read from its data."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from dataclasses import replace
from decimal import Decimal
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

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
from attnlens.reporting.examples import maps_by_example
from attnlens.reporting.fitting import DECIMALS, Detail, MapBlocks, notes_on
from attnlens.reporting.fixed_point import packed, whole
from attnlens.reporting.page import without_folders
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


def integers(text):
    """Unpack as the page does."""
    planes = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8)
    folded = planes.reshape(4, -1).T.copy().view("<u4")[:, 0].astype(np.int64)
    return np.where(folded % 2, -(folded + 1) // 2, folded // 2)


def shown(values, decimals):
    """Round one by one, by writing them out."""
    flat = values.double().flatten().tolist()
    return [int(Decimal(f"{value:.{decimals}f}").scaleb(decimals)) for value in flat]


def test_the_page_holds_the_maps_of_real_tokens(seen):
    found = content(attnlens.report(seen))
    assert len(found["maps"]) == 2 * 2 and not found["notes"] and found["decimals"] == 6
    for block in found["maps"]:
        size = models.LENGTHS[block["example"]]
        maps = seen.observers[1].compute()[block["layer"]]
        raw, effective = (
            m[block["example"], :, :size, :size].double() for m in (maps.raw, maps.effective)
        )
        assert block["heads"] == [0, 1, 2, 3] and (block["rows"], block["columns"]) == (size, size)
        one, two, carry = integers(block["packed"]).reshape(3, -1)
        assert one.tolist() == shown(raw, 6) and two.tolist() == shown(effective, 6)
        assert (one - two + carry).tolist() == shown(raw - effective, 6)


@given(
    arrays(
        np.float64,
        st.integers(1, 40),
        elements=st.floats(-2000, 2000) | st.sampled_from([np.nan, np.inf, 0.5, 0.0078125, 1e300]),
    ),
    st.sampled_from(DECIMALS),
)
def test_integers_are_what_would_be_written_out(values, decimals):
    numbers = whole(torch.from_numpy(values), decimals)
    assert integers(packed([numbers])).tolist() == numbers.tolist()
    for value, number in zip(values, numbers.tolist(), strict=True):
        if np.isfinite(value) and abs(value) < 2000:
            assert number == int(Decimal(f"{value:.{decimals}f}").scaleb(decimals))
        elif not np.isfinite(value) or abs(value) > 1e9:
            assert number == -(2**31)


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
    ("kilobytes", "decimals", "tokens", "heads", "examples"),
    [
        (6_000, 6, 128, 8, 6),
        (3_000, 4, 128, 8, 6),
        (1_300, 3, range(33, 60), 8, 6),
        (300, 3, 32, range(1, 8), 6),
        (30, 3, 32, 1, range(1, 6)),
        (0, 3, 32, 1, 0),
    ],
)
def test_what_does_not_fit_is_left_out_in_order(many, kilobytes, decimals, tokens, heads, examples):
    blocks = MapBlocks(maps_by_example(many, None, None))
    detail, texts = blocks.fitted(128, 1000 * kilobytes)
    assert sum(map(len, texts)) <= 1000 * kilobytes
    assert detail.decimals == decimals
    for found, expected in (
        (detail.tokens, tokens),
        (detail.heads, heads),
        (detail.examples, examples),
    ):
        assert found in expected if isinstance(expected, range) else found == expected
    notes = " ".join(notes_on(detail, blocks, 128, [60] * 6))
    assert ("rounded to" in notes) == (decimals < 6)
    assert ("more than" in notes) == (detail.tokens < 60)
    assert ("heads per layer" in notes) == (0 < detail.examples and detail.heads < 8)
    assert ("of 6 examples are in the file" in notes) == (detail.examples < 6)
    assert ("--layers, --heads" in notes) == (detail.tokens < 60)


HOSTILE = ["</script><script>1</script>", "<!--", "{{ 7 * 7 }}", "{% raw %}", "'\"&\u2028\u2029"]


def test_nothing_from_outside_is_markup_or_template(seen):
    model = "{{content}}{{ 7 * 7 }}</title><script>1</script>"
    tokens = [(HOSTILE * 4)[:19], (HOSTILE * 2)[:6]]
    report = attnlens.report(seen, tokens=tokens, model=model, settings={"a": HOSTILE})
    assert report.html.count("<script") == report.html.count("</script>") == 3
    title = re.search(r"<title>(.*?)</title>", report.html)[1]
    assert html.unescape(title) == f"attnlens · {model}" and "<" not in title
    found = re.search(r'id="content">(.*?)</script>', report.html, re.DOTALL)[1]
    assert not set(found) & set("<>&'\u2028\u2029")
    assert json.loads(found)["model"] == model and json.loads(found)["settings"] == {"a": HOSTILE}
    assert [example["tokens"] for example in json.loads(found)["examples"]] == tokens


def test_only_the_scripts_of_the_page_may_run(seen):
    page = attnlens.report(seen).html
    *_, packed_library, behaviour = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    scripts = [gzip.decompress(base64.b64decode(packed_library)), behaviour.encode()]
    allowed = [
        f"'sha256-{base64.b64encode(sha256(script).digest()).decode()}'" for script in scripts
    ]
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)[1].split("; ")
    assert policy[0] == "default-src 'none'" and policy[1] == f"script-src {' '.join(allowed)}"


def test_long_tokens_leave_less_room_for_maps(many):
    tokens = [["<" * 500] * 60] * 6  # six bytes for each letter
    report = attnlens.report(many, tokens=tokens, max_bytes=5_000_000)
    assert 4_000_000 < len(report.html.encode()) <= 5_000_000
    assert content(report)["maps"] and "decimals" in report.notes[0]


def test_heads_that_lose_most_stay(many):
    maps = [replace(entry, effective=entry.raw.clone()) for entry in many]
    for entry in maps:
        entry.effective[:, 5] *= 0.5
        entry.effective[:, 2] *= 0.7
    blocks = MapBlocks(maps_by_example(maps, None, None))
    assert blocks.heads_of(blocks.maps[0], Detail(3, 32, 2, 6)) == [2, 5]


def test_a_page_keeps_its_bound_and_says_what_it_left_out(seen, many):
    small = len(attnlens.report(seen).html.encode())
    report = attnlens.report(many, max_bytes=small + 1_000_000)
    assert small + 500_000 < len(report.html.encode()) <= small + 1_000_000
    assert content(report)["notes"] == list(report.notes) and "decimals" in report.notes[0]
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
    one = integers(found["maps"][0]["packed"]).reshape(3, -1)[0]
    assert one.tolist() == shown(maps.raw[0, 2, :7, :7], 6)


def test_maps_of_the_first_tokens_alone_are_taken_as_such(seen):
    whole = seen.observers[1].compute()
    cut = [replace(m, raw=m.raw[..., :9, :9], effective=m.effective[..., :9, :9]) for m in whole]
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
    assert "examples, HeadImportance" in names
    assert found["curves"][0]["name"] == "HiddenTokenAttribution: own"
    block = found["attribution"][1]
    shares = attribution.matrices[0].contribution[:, 1, :6, :6]
    assert integers(block["packed"]).tolist() == shown(shares, 4)
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
    effective = curves["LabelAttention: effective"]
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
