"""What the README says to run, as it is printed there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from attnlens.demo import model_folder
from tests.support.commands import command

TEXTS = ["Rain again.", "The ferry leaves at seven.", "Nobody claps between the movements."]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
def test_the_snippets_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnlens.demo.paragraphs", lambda: TEXTS)  # shorter ones
    session: dict[str, object] = {}
    snippets = blocks("python")
    assert len(snippets) >= 2
    for snippet in snippets:
        exec(compile(snippet, snippet, "exec"), session)


def test_the_commands_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model and a file for those that are named."""
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("\n\n".join(TEXTS))
    Path("MODEL").symlink_to(model_folder())
    inline = re.findall(r"`(attnlens [a-z]+ MODEL[^`]*)`", README.replace("\n", " "))
    lines = [line for line in "\n".join(blocks("sh")).splitlines() if line.startswith("attnlens")]
    ran = set()
    for line in [*lines, *inline]:
        finished = command(*shlex.split(line)[1:])
        assert finished.code == 0, (line, finished.stderr)
        ran.add(shlex.split(line)[1])
    assert ran == {"report", "check"}
