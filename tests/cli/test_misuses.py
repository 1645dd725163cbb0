"""Sixty-odd ways to misuse the commands: what each is told, and that nothing is touched."""

from __future__ import annotations

import gzip
import json
import os
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    FNetConfig,
    FNetModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from attnlens.demo import model_folder
from tests.support.commands import command, without_frame

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37}
BERT = {**SMALL, "num_attention_heads": 4, "vocab_size": 30522, "max_position_embeddings": 24}
LONG = "n" * 300


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and files, most of them unfit."""
    root = tmp_path_factory.mktemp("misuses")
    torch.manual_seed(0)
    sound = {
        **SMALL, "num_attention_heads": 4, "conv_dim": (32,), "conv_kernel": (10,),
        "conv_stride": (5,), "num_feat_extract_layers": 1, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    }  # fmt: skip
    vision = {**SMALL, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    models = {
        "bert": BertModel(BertConfig(**BERT)),
        "other": BertModel(BertConfig(**{**BERT, "num_attention_heads": 2})),
        "fnet": FNetModel(FNetConfig(**SMALL)),
        "vision": ViTModel(ViTConfig(**vision)),
        "sound": Wav2Vec2Model(Wav2Vec2Config(**sound)),
    }
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    for name, model in models.items():
        model.save_pretrained(root / name)
        if name not in ("vision", "sound"):
            tokenizer.save_pretrained(root / name)
    weights = (root / "bert" / "model.safetensors").read_bytes()
    config = json.loads((root / "bert" / "config.json").read_text())
    for name, document, content in (
        ("cut", json.dumps(config), weights[: len(weights) // 2]),
        ("resized", json.dumps({**config, "intermediate_size": 40}), weights),
        ("nonsense", "{", weights),
        ("deep", "[" * 100_000, weights),
        ("no-tokenizer", json.dumps(config), weights),
    ):
        (root / name).mkdir()
        (root / name / "config.json").write_text(document)
        (root / name / "model.safetensors").write_bytes(content)
        if name != "no-tokenizer":
            tokenizer.save_pretrained(root / name)
    (root / "empty").mkdir()
    (root / "full").mkdir()
    (root / "full" / "precious").write_text("mine")
    files = {
        "texts.txt": b"The tram slid past the closed cinema.\n\nRain again.\n",
        "nothing.txt": b"",
        "blank.txt": b"\n \n\t\n",
        "latin.txt": b"caf\xe9",
        "binary.txt": weights[:300],
        "half.txt.gz": gzip.compress(b"rain again " * 1000)[:-20],
        "half.txt.zst": b"\x28\xb5\x2f\xfd rubbish",
        "rows.jsonl": b'{"sentence": "Rain again.", "tag": 1}\n{"sentence": "Snow."}\n',
        "bad.jsonl": b'{"text": "Rain again."}\n{"text": \n',
        "twice.csv": b"text,text\none,two\n",
        "open.csv": b'text,"other\none,two\n',
        "letters.doc": b"Rain again.",
    }
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


MISUSES = {
    # of models
    "nothing to read": ("report bert", "Give --text FILE or --sentence TEXT."),
    "no folder": ("report /no/such --sentence Rain", "There is no folder '/no/such'"),
    "a file for a model": ("report texts.txt --sentence Rain", "Give the folder that holds config"),
    "a name too long": (f"report {LONG} --sentence Rain", "nor can a model on the Hub have that"),
    "not on the hub": ("report nobody/nothing --sentence Rain", "only the local cache was"),
    "an empty folder": ("report empty --sentence Rain", "it has no config.json"),
    "weights cut short": ("report cut --sentence Rain", "Cannot load the model of cut"),
    "weights of other sizes": ("report resized --sentence Rain", "not of the sizes that its confi"),
    "no configuration": ("check nonsense", "Cannot load the model of nonsense"),
    "a deep configuration": ("check deep", "Cannot load the model of deep"),
    "no tokenizer": ("report no-tokenizer --sentence Rain", "no-tokenizer has no tokenizer"),
    "pixels": ("attribute vision --sentence Rain", "reads pixels, not text"),
    "sound": ("report sound --sentence Rain", "reads sound, not text"),
    "no attention": ("report fnet --sentence Rain", "no attention matrix"),
    "nothing to check": ("check empty", "it has no config.json"),
    # of texts
    "no file": ("report bert --text none.txt", "itself is given with --sentence"),
    "a sentence for a file": ("attribute bert --text Rain", "itself is given with --sentence"),
    "a folder for a text": ("report bert --text empty", "Cannot read empty: Is a directory"),
    "a binary text": ("report bert --text binary.txt", "it holds a zero byte at character 0"),
    "another encoding": ("report bert --text latin.txt", "not UTF-8: byte 0xe9 at character 3"),
    "a blank text": ("identify bert --text blank.txt", "blank.txt holds no text"),
    "an empty text": ("prune bert --text nothing.txt", "nothing.txt holds no text"),
    "half a gzip": ("report bert --text half.txt.gz", "Cannot read half.txt.gz: Compressed file"),
    "no zstd": ("report bert --text half.txt.zst", "Cannot read half.txt.zst: Unable to"),
    "a file for a sentence": ("attribute bert --sentence texts.txt", "To read it: --text texts.tx"),
    "a blank sentence": ("attribute bert --sentence=", "--sentence is blank"),
    "nothing on standard input": ("report bert --text -", "standard input holds no text"),
    # of outputs
    "a page into a folder": ("report bert --text texts.txt --html empty", "it is a folder"),
    "a page nowhere": ("report bert --text texts.txt --html no/a.html", "there is no folder no"),
    "a page over the text": ("report bert --text texts.txt --html texts.txt", "is read, and outp"),
    "a page over a model": ("report bert --text texts.txt --html bert/config.json", "is read, and"),
    "a page of a long name": (f"demo --html {LONG}", "File name too long"),
    "a page over a device": ("demo --html /dev/null", "it is no ordinary file"),
    "a file for a folder": ("report bert --text texts.txt --output texts.txt", "it is a file, no"),
    "a full folder": ("report bert --text texts.txt --output full", "holds precious. Choose anoth"),
    "the demo's full folder": ("demo --output full", "or pass --overwrite"),
    "the folder of the model": ("report bert --text texts.txt --output bert", "bert is read, and"),
    "the folder of the text": ("report bert --text texts.txt --output .", "holds texts.txt, which"),
    "a folder that cannot be": ("report bert --text texts.txt --output /proc/a", "Cannot write /p"),
    "pruning a model's folder": (
        "prune bert --text texts.txt --output bert --overwrite", "outputs never replace inputs"
    ),
    "pruning into a full folder": ("prune bert --text texts.txt --output full", "is not empty"),
    "a plan into a folder": ("prune bert --text texts.txt --plan empty", "it is a folder"),
    "a plan over a model": ("prune bert --text texts.txt --plan bert/config.json", "is read, and"),
    # of options
    "no such layer": ("report bert --text texts.txt --layers 7", "there are 2 layers"),
    "no layers": ("report bert --text texts.txt --layers ,", "--layers is a list, as in 0,3"),
    "no such layer to show": ("attribute bert --sentence Rain --layers 2", "lie between -2 and 1"),
    "names of heads": ("report bert --text texts.txt --html a.html --heads one", "--heads must be"),
    "heads without a page": ("report bert --text texts.txt --heads 1", "need --html"),
    "no such field": ("report bert --text texts.txt --field ranks", "'effective_fraction'"),
    "too long": ("report bert --text texts.txt --max-length 25", "--max-length must be at least 3"),
    "no batch": ("report bert --text texts.txt --batch-size 0", "--batch-size"),
    "no such option": ("report bert --txt texts.txt", "No such option: --txt"),
    "no such command": ("reprot bert", "Did you mean 'report'?"),
    "too many probes": ("attribute bert --sentence Rain --probes 99", "probes must lie between 1"),
    "no such map": ("identify bert --sentence Rain --map cubic", "'cubic' is not one of 'naive'"),
    "too few tokens": ("identify bert --sentence Rain --part tokens", "split is empty"),
    "a score with labels": ("prune bert --text texts.txt --score gradient", "is not one of 'effec"),
    "models that differ": ("compare bert other --text texts.txt", "heads"),
    # of corpora
    "an empty corpus": ("scan bert --output o --text nothing.txt", "nothing.txt. It is empty"),
    "no such field of text": ("scan bert --output o --text rows.jsonl", "there is 'sentence', 'ta"),
    "no such field of pairs": (
        "scan bert --output o --text rows.jsonl --text-field sentence --pair-field next",
        "no field 'next'; there is 'sentence', 'tag'",
    ),
    "fields of a text": ("scan bert --output o --text texts.txt --pair-field b", "has no fields"),
    "a binary corpus": ("scan bert --output o --text binary.txt", "There is no record in binary"),
    "labels without words": ("scan bert --output o --text rows.jsonl --labels-field a", "of the w"),
    "no such observer": ("scan bert --output o --text texts.txt --observer a", "There are: attrib"),
    "no such setting": (
        "scan bert --output o --text texts.txt --observer attribution:probes=x",
        "probes must be positive, or None for exact. Got 'x'.",
    ),
    "half a shard": ("scan bert --output o --text texts.txt --shard 4", "as in 0/4, the first of"),
    "the first bad record": (
        "scan bert --output o --text bad.jsonl --on-error raise", "bad.jsonl:2: not JSON"
    ),
    "no corpus": ("scan bert --output o --text none.txt", "There is no file none.txt"),
    "no known format": ("scan bert --output o --text letters.doc", "ends in none of .txt"),
    "columns of one name": ("scan bert --output o --text twice.csv", "several columns 'text'"),
    "a quote left open": ("scan bert --output o --text open.csv", "names no columns: not CSV"),
    "files and sentences": ("scan bert --output o --text texts.txt --sentence Rain", "or --senten"),
    "a folder as a table": ("scan bert --output o --text empty --format csv", "data set and no cs"),
    "half a corpus": ("scan bert --output o --text half.txt.gz", "Cannot read half.txt.gz"),
    "a scan into a full folder": ("scan bert --output full --text texts.txt", "or pass --overwrit"),
    "a scan into its model": ("scan bert --output bert --text texts.txt", "bert is read, and"),
    "no shards": ("merge empty --output o", "No shard of a scan is in empty"),
    "no folder of shards": ("merge none --output o", "There is no folder none"),
}  # fmt: skip


def digest(folder: Path) -> str:
    """Names and contents of everything in a folder but what a scan begins with."""
    whole = sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).parts[0] != "o":
            whole.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return whole.hexdigest()


def test_every_misuse_is_told_in_a_sentence_and_nothing_is_touched(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(MISUSES) >= 60
    monkeypatch.chdir(place)
    before = digest(place)
    wrong = {}
    for name, (arguments, sentence) in MISUSES.items():
        finished = command(*arguments.split(), HF_HUB_OFFLINE="1")
        last = without_frame(finished.stderr).strip()
        right = (
            finished.code == 2
            and finished.stdout == ""
            and sentence in last
            and finished.stderr.splitlines()[-1].lower().startswith("error: ")
            and "Traceback" not in last
        )
        if not right:
            wrong[name] = finished
    assert not wrong
    assert digest(place) == before
    assert not list(place.rglob("scan.json")) and not os.path.exists(place / "a.html")
