"""Reading a corpus: every format, every way to be wrong, and what becomes of labels."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnlens
from attnlens import HiddenTokenAttribution, Lens
from attnlens.corpus import Corpus, Fields, Record, Rejected
from attnlens.corpus.chunks import chunks
from attnlens.corpus.readers import entries_of
from attnlens.corpus.sums import ExactSums
from attnlens.corpus.token_labels import TokenLabels
from attnlens.errors import InputError
from attnlens.observer import Observer, SumObserver
from attnlens.texts.loading import text_model
from tests.conftest import Encoder
from tests.support.scanning import model, scan, texts, tokenizer

ROWS: list[dict[str, Any]] = [
    {"text": "A river, wide and slow.", "other": "It bends.", "words": ["A", "river"]},
    {"text": "naïve “quotes”\nand a second line", "other": "é", "words": ["naïve"]},
    {"text": "   ", "other": "blank", "words": ["blank"]},
    {"text": "last", "other": "of four", "words": ["unbelievably", "last"]},
]
LABELS = [["DET", "NOUN"], ["ADJ"], ["X"], ["ADV", "ADJ"]]
ROWS = [row | {"tags": tags} for row, tags in zip(ROWS, LABELS, strict=True)]


def written(folder: Path, kind: str) -> Path:
    """The rows as a file of some kind."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    elif kind in ("csv", "tsv"):
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="," if kind == "csv" else "\t")
            writer.writerow(["other", "text"])
            writer.writerows([row["other"], row["text"]] for row in ROWS)
    elif kind == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "dataset"])
