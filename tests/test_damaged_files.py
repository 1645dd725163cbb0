"""Three hundred damaged and hostile files: each is refused in words, or read for what it says."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backports import zstd
from transformers import BertConfig, BertModel

from attnlens import AttnLensError, HeadStatistics, Lens
from attnlens.corpus import Corpus, Record
from attnlens.files import load_state, save_state
from attnlens.pruning import Plan, load_pruned, prune_heads, save_pruned
from attnlens.saving import load, save
from attnlens.texts.loading import load_model
from attnlens.texts.reading import read_examples

TRIALS = 25
HOSTILE = [
    b"",
    b"\0" * 64,
    b"\xff" * 64,
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b"1" + b"0" * 10_000,
    b'{"format": Infinity, "heads": [{"stack": "a", "layer": 1e999, "heads": []}]}',
    b'{"format": 1, "heads": [{"stack": "a", "layer": 1, "heads": [1e999]}]}',
    b'{"format": 1, "heads": {"a": 1}}',
    b'{"format": NaN, "heads": null}',
    rb'{"text": "\ud800"}',
    (2**63 - 1).to_bytes(8, "little") + b"{}",
    (2).to_bytes(8, "little") + b"{}",
    (2).to_bytes(8, "little") + b"[]",
    b'\x18\0\0\0\0\0\0\0{"__metadata__": {"a":1}}',
    b'text,"a\n' * 50,
    b"\xff\xfea",
    b"\xff\xfe\0\xd8",
    b"\x1f\x8b\x08",
    b"\x28\xb5\x2f\xfd",
]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A copy cut short, or with a byte changed, or a stretch of it overwritten, lost or doubled."""
    place = chance.randrange(len(content))
    stretch = chance.randrange(1, 200)
    match chance.choice(["cut", "flip", "overwrite", "lose", "double"]):
        case "cut":
            return content[:place]
        case "flip":
            flipped = content[place] ^ (1 << chance.randrange(8))
            return content[:place] + bytes([flipped]) + content[place + 1 :]
        case "overwrite":
            return content[:place] + chance.randbytes(stretch) + content[place + stretch :]
        case "lose":
            return content[:place] + content[place + stretch :]
    return content[: place + stretch] + content[place:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every kind."""
    root = tmp_path_factory.mktemp("damaged")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=20, max_position_embeddings=16,
    )  # fmt: skip
    model = BertModel(config).eval()
    statistics = HeadStatistics()
    with Lens(model, statistics), torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    save(statistics.compute(), root / "result.safetensors", settings={"a": [1, "é"]})
    save_state(statistics.state_dict(), root / "state.safetensors", {"finished": False})
    model.save_pretrained(root / "model")
    plan = prune_heads(model, {0: [1, 2]}).plan
    save_pruned(model, root / "pruned")
    (root / "plan.json").write_text(json.dumps(plan.to_dict()))
    lines = [f"river stone {n}" for n in range(200)]
    rows = "\n".join(json.dumps({"text": line}) for line in lines)
    table = "text,number\n" + "\n".join(f'"{line}",{n}' for n, line in enumerate(lines))
    (root / "rows.jsonl").write_text(rows)
    (root / "rows.csv").write_text(table)
    (root / "rows.txt").write_text("\n".join(lines))
    (root / "rows.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    packed = zstd.compress("\n".join(lines).encode(), options=checked)
    (root / "rows.txt.zst").write_bytes(packed)
    (root / "rows.utf16.txt").write_bytes("\n".join(lines).encode("utf-16"))
    return root


def sealed(read: Callable[[Path], Any]) -> Callable[[Path, bytes], None]:
    """What holds its own digest is never read once it is damaged."""

    def check(path: Path, content: bytes) -> None:
        read(path)
        raise AssertionError(f"{path} was read")

    return check


def a_plan(path: Path, content: bytes) -> None:
    read = Plan.read(path)
    rows = json.loads(content)["heads"]
    assert read.heads == {(row["stack"], row["layer"]): tuple(row["heads"]) for row in rows}


def a_configuration(path: Path, content: bytes) -> None:
    model = load_model(str(path.parent))
    assert model.config.num_attention_heads == json.loads(content).get("num_attention_heads", 12)


def the_weights(path: Path, content: bytes) -> None:
    """Only a damaged header or a missing part can be told: weights are not sealed."""
    assert load_pruned(path.parent).config.hidden_size == 16


def lines_of_json(path: Path, content: bytes) -> None:
    expected = []
    for line in content.decode("utf-8-sig", "surrogateescape").replace("\r", "\n").split("\n"):
        try:
            entry = json.loads(line)
            entry["text"].encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        expected.append(entry["text"])
    found = [entry.text for entry in Corpus(path) if isinstance(entry, Record)]
    assert found == [text for text in expected if text.strip() and "\0" not in text]


def a_table(path: Path, content: bytes) -> None:
    """Every line that is as it was is read as it was, if the first names the columns."""
    texts = [entry.text for entry in Corpus(path) if isinstance(entry, Record)]
    lines = content.decode("utf-8-sig", "surrogateescape").splitlines()
    whole = [line for line in lines if line.startswith('"river stone ') and line.count('"') == 2]
    assert len(texts) >= len(whole) - 4


def exactly(path: Path, content: bytes) -> None:
    """What holds a checksum is read whole or not at all."""
    assert read_examples(str(path), True) == [f"river stone {n}" for n in range(200)]
    assert len(list(Corpus(path))) == 200


def a_text(path: Path, content: bytes) -> None:
    found = read_examples(str(path), True)
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = content.decode("utf-16" if wide else "utf-8-sig")
    assert found == [line.strip() for line in text.splitlines() if line.strip()]
    assert len([entry for entry in Corpus(path) if isinstance(entry, Record)]) > 0


KINDS: dict[str, tuple[str, Callable[[Path, bytes], None]]] = {
    "results": ("result.safetensors", sealed(load)),
    "states": ("state.safetensors", sealed(load_state)),
    "plans": ("plan.json", a_plan),
    "configurations": ("model/config.json", a_configuration),
    "pruned configurations": ("pruned/config.json", the_weights),
    "pruned weights": ("pruned/model.safetensors", the_weights),
    "corpora of JSON": ("rows.jsonl", lines_of_json),
    "tables": ("rows.csv", a_table),
    "texts": ("rows.txt", a_text),
    "texts in UTF-16": ("rows.utf16.txt", a_text),
    "texts in gzip": ("rows.txt.gz", exactly),
    "texts in zstd": ("rows.txt.zst", exactly),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_read_for_what_they_say(folder: Path, kind: str) -> None:
    name, check = KINDS[kind]
    assert len(KINDS) * (TRIALS + len(HOSTILE)) >= 300
    path = folder / name
    whole = path.read_bytes()
    chance = random.Random(0)
    refused = 0
    try:
        for trial in range(TRIALS + len(HOSTILE)):
            content = HOSTILE[trial - TRIALS] if trial >= TRIALS else damaged(whole, chance)
            path.write_bytes(content)
            try:
                check(path, content)
            except AttnLensError as error:
                refused += 1
                assert path.name in str(error) or str(path.parent) in str(error), trial
    finally:
        path.write_bytes(whole)
    assert refused > 0
