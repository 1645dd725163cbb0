"""The command that chooses heads by a score and removes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner, Result

from attnlens import mask_heads
from attnlens.cli.commands import app
from attnlens.demo import model_folder
from attnlens.pruning import load_pruned
from attnlens.pruning.plan import Plan
from attnlens.pruning.scores import head_scores
from tests.support.commands import without_frame

TEXTS = ["The tram slid past the closed cinema and the yellow window.", "Rain again."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37}
    torch.manual_seed(0)
    config = BertConfig(**sizes, num_attention_heads=4, vocab_size=30522, initializer_range=0.3)
    BertModel(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    return path


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["prune", *map(str, arguments)])


def tokens(folder: Path) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))


def test_the_plan_holds_the_lowest_scores(folder: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ("--text", text, "--plan", path, "--score", "output_norm", "--fraction", 0.25)
    result = run(folder, *options)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("2 of 8 heads chosen:")
    model, batch = BertModel.from_pretrained(folder).eval(), tokens(folder)
    scores = head_scores(model, ["output_norm"], [batch])["output_norm"]
    lowest = {divmod(int(index), 4) for index in scores.flatten().argsort()[:2]}
    plan = Plan.read(path)
    assert {(layer, h) for (_, layer), heads in plan.heads.items() for h in heads} == lowest
    note = json.loads(path.read_text())
    assert (
        note["score"] == "output_norm" and note["fraction"] == 0.25 and "torch" in note["versions"]
    )
    with torch.no_grad():
        plain = model(**batch).last_hidden_state
        with mask_heads(model, plan):
            masked = model(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    cosine = float(torch.cosine_similarity(plain[real], masked[real], -1).mean())
    assert f"cosine of {cosine:.3f}" in result.stdout


def test_the_heads_are_removed_on_request(folder: Path, text: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "plan.json", tmp_path / "pruned"
    options = ("--score", "random", "--seed", 3, "--per-layer", "--output", output)
    result = run(folder, "--text", text, "--plan", path, *options)
    assert result.exit_code == 0, result.stderr
    assert "heads        8 → 4" in result.stdout
    assert {len(heads) for heads in Plan.read(path).heads.values()} == {2}
    model, batch = BertModel.from_pretrained(folder).eval(), tokens(output)
    with torch.no_grad(), mask_heads(model, Plan.read(path)):
        expected = model(**batch).last_hidden_state
    with torch.no_grad():
        assert torch.equal(load_pruned(output)(**batch).last_hidden_state, expected)


def test_errors_are_one_line(folder: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for arguments, message in (
        ((folder, "--text", text, "--plan", tmp_path / "no" / "plan.json"), "there is no folder"),
        ((folder, "--text", tmp_path / "none", "--plan", path), "Cannot read"),
        ((tmp_path, "--text", text, "--plan", path), "no config.json"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and result.stderr.startswith("error: ")
        assert message in result.stderr.replace("\n", " ")
    needs_labels = run(folder, "--text", text, "--plan", path, "--score", "gradient")
    assert needs_labels.exit_code == 2
    assert "'gradient' is not one of 'effective_norm'" in without_frame(needs_labels.stderr)
    assert not path.exists()
