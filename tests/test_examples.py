"""Every example runs as it stands."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples import own_observer, run_notebook

ROOT = Path(__file__).parent.parent


def run(example: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / example, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_quickstart_prints_a_table_of_six_layers():
    lines = run("quickstart.py").splitlines()
    assert lines[0] == "effective fraction"
    assert [line.split()[:2] for line in lines[2:]] == [["layer", str(i)] for i in range(6)]
    assert all(len(line.split()) == 2 + 12 for line in lines[2:])


def test_quickstart_is_the_example_of_the_readme():
    code = (ROOT / "examples" / "quickstart.py").read_text().split('"""\n', 1)[1].strip()
    assert code in (ROOT / "README.md").read_text()


def test_picture_draws_every_head(tmp_path):
    run("picture.py", str(tmp_path / "heads.svg"))
    drawing = (tmp_path / "heads.svg").read_text()
    assert len(re.findall(r">\d\.\d{3}</text>", drawing)) == 6 * 12
    assert "@font-face" not in drawing


def test_an_observer_of_ones_own_has_two_methods():
    broad, idle, refused = run("own_observer.py").splitlines()
    head, layer, weight = re.match(r"Head (\d+) of layer (\d+) .* (0\.\d{3}) on", broad).groups()
    assert int(layer) < 6 and int(head) < 12 and 0 < float(weight) < 0.5
    assert idle.endswith("computed None.")
    assert "Idle has no state" in refused and "reset(), state_dict(), add_state()" in refused
    own = {n for n, v in vars(own_observer.Idle).items() if inspect.isfunction(v)}
    assert own == {"update", "compute"}


def shown(notebook):
    """What each cell of a notebook shows, numbers apart."""
    outputs = [
        (cell.id, mime, text)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for mime, text in output.data.items()
    ]
    number = r"-?\d+\.\d+(?:e-?\d+)?"
    words = [
        (*place, re.sub(number, "#", text.split("id=&quot;content")[0])) for *place, text in outputs
    ]
    numbers = {
        cell: [float(found) for found in re.findall(number, text)]
        for cell, _, text in outputs
        if "srcdoc" not in text
    }
    return words, numbers


def test_the_notebook_shows_what_is_stored_in_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored, made = nbformat.read(run_notebook.NOTEBOOK, as_version=4), run_notebook.run()
    words, numbers = shown(made)
    assert words == shown(stored)[0]
    for cell, values in shown(stored)[1].items():
        assert numbers[cell] == pytest.approx(values, rel=2e-3, abs=1e-6)
    tables = {cell: text for cell, mime, text in words if mime == "text/html"}
    assert "effective fraction" in tables["c"] and "nullity" in tables["d"]
    assert "output projection" in tables["f"]
    assert tables["k"].startswith("<iframe srcdoc=") and tables["h"].startswith("<iframe srcdoc=")


def test_fine_tuning_ends_with_a_row_for_each_layer(tmp_path):
    lines = run("fine_tune.py", "--steps", "4", "--logs", str(tmp_path)).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("layer  effective"))
    rows = [[float(n) for n in line.replace("→", " ").split()] for line in lines[start + 1 :][:6]]
    assert [row[0] for row in rows] == [0, 1, 2, 3, 4, 5]
    for _, first, last, *others in rows:
        assert 0 < first < 1 and 0 < last < 1 and len(others) == 4 and min(others) > 0
    (events,) = (path for path in tmp_path.rglob("events*") if logged(path))
    assert len(logged(events)["train/attnlens/entropy/layer_05/mean"]) == 4


def logged(events):
    reader = EventAccumulator(str(events)).Reload()
    tags = reader.Tags()["scalars"]
    return {tag: reader.Scalars(tag) for tag in tags if tag.startswith("train/attnlens/")}


def test_identifiability_prints_rates_and_controls_of_every_layer(tmp_path):
    sentences = tmp_path / "sentences.txt"
    words = "the old ferry left early and nobody on the quay saw where it went".split()
    lines = [" ".join([*words[n % 7 : n % 7 + 2 + n % 5], str(n)]) for n in range(45)]
    sentences.write_text("\n".join(lines))
    printed = run("identifiability.py", str(sentences))
    blocks = printed.split("\n\n")
    assert [block.split()[1] for block in blocks[:4]] == ["identified,", "identified:"] + [
        "identified"
    ] * 2
    for block in blocks[:4]:
        assert block.splitlines()[1].split() == ["naive", "linear", "mlp"]
        assert [line.split()[1] for line in block.splitlines()[2:]] == list("012345")
    assert "position alone" in blocks[4] and "45 sentences" in blocks[5]
