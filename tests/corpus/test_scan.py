"""Scans: the same result however a corpus is interrupted, shared out or soiled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import attnlens
from attnlens import (
    EffectiveAttention,
    HeadImportance,
    HeadStatistics,
    HiddenTokenAttribution,
    Lens,
    TokenIdentifiability,
    TokenSaliency,
)
from attnlens.corpus import Scan, merge_shards
from attnlens.corpus.shards import Shard
from attnlens.errors import InputError
from attnlens.files import load_state, save_state
from attnlens.saving import load, read_header
from tests.support.scanning import COUNT, SETTINGS, model, observers, scan, slowly, texts, tokenizer


def states(found: Scan) -> list[dict[str, torch.Tensor]]:
    return [observer.state_dict() for observer in found.observers]


def same(found: Scan, expected: Scan) -> None:
    """Equal to the last bit, and something to be equal in."""
    assert found.counts == expected.counts
    for left, right in zip(states(found), states(expected), strict=True):
        assert left.keys() == right.keys() and len(right) > 5
        for name in right:
            if not name.startswith("store."):  # a sample, in whatever order
                assert torch.equal(left[name].nan_to_num(7.0), right[name].nan_to_num(7.0)), name
    stores = [scan.observers[2].store.identity() for scan in (found, expected)]
    assert stores[0] == stores[1]


@pytest.fixture(scope="module")
def whole() -> Scan:
    """The corpus in one process, undisturbed."""
    return scan(texts())


def counted(corpus: Any, out: Path) -> tuple[Scan, int]:
    """A scan and its number of batches."""
    reads = model()
    calls: list[int] = []
    reads.register_forward_hook(lambda *_: calls.append(1))
    found = attnlens.scan(reads, tokenizer(), corpus, observers(), out=out, **SETTINGS)
    return found, len(calls)


def child(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.scanning", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_scan_is_a_lens_over_the_batches() -> None:
    """Against batches of one, made by hand."""
    found = scan(texts(12), [HeadStatistics(), HiddenTokenAttribution(None)])
    expected = HeadStatistics(), HiddenTokenAttribution(None)
    reads, words = model(), tokenizer()
    tokens = 0
    with Lens(reads, *expected), torch.no_grad():
        for text in texts(12):
            batch = words(text, return_tensors="pt")
            tokens += batch["input_ids"].numel()
            reads(**batch)
    assert (found.counts.records, found.counts.tokens) == (12, tokens)
    assert (found.counts.truncated, found.counts.rejected) == (0, 0)
    for ours, theirs in zip(found.observers, expected, strict=True):
        for name, value in theirs.compute().tensors().items():
            mine = ours.compute().tensors()[name]
            torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_killed_at_random_and_resumed(whole: Scan, tmp_path: Path) -> None:
    process = child("slow", tmp_path)
    checkpoint = tmp_path / "shard-0-of-1.safetensors"
    deadline = time.monotonic() + 1200
    while not checkpoint.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.Random(os.getpid()).uniform(0, 0.8))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    done = load_state(checkpoint)[1]["corpus"]["chunks"]
    assert 1 <= done < 8 and not (tmp_path / "scan.json").exists()
    found, batches = counted(iter(texts()), tmp_path)
    same(found, whole)
    assert 0 < batches <= 8 * (8 - done)  # it did not begin anew
    again, batches = counted(texts(), tmp_path)
    same(again, whole)
    assert batches == 0


def test_two_processes_and_four_shards_are_one_process(whole: Scan, tmp_path: Path) -> None:
    """One of the two processes is killed first, and both are started again."""
    finished = child("ranks", tmp_path / "ranks")
    assert finished.wait() == 0, finished.stderr.read()
    for index in (2, 0, 3, 1):
        part = scan(texts(), out=tmp_path / str(index), shard=(index, 4))
        assert not part.shard.complete and part.results == {}
    folders = [tmp_path / str(index) for index in (3, 1, 0, 2)]
    merged = merge_shards(tmp_path / "merged", folders, observers())
    same(merged, whole)
    expected = [observer.compute() for observer in whole.observers]
    for folder in ("ranks", "merged"):
        for name, result in zip(
            ("head-statistics", "hidden-token-attribution", "token-identifiability"),
            expected,
            strict=True,
        ):
            found = load(tmp_path / folder / f"{name}.safetensors")
            for quantity, value in result.tensors().items():
                mine = found.tensors()[quantity]
                if name == "token-identifiability":  # its sample is visited in another order
                    torch.testing.assert_close(mine, value, rtol=1e-6, atol=1e-6, equal_nan=True)
                else:
                    assert torch.equal(mine.nan_to_num(7.0), value.nan_to_num(7.0)), quantity
        document = json.loads((tmp_path / folder / "scan.json").read_text())
        assert document["counts"]["records"] == COUNT


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_malformed_records_cost_nothing_but_lines(tmp_path: Path, kind: str) -> None:
    """1,000 among 10,000; the results are those of the same corpus without them."""
    good, bad = {"jsonl": _jsonl, "csv": _csv}[kind]
    count = 10_000 if kind == "jsonl" else 1_000
    clean, soiled = tmp_path / f"clean.{kind}", tmp_path / f"soiled.{kind}"
    head = ["number,text"] if kind == "csv" else []
    lines = [good(n, text) for n, text in enumerate(texts(count * 9 // 10))]
    clean.write_text("\n".join(head + lines) + "\n", encoding="utf-8")
    where = sorted(random.Random(0).sample(range(count), count // 10))
    mixed, rest = [], iter(lines)
    for n in range(count):
        mixed.append(bad(n) if n in set(where) else next(rest).encode())
    soiled.write_bytes(b"\n".join([line.encode() for line in head] + mixed) + b"\n")
    told: list[Any] = []
    settings = {"chunk": 1024, "batch_size": 256, "batch_tokens": 4096}
    runs = [
        scan(
            path,
            [HeadStatistics(fields="null_space")],
            out=tmp_path / path.stem,
            **settings,
            **hear,
        )
        for path, hear in ((clean, {}), (soiled, {"report": told.append}))
    ]
    for name, tensor in states(runs[0])[0].items():
        assert torch.equal(states(runs[1])[0][name], tensor), name
    assert [run.counts.rejected for run in runs] == [0, count // 10]
    log = (tmp_path / "soiled" / "shard-0-of-1.rejected.txt").read_text().splitlines()
    assert log == [str(entry) for entry in told]
    assert [entry.line - 1 - len(head) for entry in told] == where
    assert all(line.startswith(f"{soiled}:") and line.count(": ") >= 1 for line in log)
    assert not (tmp_path / "clean" / "shard-0-of-1.rejected.txt").exists()
    with pytest.raises(InputError, match=rf"^{soiled}:{where[0] + 1 + len(head)}: "):
        scan(soiled, on_error="raise")


def _json_line(n: int, text: str) -> str:
    return json.dumps({"number": n, "text": text})


def _bad_json(n: int) -> bytes:
    kinds = [
        b'{"text": "cut',
        b"[1, 2]",
        b'{"number": 3}',
        b'{"text": 7}',
        b'{"text": "  "}',
        b'{"text": "\xff"}',
        rb'{"text": "\ud800"}',
        b"[" * 100_000,
    ]
    return kinds[n % len(kinds)]


def _csv_line(n: int, text: str) -> str:
    return f'{n},"{text}"'


def _bad_csv(n: int) -> bytes:
    return [b"1", b"1,2,3", b"1,", b'"1"2,river', b"1,\xff"][n % 5]


_jsonl, _csv = (_json_line, _bad_json), (_csv_line, _bad_csv)


def test_a_resumed_scan_tells_only_of_what_is_new(tmp_path: Path) -> None:
    soiled = [entry for text in texts(60) for entry in (text, " ")]

    def breaking() -> Iterator[str]:
        yield from soiled[:90]
        raise KeyboardInterrupt

    first: list[Any] = []
    second: list[Any] = []
    looking = [HeadStatistics()]
    with pytest.raises(KeyboardInterrupt):
        scan(breaking(), looking, out=tmp_path, checkpoint_every=0.0, report=first.append)
    assert [entry.line for entry in first] == list(range(2, 91, 2))
    found = scan(soiled, looking, out=tmp_path, report=second.append)
    # From the sixth chunk of eight records on, which had not been seen to its end.
    assert [entry.line for entry in second] == list(range(80, 121, 2))
    log = (tmp_path / "shard-0-of-1.rejected.txt").read_text().splitlines()
    assert len(log) == found.counts.rejected == 60
    expected = scan(texts(60), [HeadStatistics()])
    for name, tensor in states(expected)[0].items():
        assert torch.equal(states(found)[0][name], tensor), name


def test_a_chunk_that_fails_leaves_no_trace() -> None:
    looking = [HeadStatistics()]
    reads = model()
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of luck")

    reads.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="luck"):
        attnlens.scan(reads, tokenizer(), texts(64), looking, **SETTINGS)
    assert looking[0].compute().examples.eq(8).all()  # the first chunk


@pytest.mark.parametrize("form", [list, iter, Path])
def test_a_bar_begins_where_an_interrupted_scan_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: Any
) -> None:
    looking = ["head-statistics"]
    corpus: Any = form(texts(24)) if form is not Path else tmp_path / "texts.txt"
    if form is Path:
        corpus.write_text("\n".join(texts(24)))
    scan(texts(8), looking, out=tmp_path / "out")
    assert "line" not in capsys.readouterr().err
    scan(corpus, looking, out=tmp_path / "out", progress=True)
    shown = capsys.readouterr().err
    assert ("8line" if form is iter else "| 8/24 [") in shown
    assert ("24line" if form is iter else "| 24/24 [") in shown


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    part = tmp_path / ".shard-0-of-1.safetensors.0123abcd.part"
    part.write_bytes(b"half")
    scan(texts(8), ["head-statistics"], out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".shard-0-of-1.lock", "head-statistics.safetensors", "scan.json",
        "shard-0-of-1.safetensors",
    ]  # fmt: skip


def test_maps_that_are_kept_are_merged_too(tmp_path: Path) -> None:
    looking = "effective-attention:layers=[1],heads=[2]"
    for index in range(2):
        scan(texts(40), [looking], out=tmp_path / str(index), shard=(index, 2))
    merged = merge_shards(tmp_path / "both", [tmp_path / "0", tmp_path / "1"])
    whole = scan(texts(40), [looking], out=tmp_path / "whole")
    again = scan(texts(40), [looking], out=tmp_path / "whole")

    def maps(found: Scan) -> list[list[float]]:
        kept = found.results["effective-attention"]
        return sorted(m.effective.flatten().tolist() for m in kept)

    assert maps(merged) == maps(whole) == maps(again)
    assert len(maps(whole)) >= 10 and load(tmp_path / "both" / "effective-attention.safetensors")


def test_a_longer_corpus_goes_on_where_its_beginning_ended(tmp_path: Path) -> None:
    scan(texts(48), [HeadStatistics()], out=tmp_path)
    found = scan(texts(60), [HeadStatistics()], out=tmp_path)
    expected = scan(texts(60), [HeadStatistics()])
    for name, tensor in states(expected)[0].items():
        assert torch.equal(states(found)[0][name], tensor), name


def test_random_states_and_the_model_are_left_alone(tmp_path: Path) -> None:
    reads = model()
    before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy())
    weights = {name: tensor.clone() for name, tensor in reads.state_dict().items()}
    attnlens.scan(reads, tokenizer(), texts(20), observers(), out=tmp_path, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (numpy.random.get_state()[1] == before[2]).all()
    assert not reads._forward_hooks and not reads.training
    for name, tensor in reads.state_dict().items():
        assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize("kind", [HeadStatistics, HeadImportance, TokenSaliency,
                                  HiddenTokenAttribution, TokenIdentifiability,
                                  EffectiveAttention])  # fmt: skip
def test_the_state_of_every_observer_fits_into_a_file(kind: type, tmp_path: Path) -> None:
    observer = kind()
    reads = model()
    batch = tokenizer()(texts(9), padding=True, return_tensors="pt")
    with Lens(reads, observer):
        reads(**batch).last_hidden_state.square().sum().backward()
    state = observer.state_dict()
    assert state
    save_state(state, tmp_path / "state", {"kind": kind.__name__})
    found, about = load_state(tmp_path / "state")
    assert about == {"kind": kind.__name__} and found.keys() == state.keys()
    fresh = kind()
    fresh.load_state_dict(found)
    for name, tensor in fresh.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor.nan_to_num(7.0), state[name].nan_to_num(7.0)), name


def test_named_observers_take_settings() -> None:
    from attnlens.corpus import named_observer

    made = named_observer("attribution:probes=2,layers=[0,-1],norm=fro", ["NOUN", "[CLS]"])
    assert isinstance(made, HiddenTokenAttribution)
    assert (made.probes, made.layers, made.norm) == (2, {0, -1}, "fro")
    assert made.label_names == ("NOUN", "[CLS]")
    assert isinstance(named_observer("head-statistics"), HeadStatistics)
    assert named_observer("token-identifiability:map=mlp").map == "mlp"


def test_shards_of_health_norms_and_levels_merge_to_the_whole(tmp_path: Path) -> None:
    names = [
        "head-statistics:fields=health",
        "layer-health",
        "layer-statistics",
        "minimal-distribution",
        "norm-statistics",
        "residual-mixing",
    ]
    whole = scan(texts(10), names, out=tmp_path / "whole").results
    for index in range(2):
        scan(texts(10), names, out=tmp_path / str(index), shard=(index, 2))
    merged = merge_shards(tmp_path / "all", [tmp_path / str(index) for index in range(2)]).results
    assert len(whole) == 6 and whole.keys() == merged.keys()
    for name, result in whole.items():
        for field, values in result.tensors().items():
            found = merged[name].tensors()[field]
            atol = 1e-8 if field.startswith("largest") else 1e-12
            torch.testing.assert_close(found, values, rtol=1e-5, atol=atol, equal_nan=True)


def test_a_shard_without_chunks_is_empty_but_mergeable(tmp_path: Path) -> None:
    for index in range(3):
        scan(texts(10), ["head-statistics"], out=tmp_path / str(index), shard=(index, 3))
    merged = merge_shards(tmp_path / "all", [tmp_path / str(index) for index in range(3)])
    assert merged.counts.records == 10 and merged.shard == Shard()
    assert read_header(tmp_path / "all" / "head-statistics.safetensors")["model"] == "BertModel"


def test_sequences_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sync()` of stored sequences, in a group of two that hold the same."""
    found = scan(slowly(texts(20)), [TokenIdentifiability("naive")])
    observer = found.observers[0]
    single = observer.store.tokens
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)

    def gather(parts: list[Any], state: Any, group: Any) -> None:
        parts[:] = [state, state]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    observer.sync()
    assert observer.store.tokens == 2 * single