def test_every_format_holds_the_same(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    corpus = Corpus(path, Fields(pair="other"))
    first, second, bad, last = corpus
    assert list(corpus) == [first, second, bad, last]  # it can be read again
    for entry, row in ((first, ROWS[0]), (second, ROWS[1]), (last, ROWS[3])):
        assert isinstance(entry, Record)
        assert (entry.text, entry.pair, entry.labels) == (row["text"], row["other"], None)
    assert isinstance(bad, Rejected) and bad.reason == "'text' is empty"
    # A field of two lines takes two lines, so that a table's fourth record ends in line 6.
    table = kind in ("csv", "tsv")
    assert [entry.line for entry in corpus] == ([2, 4, 5, 6] if table else [1, 2, 3, 4])
    assert str(bad) == f"{path}:{5 if table else 3}: 'text' is empty"
    assert corpus.lines() == (6 if table else 4)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_words_and_labels(tmp_path: Path, kind: str) -> None:
    corpus = Corpus(written(tmp_path, kind), Fields(words="words", labels="tags"))
    assert [entry.text for entry in corpus] == [tuple(row["words"]) for row in ROWS]
    assert [entry.labels for entry in corpus] == [tuple(labels) for labels in LABELS]
    assert corpus.label_names() == ["ADJ", "ADV", "DET", "NOUN", "X"]
    with pytest.raises(InputError, match="the field of the words"):
        Corpus(corpus.files[0][0], Fields(labels="tags"))
    with pytest.raises(InputError, match="fields for both"):
        Corpus(corpus.files[0][0], Fields(words="words", pair="other"))


def test_several_files_of_text(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n  second \n")  # a byte order mark
    two.write_bytes(b"bad \xff byte\nthird")
    corpus = Corpus([one, two])
    assert [str(e) if isinstance(e, Rejected) else (e.text, e.line) for e in corpus] == [
        ("first", 1),
        ("  second ", 3),
        f"{two}:1: 'text' is not UTF-8: byte 0xff at character 4",
        ("third", 2),
    ]
    assert corpus.lines() == 5
    told: list[tuple[int, Rejected]] = []
    assert [c.line for c in chunks(corpus, 2, lambda *entry: told.append(entry))] == [3, 5]
    assert [(index, entry.line) for index, entry in told] == [(1, 1)]


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    longest = 2**20
    for kind, start in (("txt", ""), ("jsonl", ""), ("csv", "text\n")):
        path = tmp_path / f"long.{kind}"
        good = json.dumps({"text": "good"}) if kind == "jsonl" else "good"
        path.write_text(f"{start}{good}\n{'x' * (3 * longest)}\n{good}\n")
        entries = list(Corpus(path))
        assert [type(entry) for entry in entries] == [Record, Rejected, Record]
        assert entries[1].line == entries[0].line + 1 == entries[2].line - 1
        assert "longer than" in str(entries[1]) or "larger than" in str(entries[1])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: Expecting property name"),
        ("nonsense", "not JSON: Expecting value at character 0"),
        ("[" * 100_000, "not readable as JSON"),
        ("9" * 5000, "not readable as JSON"),
        ("[1]", "not an object but a list"),
        ("null", "not an object but null"),
        ("{}", "no field 'text'"),
        ('{"text": 1.5}', "'text' is a number, no text"),
        ('{"text": true}', "'text' is true, no text"),
        ('{"text": {"a": "b"}}', "'text' is an object, no text"),
        ('{"text": "\\t"}', "'text' is empty"),
        ('{"text": "a\\udc00b"}', "'text' is not UTF-8: U+DC00 at character 1"),
        ('{"text": "a"}', "no field 'other'"),
    ],
)
def test_bad_lines_of_json(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'\n{line}\n{{"text": "a", "other": "b"}}')
    bad, good = Corpus(path, Fields(pair="other"))
    assert isinstance(bad, Rejected) and bad.line == 2 and bad.reason.startswith(reason)
    assert isinstance(good, Record) and good.line == 3


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"words": "a b", "tags": []}, "'words' is text, no list of words"),
        ({"words": [], "tags": []}, "'words' is empty"),
        ({"words": ["a", ""], "tags": ["X", "X"]}, "'words' holds empty text where a word"),
        ({"words": ["a", 2], "tags": ["X", "X"]}, "'words' holds a number where a word"),
        ({"words": ["a"]}, "no field 'tags'"),
        ({"words": ["a"], "tags": "X"}, "'tags' is text, no list of labels"),
        ({"words": ["a", "b"], "tags": ["X"]}, "2 words but 1 labels"),
        ({"words": ["a"], "tags": [True]}, "'tags' holds true where a label"),
        ({"words": ["a"], "tags": [None]}, "'tags' holds null where a label"),
    ],
)
def test_bad_words_and_labels(tmp_path: Path, entry: dict[str, Any], reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(entry))
    (bad,) = Corpus(path, Fields(words="words", labels="tags"))
    assert isinstance(bad, Rejected) and bad.reason.startswith(reason)


def test_what_is_no_corpus_is_refused_at_once(tmp_path: Path) -> None:
    folder, unknown, table = tmp_path / "folder", tmp_path / "a.doc", tmp_path / "a.csv"
    folder.mkdir()
    unknown.write_text("text")
    table.write_text("sentence,label\na,b\n")
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "all")
    for files, message in (
        ([], "at least one file"),
        (tmp_path / "nowhere.txt", "There is no file"),
        (unknown, "ends in none of .txt"),
        (table, "has no column 'text'. It has: sentence, label"),
        (tmp_path / "a.parquet", "a.parquet cannot be read: Parquet magic bytes"),
        (folder, "no data set that datasets saved"),
        (tmp_path / "all", "holds the splits train"),
    ):
        with pytest.raises(InputError, match=message):
            list(Corpus(files))
    assert [entry.text for entry in Corpus(unknown, format="text")] == ["text"]
    with pytest.raises(InputError, match="format must be one of text"):
        Corpus(unknown, format="word")  # type: ignore[arg-type]


