"""What all commands share: outputs, interruptions, words, speed, and pruned checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, T5Config, T5Model
from typer.main import get_command

from attnlens import load
from attnlens.cli import choices
from attnlens.cli.commands import app
from attnlens.corpus import observer_names, readers
from attnlens.corpus import settings as corpus_settings
from attnlens.demo import model_folder
from attnlens.pruning import Plan, load_pruned, prune_heads, save_pruned
from attnlens.recipes import head_choice, head_report, identification, text_drift
from attnlens.recipes.page_content import PageContent
from attnlens.recovery import token_maps
from tests.support.commands import command, without_frame

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37}
WORDS = "river stone paper window garden letter engine winter candle market bridge teacher".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the same without three heads, an encoder-decoder, and texts."""
    root = tmp_path_factory.mktemp("shell")
    torch.manual_seed(0)
    config = BertConfig(**SIZES, num_attention_heads=4, vocab_size=30522, initializer_range=0.3)
    t5 = T5Config(vocab_size=30522, d_model=32, d_kv=8, d_ff=37, num_layers=2)
    BertModel(config).save_pretrained(root / "bert")
    T5Model(t5).save_pretrained(root / "t5")
    pruned = BertModel.from_pretrained(root / "bert").eval()
    prune_heads(pruned, {0: [1, 2], 1: [0]})
    save_pruned(pruned, root / "pruned")
    for name in ("bert", "t5", "pruned"):
        AutoTokenizer.from_pretrained(model_folder()).save_pretrained(root / name)
    lines = [" ".join(WORDS[(n * i) % 12] for i in range(1, 3 + n % 9)) for n in range(60)]
    (root / "texts.txt").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize(
    "arguments",
    [
        "report pruned --text texts.txt --lines",
        "check pruned",
        "compare pruned pruned --text texts.txt --lines",
        "attribute pruned --sentence river --layers 0,-1",
        "identify pruned --text texts.txt --lines --part heads",
        "scan pruned --text texts.txt --output {out} --observer head-statistics",
        "prune pruned --text texts.txt --lines --score random",
    ],
)
def test_every_command_reads_a_pruned_checkpoint(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(place)
    finished = command(*arguments.format(out=tmp_path / "out").split(), "--json")
    assert finished.code == 0, finished.stderr
    document = json.loads(finished.stdout)
    if arguments.startswith("scan"):
        document = document["results"]["head-statistics"]
        assert [[rank is not None for rank in row] for row in document["rank"]] == [
            [True, True, False, False][:3],
            [True, True, True],
        ]


def test_pruning_writes_a_model_that_is_read_again_and_leaves_its_source(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = (place / "bert" / "model.safetensors").read_bytes()
    out, plan = tmp_path / "out", tmp_path / "plan.json"
    arguments = ("prune", "bert", "--text", "texts.txt", "--lines", "--score", "random")
    finished = command(*arguments, "--output", out, "--plan", plan)
    assert finished.code == 0, finished.stderr
    assert (
        len(Plan.read(plan)) == 4 and (place / "bert" / "model.safetensors").read_bytes() == before
    )
    assert command("report", out, "--sentence", "river stone").code == 0
    # Once more into the same folder, which is not empty now.
    assert command(*arguments, "--output", out).code == 2
    assert command(*arguments, "--output", out, "--overwrite").code == 0
    with pytest.raises(ValueError, match="outputs never replace inputs"):
        save_pruned(load_pruned(out), out, overwrite=True)


def test_an_encoder_decoder_is_said_to_be_read_by_half(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    finished = command("report", "t5", "--sentence", "river stone", "--json")
    assert finished.code == 0 and json.loads(finished.stdout)["examples"] == 1
    assert finished.stderr == "note: t5 is an encoder-decoder. Only its encoder is looked at.\n"


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ("report bert --sentence river --examples 3", "--examples does nothing without --html."),
        ("report bert --sentence river --overwrite", "--overwrite does nothing without --output."),
        (
            "report bert --sentence river --json --field rank",
            "--field does nothing with --json, wh",
        ),
        (
            "attribute bert --sentence river --exact --probes 2",
            "--probes does nothing with --exact.",
        ),
        (
            "identify bert --sentence river --part heads --seed 1",
            "--seed does nothing with --part h",
        ),
        (
            "prune bert --sentence river --seed 1",
            "--seed does nothing with --score other than rand",
        ),
    ],
)
def test_options_that_do_nothing_are_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, note: str
) -> None:
    monkeypatch.chdir(place)
    finished = command(*arguments.split())
    assert finished.code == 0 and finished.stderr.startswith(f"note: {note}"), finished


