"""`attnlens identify`, from texts to tables and JSON, against the functions it calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import AutoTokenizer, BertConfig, BertModel, GPT2Config, GPT2Model
from typer.testing import CliRunner

from attnlens import Lens, TokenIdentifiability, identify, record
from attnlens.cli.commands import app
from attnlens.demo import model_folder
from attnlens.errors import InputError
from attnlens.recovery import MapTraining
from attnlens.reporting.tables import rates_table
from attnlens.texts.loading import load_text_model
from tests.support.commands import without_frame

WORDS = "river stone paper window garden letter engine winter candle market bridge teacher".split()
SIZES = {"vocab_size": 30522, "initializer_range": 0.3}


def texts(count: int = 60) -> list[str]:
    """Texts of two to ten words."""
    generator = torch.Generator().manual_seed(0)
    return [
        " ".join(WORDS[i] for i in torch.randint(12, (2 + n % 9,), generator=generator))
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models with the tokenizer of the packaged one, by name, and texts."""
    root = tmp_path_factory.mktemp("identify")
    torch.manual_seed(0)
    bert = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20, **SIZES
    )
    gpt2 = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **SIZES)
    for name, model in (("bert", BertModel(bert)), ("gpt2", GPT2Model(gpt2))):
        model.save_pretrained(root / name)
        AutoTokenizer.from_pretrained(model_folder()).save_pretrained(root / name)
    (root / "texts.txt").write_text("\n".join(texts()), encoding="utf-8")
    return root


def attnlens(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["identify", *map(str, arguments)], input=stdin)


def document(*arguments: object, stdin: str | None = None) -> dict:
    result = attnlens(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_heads_are_judged_over_all_texts(folders: Path) -> None:
    arguments = folders / "bert", "--text", folders / "texts.txt", "--lines", "--part", "heads"
    found = document(*arguments)
    assert found["texts"] == 60 and found["tokens"] == {}
    model = load_text_model(str(folders / "bert"))
    (batch,) = model.batches(model.tokenise(texts()), 60)
    captures = record(model.model, **batch)
    assert [layer["site"] for layer in found["heads"]] == [capture.site for capture in captures]
    for layer, capture in zip(found["heads"], captures, strict=True):
        expected = identify(capture)
        assert expected.identifiable_softmax is not None
        for name in ("identifiable_simplex", "identifiable_softmax", "nullity"):
            mean = getattr(expected, name).double().mean(0)
            assert layer[name] == pytest.approx(mean.tolist()), name
        assert 0 < layer["identifiable_simplex"][0] < 1
        longest = int(capture.mask.sum(-1).max())
        assert layer["longest"] == longest == 12
        assert layer["verdict"].startswith("12 tokens: not identifiable among row-stochastic")
    shown = " ".join(attnlens(*arguments).stdout.split())
    assert "among heads of its width" in shown and "12 tokens: not identifiable" in shown


def test_witnesses_are_constructed_for_the_longest_text(folders: Path) -> None:
    arguments = (
        folders / "bert", "--text", folders / "texts.txt", "--lines", "--part", "heads",
        "--witnesses", "--witness-tokens", 11,
    )  # fmt: skip
    found = document(*arguments)
    assert found["witness_tokens"] == 11
    for layer in found["witnesses"]:
        assert all(0.01 < moved <= 1 for moved in layer["simplex_total_variation"])
        distances = [distance for distance in layer["softmax_distance"] if distance is not None]
        assert len(distances) >= 3 and all(0 < distance < 0.2 for distance in distances)
        assert layer["residual"] <= 1e-10 and layer["reason"] == ""
    assert "right to" in attnlens(*arguments).stdout


def test_masks_that_vary_by_row_have_a_reason_instead(folders: Path) -> None:
    arguments = (
        folders / "gpt2", "--text", folders / "texts.txt", "--lines", "--part", "heads",
        "--witnesses", "--batch-size", 1,
    )  # fmt: skip
    found = document(*arguments)
    assert found["heads"][0]["identifiable_softmax"] is None
    (layer,) = found["witnesses"]
    assert layer["softmax_distance"] == [None, None] and "varies by row" in layer["reason"]
    shown = attnlens(*arguments)
    assert "varies by row" in shown.stderr and "0 of 2" in shown.stdout


def test_tokens_are_those_of_the_observer(folders: Path) -> None:
    arguments = (
        folders / "bert", "--text", folders / "texts.txt", "--lines", "--part", "tokens",
        "--map", "linear", "--map", "naive", "--epochs", 3, "--learning-rate", 0.01,
        "--distance", "cosine",
    )  # fmt: skip
    found = document(*arguments)
    assert list(found["tokens"]) == ["naive", "linear"] and found["heads"] == []
    model = load_text_model(str(folders / "bert"))
    observer = TokenIdentifiability(
        "linear",
        words=model.model.get_input_embeddings(),
        training=MapTraining(learning_rate=0.01, max_epochs=3, patience=5),
    )
    with Lens(model.model, observer), torch.no_grad():
        for batch in model.batches(model.tokenise(texts()), 8):
            model.model(**batch)
    expected = observer.compute()
    linear = found["tokens"]["linear"]
    for name, values in expected.tensors().items():
        if name != "ridge":
            found_values = torch.tensor(linear[name], dtype=torch.float64)
            torch.testing.assert_close(found_values, values, rtol=1e-6, atol=1e-9, msg=name)
    assert linear["ridge"] == [None, None] and linear["layers"] == [0, 1]
    shown = attnlens(*arguments).stdout
    rows = [line.split() for line in shown.splitlines() if line.startswith("layer 0")]
    assert float(rows[0][-3]) == pytest.approx(100 * expected.rate[0].item(), abs=0.06)
    assert "position alone" in shown


def test_both_halves_share_one_pass_and_few_texts_are_enough_for_heads(folders: Path) -> None:
    both = document(folders / "bert", "--text", folders / "texts.txt", "--lines", "--map", "naive")
    assert both["heads"] and both["tokens"]["naive"]["rate"][0] > 0 and both["note"] == ""
    few = attnlens(folders / "bert", "--text", "-", stdin="One sentence.")
    assert few.exit_code == 0 and "split is empty" in " ".join(few.stderr.split())
    assert "Texts (of 1)" in few.stdout
    alone = attnlens(folders / "bert", "--text", "-", "--part", "tokens", stdin="One sentence.")
    assert alone.exit_code == 2 and "split is empty" in alone.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "neither"], "'neither' is not one of 'both', 'heads', 'tokens'"),
        (["--map", "cubic"], "'cubic' is not one of 'naive', 'linear', 'mlp'"),
        (["--distance", "l1"], "'l1' is not one of 'cosine', 'l2'"),
        (["--epochs", "0"], "--epochs"),
    ],
)
def test_wrong_options_are_one_message(folders: Path, arguments: list[str], message: str) -> None:
    result = attnlens(folders / "bert", "--text", folders / "texts.txt", *arguments)
    assert result.exit_code == 2 and message in without_frame(result.stderr)
    assert result.stdout == ""


def test_tables_need_results_of_the_same_layers() -> None:
    with pytest.raises(InputError, match="same layers"):
        rates_table([])
