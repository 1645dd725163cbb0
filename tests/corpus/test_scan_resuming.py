"""Scans that are killed, and scans that are no longer the same when they go on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

from attnlens import HeadStatistics, HiddenTokenAttribution
from attnlens import scan as attnlens_scan
from attnlens.errors import InputError
from attnlens.recovery import MapTraining, TokenIdentifiability
from attnlens.saving import load
from tests.support.commands import command
from tests.support.scanning import SETTINGS, model, texts, tokenizer

KILLS = int(os.environ.get("ATTNLENS_KILLS", "3"))  # 20 in a thorough run
RESULTS = ("head-statistics", "hidden-token-attribution", "label-attention")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a corpus with labels, and the results of a scan that nobody disturbed."""
    root = tmp_path_factory.mktemp("resuming")
    model().save_pretrained(root / "model")
    tokenizer().save_pretrained(root / "model")
    rows = [
        {"words": text.split(), "tags": [["NOUN", "VERB", "ADJ"][len(word) % 3] for word in
                                         text.split()]}
        for text in texts(160)
    ]  # fmt: skip
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    finished = command(*arguments(root, root / "whole"))
    assert finished.code == 0, finished.stderr
    return root


def arguments(place: Path, out: Path) -> list[object]:
    return [
        "scan", place / "model", "--text", place / "rows.jsonl", "--output", out,
        "--observer", "head-statistics", "--observer", "attribution:probes=2",
        "--observer", "label-attention", "--words-field", "words", "--labels-field", "tags",
        "--chunk", 8, "--batch-size", 4, "--batch-tokens", 40, "--checkpoint-every", 0,
    ]  # fmt: skip


