"""What goes into a report, read from its data."""

from __future__ import annotations

import base64
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attnlens
from attnlens import EffectiveAttention, HeadStatistics, InputError, Lens
from attnlens.report.page import without_folders
from tests import models


@pytest.fixture(scope="module")
def seen():
    model = models.build("bert")
    with Lens(model, HeadStatistics(), EffectiveAttention()) as lens, torch.no_grad():
        model(**models.inputs("bert"))
    return lens


def content(report):
    found = re.search(r'id="content">(.*?)</script>', report.html, re.DOTALL)
    return json.loads(found[1])


def test_the_page_holds_the_maps_of_real_tokens(seen):
    found = content(attnlens.report(seen))
    assert len(found["maps"]["entries"]) == 2 * 4 * 2 and not found["notes"]
    for entry in found["maps"]["entries"]:
        size = models.LENGTHS[entry["example"]]
        expected = seen.observers[1].compute()[entry["layer"]].effective
        values = np.frombuffer(base64.b64decode(entry["effective"]), "<f4").reshape(size, size)
        place = (entry["example"], entry["head"])
        np.testing.assert_array_equal(values, expected[place][:size, :size])


def test_a_page_keeps_its_bound_and_says_what_it_left_out(seen):
    whole = len(attnlens.report(seen).html.encode())
    report = attnlens.report(seen, max_bytes=whole - 30_000 + 100_000)
    assert len(report.html.encode()) <= whole + 70_000
    assert any("half precision" in note for note in report.notes)
    with pytest.raises(InputError, match="above max_bytes"):
        attnlens.report(seen, max_bytes=1_000)


def test_long_examples_are_shown_through_a_window(seen):
    report = attnlens.report(seen, max_tokens=7, layers=[1], heads=[2])
    found = content(report)
    assert [len(example["tokens"]) for example in found["examples"]] == [7, 6]
    assert [(e["layer"], e["head"], e["rows"]) for e in found["maps"]["entries"]] == [
        (1, 2, 7),
        (1, 2, 6),
    ]
    assert "more than 7 tokens" in report.notes[0]


def test_other_results_come_as_grids_and_curves(seen):
    layers = seen.observers[0].compute().layers
    importance = SimpleNamespace(layers=layers, tensors=lambda: {"importance": torch.eye(2, 4)})
    rates = SimpleNamespace(
        layers=layers, labels=("naive",), tensors=lambda: {"rate": torch.ones(2, 1)}
    )
    found = content(attnlens.report([seen, importance, rates]))
    names = [grid["name"] for grid in found["grids"]]
    assert names[:4] == ["effective fraction", "rank", "entropy", "importance"]
    assert found["curves"][0]["values"] == [[1.0, 1.0]]


def test_tokens_that_do_not_fit_are_refused(seen):
    with pytest.raises(InputError, match="19 real tokens"):
        attnlens.report(seen, tokens=[["a"] * 3, ["b"] * 6])
    with pytest.raises(InputError, match="nothing to show"):
        attnlens.report([])


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