def test_a_sentence_that_is_cut_is_told(place: Path) -> None:
    finished = command("attribute", place / "bert", "--sentence", "river " * 600, "--probes", 1)
    assert finished.code == 0
    assert "note: The sentence was cut after 512 tokens" in finished.stderr


def interrupted(what: int) -> Callable[[int], None]:
    """Send a signal once there is a checkpoint."""

    def send(process: int) -> None:
        deadline = time.monotonic() + 600
        while not Path("out/shard-0-of-1.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process, what)

    return send


@pytest.mark.parametrize(("what", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_scan_says_how_to_go_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: int, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("many.txt").write_text((place / "texts.txt").read_text() * 200)
    arguments = (
        "scan", place / "bert", "--text", "many.txt", "--output", "out", "--chunk", 8,
        "--checkpoint-every", 0,
    )  # fmt: skip
    finished = command(*arguments, while_it_runs=interrupted(what))
    assert finished == (
        code,
        "",
        "error: Interrupted. The same command goes on from the last checkpoint in out.\n",
    )
    assert not Path("out/scan.json").exists()


def test_one_scan_at_a_time_writes_to_a_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("many.txt").write_text((place / "texts.txt").read_text() * 200)
    arguments = (
        "scan", place / "bert", "--text", "many.txt", "--output", "out", "--chunk", 8,
        "--checkpoint-every", 0,
    )  # fmt: skip
    second = []

    def start_another(process: int) -> None:
        interrupted(0)(process)
        second.append(command(*arguments))
        os.kill(process, signal.SIGKILL)

    assert command(*arguments, while_it_runs=start_another).code == -signal.SIGKILL
    assert second[0].code == 2 and "Another scan is writing to out." in second[0].stderr


def test_sixty_lines_in_two_shards_are_thirty_and_thirty(place: Path, tmp_path: Path) -> None:
    for index in range(2):
        finished = command(
            "scan", place / "bert", "--text", place / "texts.txt", "--output",
            tmp_path / str(index), "--shard", f"{index}/2",
        )  # fmt: skip
        assert finished.code == 0 and finished.stdout.startswith("30 records of "), finished
    merged = command("merge", tmp_path / "0", tmp_path / "1", "--output", tmp_path / "merged")
    assert "60 records of " in merged.stdout
    whole = command(
        "scan", place / "bert", "--text", place / "texts.txt", "--output", tmp_path / "whole"
    )
    assert whole.stdout == merged.stdout
    found, expected = (
        load(tmp_path / name / "head-statistics.safetensors").tensors()
        for name in ("merged", "whole")
    )
    for name, tensor in expected.items():
        assert torch.equal(found[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


def test_rejected_records_are_told_ten_at_a_time_and_counted(place: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "river"}\n' + "{\n" * 25)
    finished = command("scan", place / "bert", "--text", rows, "--output", tmp_path / "out")
    assert (
        finished.code == 0 and "1 records" in finished.stdout and "25 rejected" in finished.stdout
    )
    told = finished.stderr.splitlines()
    assert sum("not JSON" in line for line in told) == 10
    assert any(line.startswith("note: 15 more in ") for line in told)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_may_be_utf_16_or_compressed_or_on_standard_input(
    place: Path, tmp_path: Path, suffix: str
) -> None:
    import gzip

    from backports import zstd

    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[suffix]
    path = tmp_path / f"texts.txt{suffix}"
    path.write_bytes(pack("river stone\n\npäper".encode("utf-16")))
    expected = command("report", place / "bert", "--sentence", "river stone", "--sentence", "päper",
                       "--json")  # fmt: skip
    found = command("report", place / "bert", "--text", path, "--json")
    assert found.code == 0, found.stderr
    assert json.loads(found.stdout)["statistics"] == json.loads(expected.stdout)["statistics"]
    if not suffix:
        given = command("report", place / "bert", "--text", "-", "--json", stdin=path.read_bytes())
        assert json.loads(given.stdout)["statistics"] == json.loads(expected.stdout)["statistics"]
        out = tmp_path / "out"
        scan = command("scan", place / "bert", "--text", "-", "--output", out, stdin=b"a\nb\n")
        assert scan.code == 0 and "\n2 records of 3 tokens on average" in scan.stdout


def test_names_of_any_kind_are_said_and_shown(place: Path, tmp_path: Path) -> None:
    """Markup, templates, and bytes that are no Unicode."""
    text = tmp_path / os.fsdecode(b"te\xffxt.txt")
    text.write_text("river stone")
    for name in (b"{{content}}", b"[red]", b"na\xffme", "é ½".encode()):
        folder = tmp_path / os.fsdecode(name)
        shutil.copytree(place / "bert", folder)
        if b"\xff" in name:  # safetensors opens no such file
            refused = command("report", folder, "--sentence", "river stone")
            assert refused.code == 2 and "na\\udcffme: Path" in refused.stderr
            folder = place / "bert"
        page = tmp_path / os.fsdecode(name + b".html")
        finished = command("report", folder, "--text", text, "--html", page)
        assert finished.code == 0, finished.stderr
        assert os.fsdecode(name).encode(errors="backslashreplace").decode() in finished.stderr
        assert folder.name in finished.stdout.replace("\n", "")
        assert b"</html>" in page.read_bytes()[-100:]


def test_help_and_typos_need_no_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = sys.argv[1].split(); from attnlens.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    right = dict.fromkeys(("--help", "-h", "report --help", "scan -h", "--version"), 0)
    wrong = dict.fromkeys(("reprot", "report --txt a", "report a --field ranks"), 2)
    for arguments, exit_code in (right | wrong).items():
        finished = subprocess.run(
            [sys.executable, "-c", code, arguments], capture_output=True, text=True, timeout=600
        )
        assert finished.stdout.endswith("False False\n"), arguments
        assert finished.returncode == exit_code, arguments


def test_the_module_is_the_command() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "attnlens", "--help"], capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == 0 and finished.stdout.startswith("Usage: attnlens [OPTIONS] COMM")


def test_choices_are_those_of_the_library() -> None:
    assert get_args(choices.Field) == head_report.FIELDS
    assert get_args(choices.DriftField) == get_args(text_drift.DriftField)
    assert get_args(choices.Score) == head_choice.SCORES
    assert get_args(choices.Part) == get_args(identification.Part)
    assert get_args(choices.Distance) == get_args(token_maps.Distance)
    assert get_args(choices.Format) == get_args(readers.Format)
    assert get_args(choices.OnError) == get_args(corpus_settings.OnError)
    assert tuple(choices.Map) == get_args(token_maps.MapKind)
    assert choices.OBSERVERS == tuple(sorted(observer_names()))
    scan, page, brief = corpus_settings.Settings(), PageContent(), identification.BRIEF
    assert (choices.BATCH_SIZE, choices.BATCH_TOKENS, choices.CHUNK) == (
        scan.batch_size, scan.batch_tokens, scan.chunk,
    )  # fmt: skip
    assert corpus_settings.Handling().checkpoint_every == choices.CHECKPOINT_EVERY
    assert (choices.EXAMPLES, choices.MAX_TOKENS, choices.MEGABYTES) == (
        page.examples, page.tokens, page.megabytes,
    )  # fmt: skip
    assert (choices.EPOCHS, choices.LEARNING_RATE, choices.PATIENCE) == (
        brief.max_epochs, brief.learning_rate, brief.patience,
    )  # fmt: skip
    assert {field.name for field in fields(page)} >= {"examples", "tokens", "megabytes"}


def options() -> dict[str, dict[str, Any]]:
    """The options of every command by name."""
    commands: Any = get_command(app)
    return {
        name: {flag: option for option in entry.params for flag in option.opts}
        for name, entry in commands.commands.items()
    }


def test_one_option_has_one_meaning_in_every_command() -> None:
    reading = {"attribute", "compare", "identify", "prune", "report", "scan"}
    assert {name for name, own in options().items() if "--text" in own} == reading
    assert {name for name, own in options().items() if "--sentence" in own} == reading
    assert {name for name, own in options().items() if "--json" not in own} == set()
    flags = {flag for own in options().values() for flag in own if flag.startswith("--")}
    for flag in flags - {"--text"}:
        kinds = {
            (own[flag].metavar, own[flag].multiple, own[flag].is_flag, own[flag].name)
            for own in options().values()
            if flag in own
        }
        assert len(kinds) == 1, flag


def test_the_shell_completes_choices() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "attnlens"], capture_output=True, text=True, timeout=600,
        env={**os.environ, "_ATTNLENS_COMPLETE": "complete_bash", "COMP_CWORD": "4",
             "COMP_WORDS": "attnlens report bert --field effective_"},
    )  # fmt: skip
    assert finished.stdout.split() == [
        "effective_norm",
        "effective_fraction",
        "effective_sink_mass",
        "effective_rank",
    ]


def test_advice_speaks_to_the_shell(place: Path, tmp_path: Path) -> None:
    arguments = ("scan", place / "bert", "--sentence", "river", "--output", tmp_path / "out")
    assert command(*arguments).code == 0
    again = command(*arguments, "--batch-size", 3)
    assert again.code == 2
    said = without_frame(again.stderr)
    assert "--batch-size is 32, not 3" in said and "begin anew with --no-resume." in said
    assert command(*arguments, "--batch-size", 3, "--no-resume").code == 0


SHOWN = {
    "check bert": "A·V − O: largest error",
    "report bert --text texts.txt --lines": "can influence its output",
    "compare bert pruned-by-nothing --text texts.txt --lines": "likeness of effective attention",
    "attribute bert --sentence river": "the share of the token at that place",
    "identify bert --text texts.txt --lines --part heads --witnesses": "among all matrices",
    "prune bert --text texts.txt --lines": "keep a cosine of",
    "scan bert --text texts.txt --output {out} --observer attribution": "60 records of",
    "demo": "attention heads of a sentence encoder",
}


@pytest.mark.parametrize("arguments", SHOWN)
def test_eighty_columns_are_enough_and_symbols_are_explained(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(place)
    shutil.copytree("bert", "pruned-by-nothing", dirs_exist_ok=True)
    finished = command(*arguments.format(out=tmp_path / "out").split())
    assert finished.code == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    assert SHOWN[arguments] in without_frame(finished.stdout)
    assert not [line for line in lines if line.endswith("…")]


def test_a_wide_terminal_is_used(place: Path) -> None:
    wide = command("check", place / "bert", COLUMNS="160").stdout.splitlines()
    row = "0  encoder  sdpa     2·4·"
    (line,) = [line for line in wide if line.startswith(row)]
    assert "encoder.layer.0.attention.self" in line and "attention.output.dense" in line


def test_identical_models_are_identical_and_others_are_not(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    other = BertModel.from_pretrained("bert")
    with torch.no_grad():
        other.encoder.layer[1].attention.self.query.weight[9] *= 1.001
    other.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained("bert").save_pretrained(tmp_path)
    same = without_frame(command("compare", "bert", "bert", "--sentence", "river stone").stdout)
    assert "It is 1.000 for every head. bert and bert are identical." in same
    moved = without_frame(command("compare", "bert", tmp_path, "--sentence", "river stone").stdout)
    assert "head 1 of layer 1 moved most: 1 − " in moved and "are identical" not in moved


def test_a_scan_shows_what_each_observer_found(place: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"words": ["river", "and", "stone"], "tags": ["NOUN", "CONJ", "NOUN"]}\n' * 3)
    observers = ("head-statistics", "attribution", "label-attention", "effective-attention")
    finished = command(
        "scan", place / "bert", "--text", rows, "--output", tmp_path / "out", "--words-field",
        "words", "--labels-field", "tags", *(f"--observer={name}" for name in observers),
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    for shown in (
        "effective fraction, layer × head", "hidden-token-attribution: own, by label",
        "label-attention: effective, by label", "label-attention: raw, by label",
        "layer CONJ NOUN [CLS] [SEP]", "effective-attention: 2 × AttentionMap",
    ):  # fmt: skip
        assert shown in without_frame(finished.stdout), shown
    raw = load(tmp_path / "out" / "label-attention.safetensors").raw.mean(1)[0]
    assert " ".join(f"{share:.3f}" for share in raw.tolist()) in without_frame(finished.stdout)
