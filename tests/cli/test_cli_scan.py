"""`attnlens scan` and `attnlens merge`, from files to files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from attnlens import HeadStatistics, HiddenTokenAttribution
from attnlens.cli.commands import app
from attnlens.saving import load
from tests.support.commands import without_frame
from tests.support.scanning import model, scan, texts, tokenizer

SMALL = ("--chunk", "8", "--batch-size", "4", "--batch-tokens", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a corpus in three forms."""
    root = tmp_path_factory.mktemp("scan")
    model().save_pretrained(root / "model")
    tokenizer().save_pretrained(root / "model")
    (root / "plain.txt").write_text("\n".join(texts(40)))
    rows = [
        {
            "sentence": text,
            "words": text.split(),
            "tags": ["NOUN", "VERB"][n % 2 :][:1] * len(text.split()),
        }
        for n, text in enumerate(texts(40))
    ]
    (root / "rows.jsonl").write_text("\n".join([*map(json.dumps, rows), "{", '{"sentence": 1}']))
    return root


def attnlens(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_scan_writes_what_it_prints(folder: Path, tmp_path: Path) -> None:
    result = attnlens(
        "scan", folder / "model", "--text", folder / "plain.txt", "--output", tmp_path / "out",
        "--observer", "head-statistics", "--observer", "attribution:probes=2", *SMALL,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    expected = scan(texts(40), [HeadStatistics(), HiddenTokenAttribution(2)])
    for name, observer in zip(
        ("head-statistics", "hidden-token-attribution"), expected.observers, strict=True
    ):
        found = load(tmp_path / "out" / f"{name}.safetensors").tensors()
        for quantity, tensor in observer.compute().tensors().items():
            assert torch.equal(found[quantity].nan_to_num(7.0), tensor.nan_to_num(7.0)), quantity
    assert "effective fraction, layer × head" in result.stdout
    own = expected.observers[1].compute().own[0].item()
    assert "hidden-token-attribution" in result.stdout and f"{own:.3f}" in result.stdout
    assert "40 records of" in result.stdout and "0 rejected" in result.stdout
    document = json.loads((tmp_path / "out" / "scan.json").read_text())
    assert document["counts"] == vars(expected.counts)
    assert document["settings"]["chunk"] == 8 and document["finished"] is True


def test_labels_are_those_of_the_file_and_of_special_tokens(folder: Path, tmp_path: Path) -> None:
    arguments = (
        "scan", folder / "model", "--text", folder / "rows.jsonl", "--observer",
        "attribution:probes=2", "--words-field", "words", "--labels-field", "tags", *SMALL,
    )  # fmt: skip
    result = attnlens(*arguments, "--output", tmp_path / "all")
    assert result.exit_code == 0, result.stderr
    found = load(tmp_path / "all" / "hidden-token-attribution.safetensors")
    assert found.labels == ("NOUN", "VERB", "[CLS]", "[SEP]")
    assert found.tokens[0, 2:].tolist() == [40, 40] and (found.tokens[0, :2] > 60).all()
    told = [line for line in result.stderr.splitlines() if "rows.jsonl:" in line]
    assert len(told) == 2 and "2 rejected" in result.stdout
    assert told[0].endswith(
        "41: not JSON: Expecting property name enclosed in double quotes at character 1"
    )
    assert told[1].endswith("42: no field 'words'; there is 'sentence'")
    chosen = attnlens(*arguments, "--output", tmp_path / "some", "--label-names", "VERB,[CLS]")
    assert chosen.exit_code == 0, chosen.stderr
    some = load(tmp_path / "some" / "hidden-token-attribution.safetensors")
    assert some.labels == ("VERB", "[CLS]") and torch.equal(some.own[:, 0], found.own[:, 1])


def test_shards_are_merged(folder: Path, tmp_path: Path) -> None:
    for index in range(2):
        part = attnlens(
            "scan", folder / "model", "--text", folder / "rows.jsonl", "--text-field", "sentence",
            "--output", tmp_path / str(index), "--shard", f"{index}/2", *SMALL,
        )  # fmt: skip
        assert part.exit_code == 0, part.stderr
        assert f"shard {index} of 2" in part.stderr and "layer × head" not in part.stdout
    result = attnlens("merge", tmp_path / "1", tmp_path / "0", "--output", tmp_path / "both")
    assert result.exit_code == 0, result.stderr
    assert "40 records of" in result.stdout and "2 rejected" in result.stdout
    expected = scan(texts(40), [HeadStatistics()]).observers[0].compute()
    found = load(tmp_path / "both" / "head-statistics.safetensors")
    assert torch.equal(found.effective_fraction, expected.effective_fraction)
    missing = attnlens("merge", tmp_path / "1", "--output", tmp_path / "half")
    assert missing.exit_code == 2 and "these are missing: 0" in " ".join(missing.stderr.split())


def test_torchrun_needs_no_more_than_the_command(folder: Path, tmp_path: Path) -> None:
    entry = "from attnlens.cli import main; main()"
    run = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "--no-python", sys.executable, "-c", entry, "scan", folder / "model", "--text",
        folder / "plain.txt", "--output", tmp_path, *SMALL,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*map(str, run)], capture_output=True, text=True, timeout=3000, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("40 records of") == 1  # one of them prints
    expected = scan(texts(40), [HeadStatistics()]).observers[0].compute()
    found = load(tmp_path / "head-statistics.safetensors")
    for name, tensor in expected.tensors().items():
        assert torch.equal(found.tensors()[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "There is no file nowhere.txt"),
        (["--observer", "heads"], "No observer 'heads'"),
        (["--observer", "attribution:probes=0"], "probes must be positive"),
        (["--shard", "4"], "--shard must be as in 0/4"),
        (["--shard", "4/4"], "shard must be an index"),
        (["--on-error", "stop"], "'stop' is not one of 'skip', 'raise'"),
        (["--format", "xml"], "'xml' is not one of 'text', 'jsonl'"),
        (
            ["--on-error", "raise", "--text-field", "sentence", "--text", "rows.jsonl"],
            ":41: not JSON",
        ),
        (["--labels-field", "tags"], "name the field of the words as well"),
    ],
)
def test_wrong_options_are_one_message(
    folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    arguments = [str(folder / name) if name.startswith("rows") else name for name in arguments]
    if "--text" not in arguments:
        arguments += ["--text", str(folder / "plain.txt")]
    result = attnlens("scan", folder / "model", "--output", tmp_path / "out", *SMALL, *arguments)
    assert result.exit_code == 2, result.output
    assert message in without_frame(result.stderr) and result.stdout == ""
