"""What commands compute, called from Python."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import attnlens
from attnlens import HeadStatistics, HiddenTokenAttribution, Lens
from attnlens.checking import Verdict
from attnlens.corpus import Corpus, Fields
from attnlens.errors import InputError
from attnlens.pruning.scores import head_scores
from attnlens.recipes.compatibility import check_model
from attnlens.recipes.corpus_scan import scan_corpus
from attnlens.recipes.demonstration import report_demo
from attnlens.recipes.head_choice import choose_heads
from attnlens.recipes.head_report import HeadReport, report_heads
from attnlens.recipes.identification import identify_texts
from attnlens.recipes.ingredients import as_json, plain
from attnlens.recipes.page_content import PageContent
from attnlens.recipes.sentence import SentenceAttribution, attribute_sentence
from attnlens.recipes.text_drift import TextDrift, compare_on_texts
from attnlens.recovery import MapTraining
from attnlens.saving import load
from attnlens.texts.batching import TextModel
from attnlens.texts.loading import text_model
from tests.support import scanning

TEXTS = scanning.texts(20)
LONG = " ".join(scanning.WORDS * 3)  # 38 tokens, of which the model reads 32


def statistics_of(model: TextModel, texts: list[str]) -> Any:
    observer = HeadStatistics()
    with Lens(model.model, observer), torch.no_grad():
        for batch in model.batches(model.tokenise(texts), 8):
            model.model(**batch)
    return observer.compute()


def test_a_report_holds_what_the_observer_counts(tiny: TextModel) -> None:
    report = report_heads(tiny, [*TEXTS, LONG], about={"text": "texts.txt"})
    expected = statistics_of(tiny, [*TEXTS, LONG])
    for name, values in expected.tensors().items():
        assert torch.equal(report.statistics.tensors()[name].nan_to_num(7), values.nan_to_num(7))
    assert report.examples == 21 and report.truncated == 1 and report.page is None
    assert report.notes == ("1 of 21 examples were longer than 32 tokens and were cut there.",)
    assert report.settings["text"] == "texts.txt" and report.settings["batch_size"] == 8


def test_a_model_may_be_given_by_its_name(tiny: TextModel, folder: str) -> None:
    by_name, by_hand = report_heads(folder, TEXTS), report_heads(tiny, TEXTS)
    assert by_name.model == folder and by_hand.model == "tiny"
    assert torch.equal(by_name.statistics.entropy, by_hand.statistics.entropy)


def test_progress_is_told_from_none_to_all(tiny: TextModel, folder: str) -> None:
    told: list[tuple[str, int, int]] = []
    page = PageContent(examples=2)
    report_heads(folder, TEXTS, page=page, progress=lambda *entry: told.append(entry))
    assert list(dict.fromkeys(doing for doing, *_ in told)) == [
        f"Loading {folder}",
        "Looking closely",
        "Reading",
    ]
    for doing, total in ((f"Loading {folder}", 1), ("Looking closely", 2), ("Reading", 20)):
        steps = [entry[1:] for entry in told if entry[0] == doing]
        assert steps[0] == (0, total) and steps[-1] == (total, total) and steps == sorted(steps)


def test_a_page_shows_the_first_examples_and_notes_say_so(tiny: TextModel, tmp_path: Path) -> None:
    content = PageContent(heads=(1, 2), examples=3, attribution=True, identifiability=True)
    report = report_heads(
        tiny, scanning.texts(40), page=content, about={"text": ["/home/me/a.txt"]}
    )
    assert report.page is not None and report.notes[-1] == "Maps are of the first 3 of 40 examples."
    report.page.save(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Tokens identified" in html and "Hidden token attribution: own" in html
    assert "a.txt" in html and "/home/me" not in html
    few = report_heads(tiny, TEXTS[:2], page=content)
    assert few.notes[0].startswith("Tokens were not identified.") and few.page is not None


def test_heads_that_a_page_cannot_show_are_refused_before_the_run(tiny: TextModel) -> None:
    told: list[str] = []
    with pytest.raises(InputError, match=r"heads=\[9\]"):
        report_heads(
            tiny, TEXTS, page=PageContent((9,)), progress=lambda doing, *_: told.append(doing)
        )
    assert "Reading" not in told


def test_a_report_is_written_twice(tiny: TextModel, tmp_path: Path) -> None:
    report = report_heads(tiny, TEXTS[:1])  # one token: correlation is not defined everywhere
    report.write(tmp_path)
    saved = load(tmp_path / "head_statistics.safetensors")
    assert torch.equal(saved.entropy, report.statistics.entropy)
    document = json.loads((tmp_path / "head_statistics.json").read_text(encoding="utf-8"))
    assert document.pop("versions")["attnlens"] == attnlens.__version__
    assert document == report.to_dict()


def test_documents_hold_null_for_what_is_no_number() -> None:
    document = {"a": torch.tensor([1.0, math.nan]), "b": (math.inf, {"c": math.nan}), "d": True}
    assert plain(document) == {"a": [1.0, None], "b": [None, {"c": None}], "d": True}


def test_documents_can_be_written_whatever_names_hold() -> None:
    name = "caf\udce9 ▁the NaN"  # a name of a file that is not UTF-8, and a token
    assert json.loads(as_json({"name": name}).encode())["name"] == name


def test_the_demonstration_has_every_head_of_the_packaged_encoder() -> None:
    report = report_demo()
    assert isinstance(report, HeadReport) and report.examples == 12
    assert report.statistics.rank.shape == (6, 12) and report.model == "all-MiniLM-L6-v2"


def test_a_sentence_is_attributed_as_the_observer_does(tiny: TextModel) -> None:
    result = attribute_sentence(tiny, "river stone paper", probes=None)
    observer = HiddenTokenAttribution(None, keep="matrices")
    (batch,) = tiny.batches(tiny.tokenise(["river stone paper"]), 1)
    with Lens(tiny.model, observer), torch.no_grad():
        tiny.model(**batch)
    assert torch.equal(result.contribution, observer.matrices[0].contribution[:, 0])
    assert result.tokens == ("[CLS]", "river", "stone", "paper", "[SEP]")
    document = result.to_dict()
    assert document["layers"] == [1] and document["standard_error"] is None
    assert document["contribution"][0][2] == result.contribution[1][:, 2].tolist()  # of a target
    with pytest.raises(InputError, match=r"Layers lie between -2 and 1\. Got 2"):
        result.to_dict([0, 2])


def test_a_token_that_looks_like_no_number_stays_a_token() -> None:
    share = torch.full((1, 1, 1), math.nan)
    document = SentenceAttribution("m", ("NaN",), 8, share, share).to_dict()
    assert document["tokens"] == ["NaN"] and document["contribution"] == [[[None]]]
    assert json.loads(as_json(document))["tokens"] == ["NaN"]


def test_identification_counts_over_texts_in_any_batches(tiny: TextModel) -> None:
    texts = scanning.texts(40)
    one, other = (identify_texts(tiny, texts, part="heads", batch_size=size) for size in (1, 16))
    assert len(one.heads) == 2 and not one.tokens and not one.witnesses and one.texts == 40
    for alone, together in zip(one.heads, other.heads, strict=True):
        assert torch.equal(alone.identifiable_simplex, together.identifiable_simplex)
        assert torch.equal(alone.nullity, together.nullity)
        assert alone.longest == together.longest == 14
        assert 0 < alone.identifiable_simplex[0] < 1


def test_witnesses_move_attention_of_the_longest_text(tiny: TextModel) -> None:
    told: list[tuple[str, int, int]] = []
    result = identify_texts(
        tiny, TEXTS, part="heads", witness_tokens=10, progress=lambda *entry: told.append(entry)
    )
    assert result.witness_tokens == 10 and len(result.witnesses) == 2
    assert all(layer.simplex_total_variation.min() > 0 for layer in result.witnesses)
    assert max(layer.residual for layer in result.witnesses) <= 1e-10
    assert told[-1] == ("Constructing witnesses", 2, 2)
    json.dumps(result.to_dict(), allow_nan=False)


def test_too_few_texts_for_tokens_are_a_note_unless_tokens_alone_are_wanted(
    tiny: TextModel,
) -> None:
    training = MapTraining(max_epochs=1, width=8)
    both = identify_texts(tiny, TEXTS[:1], training=training)
    assert both.heads and not both.tokens and "split is empty" in both.note
    with pytest.raises(attnlens.AttnLensError, match="split is empty"):
        identify_texts(tiny, TEXTS[:1], part="tokens", training=training)
    enough = identify_texts(tiny, scanning.texts(40), part="tokens", maps=["naive"])
    assert [rates.map for rates in enough.tokens] == ["naive"] and not enough.heads


def moved(tiny: TextModel) -> TextModel:
    """The model with one head of its first layer made another."""
    other = scanning.model()
    other.encoder.layer[0].attention.self.query.weight.data[4:8] *= -1
    return text_model(other, tiny.tokenizer, "moved")


def test_drift_on_texts_is_that_of_the_batches(tiny: TextModel) -> None:
    other = moved(tiny)
    result = compare_on_texts(tiny, other, [*TEXTS, LONG])
    batches = tiny.batches(tiny.tokenise([*TEXTS, LONG]), 8)
    expected = attnlens.compare(tiny.model, other.model, batches)
    assert torch.equal(result.drift.raw_cosine, expected.raw_cosine)
    assert isinstance(result, TextDrift) and result.truncated == 1 and result.examples == 21
    assert (result.model_a, result.model_b) == ("tiny", "moved")
    assert result.to_dict()["drift"]["layers"] == expected.to_dict()["layers"]
    lowest = divmod(int(expected.raw_cosine.argmin()), 4)
    words = f"From tiny to moved, head {lowest[1]} of layer {lowest[0]} moved most: "
    assert result.words("raw_cosine").startswith(words)
    same = compare_on_texts(tiny, tiny, TEXTS)
    assert same.words("raw_cosine") == "tiny and tiny are identical."
    first = result.drift.raw_cosine[0]
    assert int(first.argmin()) == 1 and first[[0, 2, 3]].min() == pytest.approx(1)


def test_models_that_read_other_tokens_cannot_be_compared(tiny: TextModel) -> None:
    class Cut(TextModel):
        def tokenise(self, texts: Any, max_length: int | None = None, pairs: Any = None) -> Any:
            return super().tokenise(texts, 5, pairs)

    other = Cut("other", tiny.model, tiny.tokenizer, tiny.longest)
    with pytest.raises(InputError, match="tiny and other read the text as different tokens"):
        compare_on_texts(tiny, other, TEXTS)


def test_heads_of_lowest_score_are_chosen_and_removed(folder: str, tmp_path: Path) -> None:
    choice = choose_heads(folder, TEXTS, score="output_norm", fraction=0.25, about={"data": "a"})
    assert choice.heads == 8 and len(choice.plan) == 2 and 0 < choice.cosine < 1
    tokens = choice.model.batches(choice.model.tokenise(TEXTS), 8)
    scores = head_scores(choice.model.model, ["output_norm"], list(tokens))["output_norm"]
    lowest = {divmod(int(index), 4) for index in scores.flatten().argsort()[:2]}
    assert {(layer, h) for (_, layer), heads in choice.plan.heads.items() for h in heads} == lowest
    choice.write(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert document["data"] == "a" and document["model"] == folder
    assert document["score"] == "output_norm" and document["fraction"] == 0.25
    report = choice.remove(tmp_path / "pruned")
    assert report.difference < 1e-4
    assert (
        attnlens.pruning.load_pruned(tmp_path / "pruned").num_parameters()
        < scanning.model().num_parameters()
    )


def test_a_scan_takes_the_labels_that_there_are(tiny: TextModel, tmp_path: Path) -> None:
    rows = [{"words": text.split(), "tags": ["N"] * len(text.split())} for text in TEXTS]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    corpus = Corpus(path, Fields(words="words", labels="tags"))
    observers = ["attribution:probes=1"]
    by_default = scan_corpus(tiny, corpus, observers, chunk=8)
    assert by_default.observers[0].compute().labels == ("N", "[CLS]", "[SEP]")
    named = scan_corpus(tiny, corpus, observers, label_names=["[CLS]"], chunk=8)
    assert named.observers[0].compute().labels == ("[CLS]",)
    without = scan_corpus(tiny, Corpus(path, Fields(words="words")), chunk=8)
    assert without.counts.records == 20


def test_a_model_is_checked_by_name_or_as_it_is(folder: str) -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    for model in (folder, BertModel(config).eval()):
        verdict = check_model(model)
        assert isinstance(verdict, Verdict) and verdict.supported


def test_recipes_need_neither_typer_nor_rich() -> None:
    modules = [
        f"attnlens.recipes.{path.stem}"
        for path in (Path(attnlens.__file__).parent / "recipes").glob("*.py")
        if path.stem != "__init__"
    ]
    assert len(modules) >= 9
    absent = "sys.modules['typer'] = sys.modules['rich'] = None"
    code = f"import sys; {absent}; import {', '.join(modules)}"
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1800
    )
    assert finished.returncode == 0, finished.stderr


def test_a_share_of_contributions_that_are_not_finite_is_not_a_number() -> None:
    shares = torch.tensor([[[0.75, 0.6], [0.25, 0.4]]]).repeat(2, 1, 1)
    shares[1, 0, 0] = torch.nan
    sentence = SentenceAttribution("model", ("a", "b"), None, shares, torch.zeros_like(shares))
    assert sentence.not_main[0] == 0.5 and sentence.not_main[1].isnan()
    assert sentence.own[0].tolist() == pytest.approx([0.75, 0.4])
