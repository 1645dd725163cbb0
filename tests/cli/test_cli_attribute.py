"""`attnlens attribute`, from a sentence to tables, JSON and error messages."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner

from attnlens import HiddenTokenAttribution, Lens
from attnlens.cli.commands import app
from attnlens.demo import model_folder

SENTENCE = "The tram slid past the [closed] cinema."
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small model with the tokenizer of the packaged one."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("attribute")
    config = BertConfig(**SIZES, num_attention_heads=4, vocab_size=30522, initializer_range=0.2)
    BertModel(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(path)
    return str(path)


def attribute(*arguments, stdin=None):
    return CliRunner().invoke(app, ["attribute", *arguments], input=stdin)


def test_exact_json_equals_the_observer(folder):
    result = attribute(folder, "--sentence", SENTENCE, "--exact", "--json", "--layers", "0")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    model = BertModel.from_pretrained(folder).eval()
    batch = AutoTokenizer.from_pretrained(folder)(SENTENCE, return_tensors="pt")
    observer = HiddenTokenAttribution(probes=None, keep="matrices")
    with Lens(model, observer), torch.no_grad():
        model(**batch)
    expected = observer.matrices[0].contribution[:, 0]
    assert len(document["tokens"]) == batch["input_ids"].shape[1]
    torch.testing.assert_close(torch.tensor(document["contribution"][0]), expected[0].mT)
    own = torch.tensor(document["own_contribution"])
    torch.testing.assert_close(own, expected.diagonal(dim1=1, dim2=2).mean(-1))
    assert document["layers"] == [0]
    assert document["probes"] is document["standard_error"] is None


def test_tables_name_the_main_contributors(folder):
    shown = attribute(folder, "--sentence", SENTENCE, "--top", "2").stdout
    document = json.loads(attribute(folder, "--sentence", SENTENCE, "--json").stdout)
    assert document["layers"] == [1]
    assert "at layer 1" in shown
    for token, shares in zip(document["tokens"], document["contribution"][0], strict=True):
        main = document["tokens"][torch.tensor(shares).argmax()]
        assert any(
            line.startswith(token) and f"{main} {100 * max(shares):.0f}" in line
            for line in shown.splitlines()
        )
    for layer, own in enumerate(document["own_contribution"]):
        assert f"{layer}" in shown and f"{100 * own:.1f}" in shown


def test_standard_input(folder):
    given = attribute(folder, "--text", "-", "--json", stdin=f"{SENTENCE}\n").stdout
    assert given == attribute(folder, "--sentence", SENTENCE, "--json").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sentence", " "], "no text"),
        (["--sentence", SENTENCE, "--layers", "2"], "Layers lie between -2 and 1"),
        (["--sentence", SENTENCE, "--probes", "99"], "probes must lie between 1"),
        (["--sentence", __file__], "is a file"),
    ],
)
def test_mistakes_are_told_in_one_line(folder, arguments, message):
    result = attribute(folder, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not result.stdout
