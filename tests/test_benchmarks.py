"""The benchmark runner: no speed without a passed check."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict

import pytest

from benchmarks import __main__ as runner
from benchmarks import picture
from benchmarks.growth import LENGTHS
from benchmarks.registry import CASES, Check, Comparison, case, seconds


@pytest.fixture
def cases(monkeypatch):
    """An empty registry for the duration of a test."""
    monkeypatch.setattr(runner.pkgutil, "iter_modules", lambda path: [])
    kept = dict(CASES)
    CASES.clear()
    yield CASES
    CASES.clear()
    CASES.update(kept)


def register(name, error):
    @case(name)
    def steps():
        """What it measures."""
        yield Check("ours against theirs", error, 1e-5)
        yield Comparison("n = 8", "ours", 2.0, "theirs", 6.0)


def test_no_speed_is_printed_after_a_failed_check(cases, capsys):
    register("wrong", 1e-3)
    assert runner.main([]) == 1
    printed = capsys.readouterr().out
    assert "FAILED ours against theirs: 1.0e-03" in printed and "×" not in printed


def test_an_error_that_is_no_number_fails(cases):
    register("nan", float("nan"))
    assert runner.main([]) == 1


def test_figures_follow_a_passed_check(cases, capsys, tmp_path):
    register("right", 1e-7)
    assert runner.main(["right", "--json", str(tmp_path / "figures.json")]) == 0
    assert "n = 8: ours 2 s, theirs 6 s: 3 ×" in capsys.readouterr().out
    document = json.loads((tmp_path / "figures.json").read_text())
    assert document["machine"]["torch"]
    assert document["cases"][0]["checks"][0]["passed"] is True
    assert document["cases"][0]["comparisons"][0]["ratio"] == 3.0


def test_a_cost_is_the_inverse_of_a_gain():
    assert Comparison("", "ours", 2.0, "theirs", 1.0, ratio_is="cost").ratio == 2.0


def test_an_unknown_case_is_named(cases, capsys):
    register("right", 0.0)
    with pytest.raises(SystemExit, match="2"):
        runner.main(["wrong"])
    assert "no case wrong; there are: right" in capsys.readouterr().err


def test_functions_are_timed_in_turn():
    calls = []
    functions = (lambda: calls.append("a")), (lambda: calls.append("b"))
    times = seconds(*functions, repeats=2, warm_up=1, settling=0.0)
    assert calls == ["a", "b"] * 3
    assert len(times) == 2 and min(times) >= 0


def test_a_short_function_settles_before_it_is_timed():
    clock, taken = [0.0], iter([0.4, 0.06, 0.03, 0.04, 1.0])  # the first, as after other threads

    def run():
        clock[0] += next(taken)

    for expected in (0.035, 1.0):
        times = seconds(run, repeats=1, warm_up=0, clock=lambda: clock[0])
        assert times == [pytest.approx(expected)]


def test_effective_attention_is_a_case_and_its_first_check_passes():
    steps = importlib.import_module("benchmarks.effective_attention").steps()
    assert CASES["effective_attention"].summary.startswith("Maps")
    check = next(steps)
    assert isinstance(check, Check) and check.bar == 1e-5 and check.passed


def test_training_maps_together_is_a_case_and_its_first_check_passes():
    steps = importlib.import_module("benchmarks.identifiability").steps()
    assert CASES["identifiability"].summary.startswith("Maps of all layers")
    check = next(steps)
    assert isinstance(check, Check) and check.bar == 1e-4 and check.passed


def test_the_picture_shows_what_was_measured(tmp_path):
    comparisons = []
    for title, slower in (("null-space fields", 2), ("every field", 3)):
        for place, length in enumerate(LENGTHS):
            own = (f"{title}, forward included", slower * 2.0**place, "bare forward", 2.0**place)
            comparisons.append(asdict(Comparison(f"n = {length}", *own)))
            extra = (f"extra memory, {title}", 1024.0 * slower, "dense [H, n, n]", 1e6, "KiB")
            comparisons.append(asdict(Comparison(f"n = {length}", *extra)))
    comparisons.append(asdict(Comparison("exponent of time", "every field", 1.0, "bare", 1.0, "")))
    seconds, extra = picture.curves(comparisons)
    assert seconds["bare forward"] == [2.0**place for place in range(len(LENGTHS))]
    assert seconds["every field"][-1] == 3 * seconds["bare forward"][-1]
    assert extra == {
        "null-space fields": [2.0] * len(LENGTHS),
        "every field": [3.0] * len(LENGTHS),
    }
    report = {"cases": [{"name": "growth", "comparisons": comparisons}]}
    picture.draw(report, tmp_path / "growth.svg")
    assert "beside the forward pass" in (tmp_path / "growth.svg").read_text()