def kill_after(checkpoints: int, pause: float, path: Path) -> Callable[[int], None]:
    """Kill a process some time after it has written so many checkpoints."""

    def kill(process: int) -> None:
        written: set[tuple[int, int]] = set()
        deadline = time.monotonic() + 600
        while len(written) < checkpoints and time.monotonic() < deadline:
            if path.exists():
                state = path.stat()
                written.add((state.st_ino, state.st_mtime_ns))
            time.sleep(0.0005)
        time.sleep(pause)
        os.kill(process, signal.SIGKILL)

    return kill


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_scan_goes_on_to_the_same_results(place: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    out = tmp_path / "out"
    kill = kill_after(
        chance.randrange(1, 12), chance.uniform(0, 0.02), out / "shard-0-of-1.safetensors"
    )
    killed = command(*arguments(place, out), while_it_runs=kill)
    assert killed.code == -signal.SIGKILL and not (out / "scan.json").exists()
    finished = command(*arguments(place, out))
    assert finished.code == 0, finished.stderr
    for name in RESULTS:
        found, expected = (
            load(folder / f"{name}.safetensors").tensors() for folder in (out, place / "whole")
        )
        assert found.keys() == expected.keys() and len(found) > 2
        for quantity, tensor in expected.items():
            assert torch.equal(found[quantity].nan_to_num(7.0), tensor.nan_to_num(7.0)), quantity
    counts = [json.loads((folder / "scan.json").read_text())["counts"]
              for folder in (out, place / "whole")]  # fmt: skip
    assert counts[0] == counts[1] and counts[0]["records"] == 160


def changed(**settings: Any) -> BertModel:
    """The model with other settings and the same weights."""
    config = model().config
    for name, value in settings.items():
        setattr(config, name, value)
    other = BertModel(config).eval()
    other.load_state_dict(model().state_dict())
    return other


def one_weight() -> BertModel:
    other = model()
    with torch.no_grad():
        other.encoder.layer[1].output.dense.weight[7, 13] += 1e-3
    return other


def outside_the_configuration() -> BertModel:
    other = model()
    other.encoder.layer[0].attention.output.LayerNorm.eps = 1e-3
    return other


def tokens(**settings: Any) -> Any:
    other = tokenizer()
    for name, value in settings.items():
        setattr(other, name, value)
    return other


CHANGES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "activation": (
        lambda: {"model": changed(hidden_act="relu")},
        "config.hidden_act is 'gelu', no",
    ),
    "epsilon": (lambda: {"model": changed(layer_norm_eps=1e-3)}, "config.layer_norm_eps is 1e-12"),
    "causality": (
        lambda: {"model": changed(is_decoder=True)},
        "config.is_decoder is False, not Tr",
    ),
    "implementation": (
        lambda: {"model": changed(_attn_implementation="eager")},
        "attention is 'sdpa', not 'eager'",
    ),
    "one weight": (lambda: {"model": one_weight()}, "weights is '"),
    "an attribute": (lambda: {"model": outside_the_configuration()}, "modules is '"),
    "truncation side": (
        lambda: {"tokenizer": tokens(truncation_side="left")},
        "truncation_side is 'right', not 'left'",
    ),
    "length": (lambda: {"tokenizer": tokens(model_max_length=9)}, "model_max_length is 512, not 9"),
    "special tokens": (
        lambda: {"tokenizer": tokens(mask_token="[UNK]")},
        "special_tokens_map.mask_token is '[MASK]', not '[UNK]'",
    ),
    "batches": (lambda: {"batch_tokens": 41}, "batch_tokens is 40, not 41"),
    "probes": (lambda: {"observers": [HiddenTokenAttribution(3)]}, "probes is 2, not 3"),
    "a library": (lambda: {"versions": {"torch": "0"}}, "differs in its versions: "),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_scan_that_changed_is_not_gone_on_with(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = CHANGES[kind]
    settings = SETTINGS | {"observers": [HiddenTokenAttribution(2)], "out": tmp_path}
    parts = {"model": model(), "tokenizer": tokenizer()}
    attnlens_scan(corpus=texts(16), **parts, **settings)
    change = make()
    if "versions" in change:
        versions = change.pop("versions")
        monkeypatch.setattr("attnlens.corpus.scanning.versions", lambda: versions)
    with pytest.raises(InputError) as refused:
        attnlens_scan(corpus=texts(16), **parts | settings | change)
    assert "belongs to another scan" in str(refused.value) and message in str(refused.value)


def test_what_changed_not_is_gone_on_with(tmp_path: Path) -> None:
    """Folder of the model, and what calls leave behind in a tokenizer."""
    parts = {"model": model(), "tokenizer": tokenizer()}
    attnlens_scan(corpus=texts(16), **parts, **SETTINGS, out=tmp_path / "out")
    parts["model"].save_pretrained(tmp_path / "moved")
    moved = BertModel.from_pretrained(tmp_path / "moved").eval()
    used = tokenizer()
    used(["a b c", "d"], truncation=True, max_length=4, padding=True)
    again = attnlens_scan(moved, used, texts(16), **SETTINGS, out=tmp_path / "out")
    assert again.counts.records == 16


def test_settings_that_are_objects_are_part_of_what_a_scan_is(tmp_path: Path) -> None:
    def looking(epochs: int, words: torch.nn.Embedding) -> list[Any]:
        return [TokenIdentifiability(words=words, training=MapTraining(max_epochs=epochs))]

    reads, words = model(), tokenizer()
    first = reads.get_input_embeddings()
    attnlens_scan(reads, words, texts(16), looking(3, first), **SETTINGS, out=tmp_path)
    attnlens_scan(reads, words, texts(16), looking(3, first), **SETTINGS, out=tmp_path)
    other = torch.nn.Embedding(*first.weight.shape)
    for again, message in (
        (looking(4, first), "training.max_epochs is 3, not 4"),
        (looking(3, other), "words is '"),
        ([HeadStatistics()], "class is 'TokenIdentifiability', not 'HeadStatistics'"),
    ):
        with pytest.raises(InputError, match=message):
            attnlens_scan(reads, words, texts(16), again, **SETTINGS, out=tmp_path)


def test_a_lost_process_ends_the_others_with_a_sentence(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = (
        "import os; open('pid' + os.environ['RANK'], 'w').write(str(os.getpid())); "
        "from attnlens.cli import main; main()"
    )
    (tmp_path / "many.jsonl").write_text(f"{(place / 'rows.jsonl').read_text()}\n" * 100)
    run = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "--no-python", sys.executable, "-c", entry, *arguments(place, Path("out")),
    ]  # fmt: skip
    run[run.index(place / "rows.jsonl")] = "many.jsonl"
    process = subprocess.Popen([*map(str, run)], stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    deadline = time.monotonic() + 1200
    while len(list(Path().glob("out/*.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(Path("pid1").read_text()), signal.SIGKILL)
    said = process.communicate(timeout=1200)[1]
    assert process.returncode != 0
    assert "The same command goes on from the last checkpoint in out." in said
    assert not Path("out/scan.json").exists()
