"""The commands on decoders, from the shell: plain, with experts, and a hybrid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from attnlens import HeadStatistics, Lens
from attnlens.demo import model_folder
from tests.support.commands import command
from tests.support.zoo import build

LAYERS = {"gpt2": [0, 1], "jamba": [1, 3], "mixtral": [0, 1]}
SENTENCES = ("A decoder reads from the left.", "So no token sees what comes after it, does it?")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny decoders with the tokenizer of the packaged encoder."""
    root = tmp_path_factory.mktemp("decoders")
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    for name in LAYERS:
        config = build(name).model.config
        config.vocab_size = len(tokenizer)
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in LAYERS}


def said(*arguments: object) -> dict:
    finished = command(*arguments, "--json")
    assert finished.code == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("name", LAYERS)
def test_report(name: str, folders: dict[str, Path]) -> None:
    options = [part for sentence in SENTENCES for part in ("--sentence", sentence)]
    found = said("report", folders[name], *options)
    statistics = HeadStatistics()
    model = AutoModel.from_pretrained(folders[name]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    with Lens(model, statistics), torch.no_grad():
        for sentence in SENTENCES:
            model(**tokenizer(sentence, return_tensors="pt"))
    expected = statistics.compute()
    found = found["statistics"]
    assert [layer["layer"] for layer in found["layers"]] == LAYERS[name]
    fractions = torch.tensor(found["effective_fraction"], dtype=torch.float64)
    torch.testing.assert_close(fractions, expected.effective_fraction, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_attribute(name: str, folders: dict[str, Path]) -> None:
    found = said("attribute", folders[name], "--sentence", SENTENCES[0], "--exact")
    contribution = torch.tensor(found["contribution"][0])  # target, source
    assert not contribution.triu(1).any()
    torch.testing.assert_close(contribution.sum(1), torch.ones(len(contribution)))


@pytest.mark.parametrize("name", LAYERS)
def test_identify(name: str, folders: dict[str, Path]) -> None:
    found = said("identify", folders[name], "--part", "heads", "--sentence", SENTENCES[1])
    sites = ".".join(layer["site"] for layer in found["heads"])
    numbers = [int(part) for part in sites.split(".") if part.isdigit()]
    assert numbers == LAYERS[name]
    assert all("dimension 15" in layer["verdict"] for layer in found["heads"])


@pytest.mark.parametrize("name", LAYERS)
def test_scan(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("\n".join(SENTENCES))
    observers = ("--observer", "head-statistics", "--observer", "attribution:probes=2")
    found = said("scan", folders[name], "--text", data, "--output", tmp_path / "out", *observers)
    heads, tokens = found["results"].values()
    assert [row["layer"] for row in heads["layers"]] == LAYERS[name]
    depth = AutoModel.from_pretrained(folders[name]).config.num_hidden_layers
    assert [row["layer"] for row in tokens["layers"]] == list(range(depth))
