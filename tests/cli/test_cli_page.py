"""`attnlens report --html`, from texts to what the file holds."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner

from attnlens.cli.commands import app
from attnlens.demo import model_folder

WORDS = "river stone paper window garden letter engine winter candle market bridge teacher".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with the tokenizer of the packaged one, and texts of two to ten words."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("page")
    config = BertConfig(
        vocab_size=30522,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=20,
        initializer_range=0.3,
    )
    BertModel(config).save_pretrained(root / "tiny")
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(root / "tiny")
    generator = torch.Generator().manual_seed(0)
    choices = [torch.randint(12, (2 + n % 9,), generator=generator) for n in range(60)]
    (root / "texts.txt").write_text("\n".join(" ".join(WORDS[i] for i in row) for row in choices))
    return root


def written(folder, tmp_path, *arguments, text="texts.txt"):
    """The content of a report, and what was said."""
    page = tmp_path / "report.html"
    command = ["report", folder / "tiny", "--text", folder / text, "--lines", *arguments]
    result = CliRunner().invoke(app, [str(part) for part in (*command, "--html", page)])
    assert result.exit_code == 0, result.stderr
    html = page.read_text()
    assert str(folder) not in html and str(tmp_path) not in html
    found = re.search(r'id="content">(.*?)</script>', html, re.DOTALL)
    return json.loads(found[1]), re.sub(r"\s+", " ", result.stderr)


def test_examples_are_shown_in_the_order_of_the_text(folder, tmp_path):
    found, said = written(folder, tmp_path, "--examples", 3)
    first = (folder / "texts.txt").read_text().splitlines()[:3]
    assert [example["tokens"] for example in found["examples"]] == [
        ["[CLS]", *line.split(), "[SEP]"] for line in first
    ]
    assert found["model"] == "tiny" and found["settings"]["text"] == ["texts.txt"]
    assert found["grids"][0]["name"] == "effective fraction"
    assert not found["attribution"] and not found["curves"]
    assert "Maps are of the first 3 of 60 examples." in said
    assert found["notes"] == ["Maps are of the first 3 of 60 examples."]
    assert {grid["examples"] for grid in found["grids"]} == {60}
    assert all(set(example["segments"]) == {0} for example in found["examples"])


def test_heads_layers_and_tokens_are_chosen(folder, tmp_path):
    choice = ("--heads", "3,1", "--layers", "-1", "--examples", 12, "--max-tokens", 5)
    found, said = written(folder, tmp_path, *choice)
    assert {tuple(block["heads"]) for block in found["maps"]} == {(1, 3)}
    assert found["layers"] == ["1"]
    assert max(len(example["tokens"]) for example in found["examples"]) == 5
    assert max(example["length"] for example in found["examples"]) == 12
    assert "have more than 5 tokens" in said and all(note in said for note in found["notes"])


def test_what_is_said_of_the_run_stands_on_the_page(folder, tmp_path):
    found, said = written(folder, tmp_path, "--max-length", 4, "--examples", 2)
    assert len(found["notes"]) == 2 and "longer than 4 tokens" in found["notes"][0]
    assert all(note in said for note in found["notes"])


def test_two_models_stand_side_by_side(folder, tmp_path):
    other = BertModel.from_pretrained(folder / "tiny")
    with torch.no_grad():
        other.encoder.layer[1].attention.self.query.weight.mul_(3)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(folder / "tiny").save_pretrained(tmp_path / "other")
    page = tmp_path / "drift.html"
    names = ["compare", folder / "tiny", tmp_path / "other", "--text", folder / "texts.txt"]
    command = [*names, "--lines", "--html", page]
    result = CliRunner().invoke(app, [str(part) for part in command])
    assert result.exit_code == 0, result.stderr
    found = json.loads(re.search(r'id="content">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert found["models"] == ["tiny", "other"]
    pairs = {}
    for block in found["maps"]:
        pairs.setdefault((block["example"], block["layer"]), {})[block["model"]] = block["maps"]
    assert len(pairs) == 12 * 2
    for (_, layer), models in pairs.items():
        assert (models[0][0]["packed"] == models[1][0]["packed"]) == (layer == 0)
    assert [grid["name"] for grid in found["grids"]][1:3] == ["raw cosine", "effective cosine"]


def test_attribution_and_identifiability_join(folder, tmp_path):
    found, _ = written(folder, tmp_path, "--attribution", "--identifiability", "--examples", 2)
    assert [block["example"] for block in found["attribution"]] == [0, 1]
    names = [curve["name"] for curve in found["curves"]]
    assert names[0] == "Tokens identified" and "Hidden token attribution: own" in names
    assert found["curves"][0]["labels"][:3] == ["naive, cosine", "linear, cosine", "mlp, cosine"]


def test_too_few_texts_to_identify_are_a_note(folder, tmp_path):
    (folder / "few.txt").write_text("river stone\n\npaper window")
    found, said = written(folder, tmp_path, "--identifiability", text="few.txt")
    assert not found["curves"] and "Tokens were not identified." in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "4"], "--heads [4] but"),
        (["--heads", "one"], "--heads must be indices, as in 0,3. Got 'one'."),
        (["--html", "none/report.html"], "there is no folder none"),
    ],
)
def test_wrong_choices_are_refused(folder, tmp_path, arguments, message):
    command = ["report", folder / "tiny", "--text", folder / "texts.txt"]
    page = ["--html", tmp_path / "a.html"]
    result = CliRunner().invoke(app, [str(part) for part in (*command, *page, *arguments)])
    assert result.exit_code == 2 and message in re.sub(r"\s+", " ", result.stderr)
    assert not list(tmp_path.iterdir())


def test_what_only_the_report_can_show_needs_one(folder):
    command = ["report", folder / "tiny", "--text", folder / "texts.txt", "--attribution"]
    result = CliRunner().invoke(app, [str(part) for part in command])
    assert result.exit_code == 2 and "need --html" in result.stderr


def test_the_demo_has_a_report_of_every_head(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--html", str(tmp_path / "demo.html")])
    assert result.exit_code == 0, result.stderr
    html = (tmp_path / "demo.html").read_text()
    assert 5_000_000 < len(html.encode()) <= 10_000_000
    found = json.loads(re.search(r'id="content">(.*?)</script>', html, re.DOTALL)[1])
    assert len(found["maps"]) == 6 * 12
    assert all(block["heads"] == list(range(12)) for block in found["maps"])
    assert all(block["rows"] == block["columns"] for block in found["maps"])
    for example in found["examples"]:
        assert len(example["tokens"]) == example["length"]
    (note,) = found["notes"]  # the values are rounded, and nothing is left out
    assert note.startswith("Map values are rounded")
