"""The example of attribution profiles, on a few short sentences."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "attribution_profile.py"


def test_locality_is_learned(capsys):
    example = runpy.run_path(str(EXAMPLE))
    example["is_locality_learned"](example["SENTENCES"][:2])
    tables = capsys.readouterr().out.split("\n\n")[:3]
    trained, banded, untrained = (
        [
            [float(cell) for cell in line.split()]
            for line in table.splitlines()
            if line[6:7].isdigit()
        ]
        for table in (table.strip("\n") for table in tables)
    )
    assert [len(rows) for rows in (trained, banded, untrained)] == [6, 6, 6]
    for _, own, near, *_, far, _ in trained:
        assert own > near > far
    assert banded[0][4:] == [0.0] * 4  # one layer sees two neighbours
    assert all(abs(row[2] - row[6]) < 0.1 * row[2] for row in untrained)


def test_parts_of_speech(capsys, tmp_path):
    entries = [
        {"words": ["Rain", "fell", "again", "."], "upos": ["NOUN", "VERB", "ADV", "PUNCT"]},
        {"words": ["Nobody", "minded", "."], "upos": ["PRON", "VERB", "PUNCT"]},
    ]
    path = tmp_path / "labelled.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    runpy.run_path(str(EXAMPLE))["by_part_of_speech"](path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert {row[0]: int(row[1]) for row in rows} == {
        "NOUN": 1, "VERB": 2, "ADV": 1, "PUNCT": 2, "PRON": 1,
    }  # fmt: skip
    assert all(0 < float(cell) < 100 for row in rows for cell in row[2:])
