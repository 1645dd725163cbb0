"""The pruning experiment runs, on a fraction of its data."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def test_the_experiment_prints_curves_and_a_gain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib").use("agg")
    example = load("pruning_experiment", monkeypatch)
    sizes = {"TRAIN": 16, "DEV": 4, "SCORED": 2, "EPOCHS": 1, "TOKENS": 12}
    for name, value in {**sizes, "SCORES": ("output_norm", "random")}.items():
        monkeypatch.setattr(example, name, value)
    picture = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["", "--seeds", "2", "--plot", str(picture)])
    example.main()
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert rows["score"].split() == ["score", *(f"{10 * i}%" for i in range(11)), "area"]
    assert rows["output_norm"].count("±") == rows["random"].count("±") == 12
    assert "heads        72 → 36" in printed and "× as fast" in printed
    assert picture.stat().st_size > 0


def test_passages_join_texts_of_one_genre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("genres", monkeypatch)
    path = tmp_path / "texts.jsonl"
    one, other = '{"text": "a b c", "genre": "x"}', '{"text": "d e", "genre": "y"}'
    path.write_text("\n".join([one] * 45 + [other] * 10 + [one] * 20), encoding="utf-8")
    passages = example.read_passages(path)
    assert [(p.genre, len(p.text.split())) for p in passages] == [("x", 60)] * 3