def test_records_at_hand() -> None:
    record = Record("as it is")
    items = [
        "text",
        ("one", "two"),
        {"text": "one", "pair": "two"},
        {"words": ["a"], "labels": ["X"]},
        record,
        7,
        "",
    ]
    *good, number, empty = entries_of(items)
    assert [(e.text, e.pair, e.labels) for e in good] == [
        ("text", None, None),
        ("one", "two", None),
        ("one", "two", None),
        (("a",), None, ("X",)),
        ("as it is", None, None),
    ]
    assert str(number) == "records:6: not an object but a number"
    assert str(empty) == "records:7: 'text' is empty"


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9))
def test_chunks_hold_every_record_once(kinds: list[bool], size: int) -> None:
    entries = [
        Record(f"text {n}", line=n) if good else Rejected("", n, "bad")
        for n, good in enumerate(kinds, 1)
    ]
    told: list[tuple[int, Rejected]] = []
    found = list(chunks(entries, size, lambda *entry: told.append(entry)))
    records = [entry for entry in entries if isinstance(entry, Record)]
    assert [record for chunk in found for record in chunk.records] == records
    assert [entry for _, entry in told] == [e for e in entries if isinstance(e, Rejected)]
    for index, entry in told:
        assert index == sum(record.line < entry.line for record in records) // size
    assert [chunk.index for chunk in found] == list(range(len(found)))
    assert all(len(chunk.records) == size for chunk in found[:-1])
    assert len({chunk.digest for chunk in found}) == len(found)
    clean = list(chunks(records, size, lambda *entry: told.append(entry)))
    assert [chunk.digest for chunk in clean] == [chunk.digest for chunk in found]
    assert len(told) == len(entries) - len(records)


class Total(SumObserver):
    """Sums of numbers that a test feeds it."""

    def update(self, capture: Any) -> None:
        raise NotImplementedError

    def compute(self) -> torch.Tensor:
        return self.sums[("stack", 0)]["value"]


def fed(parts: Sequence[Sequence[float]]) -> ExactSums:
    sums = ExactSums(Total())
    for part in parts:
        with sums.chunk():
            for value in part:
                number = torch.tensor([value], dtype=torch.float64)
                counts = {"value": number, "value_max": number, "count": number.long() * 0 + 1}
                sums.observer.add(("stack", 0), counts)  # type: ignore[attr-defined]
    return sums


sizes = st.floats(1e-6, 1e6)
numbers = sizes | sizes.map(lambda size: -size) | st.just(0.0)


@given(st.lists(st.lists(numbers, min_size=1, max_size=3), min_size=1, max_size=12), st.data())
def test_sums_do_not_depend_on_their_order(parts: list[list[float]], data: st.DataObject) -> None:
    """And they are the sum of the chunks, rounded once."""
    exact = sum(Fraction(fed([part]).observer.compute().item()) for part in parts)
    whole = fed(parts)
    assert whole.observer.compute().item() == float(exact)
    shuffled = data.draw(st.permutations(parts))
    cut = data.draw(st.integers(0, len(parts)))
    merged = ExactSums(Total())
    for some in (shuffled[:cut], shuffled[cut:]):
        state = fed(some).state_dict()
        again = ExactSums(Total())
        again.load_state_dict(state)
        merged.add_state(again.state_dict())
    left, right = merged.observer.state_dict(), whole.observer.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_sums_that_are_not_finite_stay_so() -> None:
    for value in (torch.inf, torch.nan):
        found = fed([[1.0], [value], [2.0]]).observer.compute()
        assert str(found.item()) == str(value)


