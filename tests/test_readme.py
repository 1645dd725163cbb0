"""What the README says to run, as it is printed there."""

from __future__ import annotations

import json
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
    assert len(snippets) >= 6
    for snippet in snippets:
        exec(compile(snippet, snippet, "exec"), session)
    assert (tmp_path / "pruned" / "config.json").is_file()


def test_the_commands_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model and files for those that are named; the four shards are each started."""
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("\n\n".join(TEXTS))
    Path("sentences.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS * 3))
    Path("MODEL").symlink_to(model_folder())
    whole = ""
    inline = re.findall(r"`(attnlens [a-z]+ (?:MODEL|A B)[^`]*)`", README.replace("\n", " "))
    printed = "\n".join(blocks("sh")).replace("\\\n", "")
    lines = [line.partition("#")[0] for line in printed.splitlines() if line.startswith("attnlens")]
    names = {"TEXT": TEXTS[1], "A": "MODEL", "B": "MODEL", "DIR": "pruned"}
    ran = set()
    for line in [*lines, *inline]:
        arguments = [names.get(word, word) for word in shlex.split(line)[1:]]
        if arguments[:2] == ["scan", "MODEL"]:
            whole = line
        runs = [arguments]
        if "…" in arguments:
            rest = shlex.split(whole)[2 : shlex.split(whole).index("--output")]
            runs = [
                ["scan", *rest, "--shard", f"{index}/4", "--output", f"part{index}"]
                for index in range(4)
            ]
        for run in runs:
            finished = command(*run)
            assert finished.code == 0, (run, finished.stderr)
            ran.add(run[0])
    assert ran == {"report", "check", "demo", "attribute", "compare", "prune", "identify", "scan",
                   "merge"}  # fmt: skip
    for name in ("report.html", "demo.html", "results/scan.json", "merged/scan.json"):
        assert Path(name).is_file(), name
