"""Scans that are refused, in words: of something else, in pieces that do not fit, or impossible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attnlens
from attnlens import HeadImportance, HeadStatistics, HiddenTokenAttribution, TokenSaliency
from attnlens.attention import Recording
from attnlens.corpus import merge_shards
from attnlens.corpus.shards import Shard
from attnlens.errors import InputError
from attnlens.files import load_state, save_state
from attnlens.saving import load
from tests.support.scanning import SETTINGS, model, scan, texts, tokenizer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scan."""
    out = tmp_path_factory.mktemp("finished")
    settings = SETTINGS | {"out": out, "observers": [HiddenTokenAttribution(1)]}
    attnlens.scan(model(), tokenizer(), texts(32), **settings)
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ["other", *texts(31)]}, "differs in what was seen"),
        ({"texts": texts(28)}, "differs in what was seen"),
        ({"texts": texts(16)}, "ends before"),
        ({"model": 1}, "differs in its model: weights is"),
        ({"batch_size": 5}, "in its settings: batch_size is 4, not 5"),
        ({"max_length": 9}, "in its settings: max_length is None, not 9"),
        ({"observers": [HiddenTokenAttribution(2)]}, "in its observers: probes is 1, not 2"),
        ({"observers": [HeadStatistics()]}, "in its observers: class is"),
        ({"shard": (0, 2)}, "one of 1 shards, and here the corpus is cut into 2"),
    ],
)
def test_another_scan_is_refused_in_words(
    finished: Path, change: dict[str, Any], message: str
) -> None:
    change = dict(change)
    reads, corpus = model(change.pop("model", 0)), change.pop("texts", texts(32))
    settings = SETTINGS | {"out": finished, "observers": [HiddenTokenAttribution(1)]} | change
    with pytest.raises(InputError, match=message):
        attnlens.scan(reads, tokenizer(), corpus, **settings)


def test_a_scan_can_begin_anew(tmp_path: Path) -> None:
    scan(texts(32), [HeadStatistics()], out=tmp_path)
    assert scan(texts(16), ["head-statistics"], out=tmp_path, resume=False).counts.records == 16


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    scan(texts(16), out=tmp_path)
    path = tmp_path / "shard-0-of-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        scan(texts(16), out=tmp_path)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with three shards of a corpus, the third also of another and half finished."""
    root = tmp_path_factory.mktemp("shards")
    for index in range(3):
        scan(texts(40), ["head-statistics"], out=root / str(index), shard=(index, 3))
    scan(texts(30), ["head-statistics"], out=root / "other", shard=(2, 3))
    scan(texts(16), ["head-statistics"], out=root / "two", shard=(1, 2))
    (root / "empty").mkdir()
    (root / "half").mkdir()
    tensors, about = load_state(root / "2" / "shard-2-of-3.safetensors")
    half = root / "half" / "shard-2-of-3.safetensors"
    save_state(tensors, half, about | {"finished": False})
    return root


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ("0 1", "Of 3 shards, these are missing: 2"),
        ("0 0", "same shard"),
        ("0 two", "is one of 2 shards"),
        ("0 1 other", "in its corpus: chunks is 4, not 5, digest is"),
        ("0 1 half", "not finished"),
        ("empty", "No shard of a scan"),
        ("nowhere", "There is no folder"),
    ],
)
def test_shards_that_do_not_make_a_corpus_are_refused(
    shards: Path, tmp_path: Path, folders: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        merge_shards(tmp_path / "merged", [shards / folder for folder in folders.split()])
    assert not (tmp_path / "merged" / "scan.json").exists()


def test_shards_are_merged_by_the_names_of_their_observers(shards: Path, tmp_path: Path) -> None:
    merged = merge_shards(tmp_path / "merged", [shards / str(index) for index in range(3)])
    assert merged.counts.records == 40 and merged.shard == Shard()
    assert merged.results["head-statistics"].examples.eq(40).all()
    scan(texts(8), [HeadStatistics()], out=tmp_path / "object", shard=(0, 1))
    with pytest.raises(InputError, match="given as objects, not by name"):
        merge_shards(tmp_path / "other", [tmp_path / "object"])
    with pytest.raises(InputError, match="in its observers: fields is 'all', not 'null_space'"):
        merge_shards(
            tmp_path / "other", [tmp_path / "object"], [HeadStatistics(fields="null_space")]
        )


def test_states_and_results_are_told_apart(tmp_path: Path) -> None:
    scan(texts(8), ["head-statistics"], out=tmp_path)
    with pytest.raises(InputError, match=r"holds a state, no result\. Use load_state"):
        load(tmp_path / "shard-0-of-1.safetensors")
    with pytest.raises(InputError, match=r"holds HeadStatisticsResult, no state\. Use load"):
        load_state(tmp_path / "head-statistics.safetensors")


def test_what_a_scan_cannot_serve_is_refused() -> None:
    reads, words = model(), tokenizer()
    refused: list[tuple[Any, str]] = [
        (HeadImportance(), "needs a backward pass"),
        (TokenSaliency(), "needs a backward pass"),
        (Recording(), "no state"),
        (HiddenTokenAttribution(2, keep="matrices"), "keep='aggregates'"),
        (HeadStatistics, "instances, or names"),
        ("head-statistic", "No observer 'head-statistic'. There are: attribution, effective"),
        ("attribution:probe=2", "no setting 'probe'"),
        ("attribution:2", "attribution:probes=2"),
        ("attribution:probes=", "attribution:probes=2"),
    ]
    for observer, message in refused:
        with pytest.raises(InputError, match=message):
            attnlens.scan(reads, words, texts(3), [observer])
    for settings, message in (
        ({"chunk": 0}, "chunk must be a positive integer"),
        ({"on_error": "ignore"}, "on_error"),
        ({"checkpoint_every": -1}, "checkpoint_every"),
        ({"shard": (4, 4)}, "shard must be an index"),
        ({"max_length": 2}, "max_length must be at least 3"),
    ):
        with pytest.raises(InputError, match=message):
            attnlens.scan(reads, words, texts(3), **settings)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be mixed"):
        attnlens.scan(reads, words, ["one text", ("a pair", "of texts")])
    with pytest.raises(InputError, match="training mode"):
        attnlens.scan(model().train(), words, texts(3))
    with pytest.raises(InputError, match="Linear is no PreTrainedModel"):
        attnlens.scan(torch.nn.Linear(2, 2), words, texts(3))


def test_processes_that_a_launcher_started_share_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="share a corpus by themselves"):
        scan(texts(3), shard=(0, 2))