def test_labels_of_words_are_those_of_their_tokens(minilm: Encoder) -> None:
    names = ("NOUN", "ADJ", "[SEP]")
    observer = HiddenTokenAttribution(2, label_names=names)
    records = [
        Record(("unbelievably", "rivers"), labels=("ADJ", "NOUN")),
        Record(("a",), labels=("DET",)),
        Record(("river", "a"), labels=(0, 1)),
    ]
    reads = text_model(minilm.model, minilm.tokenizer)
    encoded = reads.tokenise([record.text for record in records])
    words = minilm.tokenizer.convert_ids_to_tokens(encoded.columns["input_ids"][0])
    assert words == ["[CLS]", "un", "##bel", "##ie", "##va", "##bly", "rivers", "[SEP]"]
    for side, expected in (
        ("right", [[-1, 1, 1, 1, 1, 1, 0, 2], [-1, 0, 1, 2] + 4 * [-1], [-1, -1, 2] + 5 * [-1]]),
        ("left", [[-1, 1, 1, 1, 1, 1, 0, 2], 4 * [-1] + [-1, 0, 1, 2], 5 * [-1] + [-1, -1, 2]]),
    ):
        minilm.tokenizer.padding_side = side
        try:
            labels = TokenLabels([observer], minilm.tokenizer)
            batch = reads.padded(encoded, [0, 2, 1])
            with labels.given(encoded, [0, 2, 1], records):
                assert observer.labels.tolist() == expected
                assert observer.labels.shape == batch["input_ids"].shape
        finally:
            minilm.tokenizer.padding_side = "right"
    assert observer.labels is None


def test_observers_with_labels_of_their_own_keep_them(minilm: Encoder) -> None:
    own = HiddenTokenAttribution(2, label_names=("a",), labels=lambda inputs: inputs["input_ids"])
    plain: list[Observer] = [own, HiddenTokenAttribution(2)]
    before = own.labels
    encoded = text_model(minilm.model, minilm.tokenizer).tokenise(["a river"])
    with TokenLabels(plain, minilm.tokenizer).given(encoded, [0], [Record("a river")]):
        assert own.labels is before and plain[1].labels is None  # type: ignore[attr-defined]


def test_pairs_and_labels_reach_the_model_and_its_observers() -> None:
    pairs = [("a river", "it bends"), ("stone", "paper and a window")]
    reads, words, calls = model(), tokenizer(), []
    reads.register_forward_hook(lambda *call: calls.append(call[2]), with_kwargs=True)
    attnlens.scan(reads, words, pairs)
    first, second = zip(*pairs, strict=True)
    order = [1, 0]  # the longest first
    expected = words([first[i] for i in order], [second[i] for i in order], padding=True)
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert calls[0][name].tolist() == expected[name]
    labelled = [
        {"words": ["river", "unbelievably", "window"], "labels": ["NOUN", "ADV", "NOUN"]},
        {"words": ["garden", "letter"], "labels": ["NOUN", "VERB"]},
    ]
    names = ("NOUN", "ADV", "[CLS]", "[SEP]")
    found = scan(labelled, [HiddenTokenAttribution(2, label_names=names)])
    result = found.observers[0].compute()
    assert result.labels == names
    assert result.tokens[0].tolist() == [3, 5, 2, 2]
    plain = scan(["river window"], [HiddenTokenAttribution(2, label_names=names)])
    assert plain.observers[0].compute().tokens[0].tolist() == [0, 0, 1, 1]


def test_probes_follow_from_the_place_of_a_pass() -> None:
    """`seek()` makes a pass draw what it would have drawn after those before it."""
    reads, words = model(), tokenizer()
    passes = [words(texts(6, seed)[2:], padding=True, return_tensors="pt") for seed in range(3)]

    def seen(batch: Any, place: int | None, seed: int = 0) -> torch.Tensor:
        observer = HiddenTokenAttribution(2, seed=seed)
        if place is not None:
            observer.seek(place)
        with Lens(reads, observer), torch.no_grad():
            reads(**batch)
        return observer.compute().own

    assert torch.equal(seen(passes[0], 5), seen(passes[0], None, seed=5))
    assert not torch.equal(seen(passes[0], 5), seen(passes[0], 4))
    through = HiddenTokenAttribution(2)
    with Lens(reads, through), torch.no_grad():
        for batch in passes:
            reads(**batch)
    apart = HiddenTokenAttribution(2)
    for place in (2, 0, 1):
        apart.seek(place)
        with Lens(reads, apart), torch.no_grad():
            reads(**passes[place])
    torch.testing.assert_close(apart.compute().own, through.compute().own, rtol=1e-12, atol=0)
