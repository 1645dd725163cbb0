"""What the experiments share: the options, the model, the sentences, and where results go."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlens.demo import model_folder, paragraphs
from attnlens.errors import InputError
from attnlens.reporting import figures
from attnlens.texts.batching import TextModel, TokenisedTexts
from attnlens.texts.loading import load_text_model
from attnlens.texts.reading import read_examples

TYPES = ("[CLS]", "[SEP]", "period or comma", "other punctuation", "words")
# What identifies the paper's corpus: pairs and tokens of MRPC's development set.
MRPC = (408, 21_723)
BERT_BASE = {"model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768}


@dataclass(frozen=True)
class Sentence:
    """A sentence or a pair of them; with its words and their parts of speech where known."""

    texts: tuple[str, ...]
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A sentence as the model reads it, and the part of speech of each token or -1."""

    inputs: dict[str, list[int]]
    tags: list[int]

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])


@dataclass
class Setting:
    """One run of the experiments.

    Attributes:
        model: the encoder with its tokenizer.
        sentences: everything in the file.
        options: of the command line.
        figures: files drawn so far.
    """

    model: TextModel
    sentences: list[Sentence]
    options: argparse.Namespace
    figures: list[str] = field(default_factory=list)

    @cached_property
    def tag_names(self) -> list[str]:
        """Parts of speech, if every sentence has them."""
        if not all(sentence.tags for sentence in self.sentences):
            return []
        return sorted({tag for sentence in self.sentences for tag in sentence.tags})

    @cached_property
    def width(self) -> int:
        """The head dimension D."""
        config = self.model.model.config
        return int(config.hidden_size // config.num_attention_heads)

    @cached_property
    def first(self) -> list[Encoded]:
        """The first sentences, as many as `--limit`."""
        return self.encode(self.sentences[: self.options.limit])

    @cached_property
    def type_of_token(self) -> Tensor:
        """Place in `TYPES` of every token id."""
        tokenizer = self.model.tokenizer
        special = {tokenizer.cls_token_id: 0, tokenizer.sep_token_id: 1}
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        types = [special.get(place, _type(token)) for place, token in enumerate(tokens)]
        return torch.tensor(types)

    @cached_property
    def is_the_papers(self) -> bool:
        """Whether model and sentences are those of the paper: BERT-base on MRPC."""
        config = self.model.model.config
        alike = all(getattr(config, name, None) == value for name, value in BERT_BASE.items())
        return alike and (len(self.first), sum(map(len, self.first))) == MRPC

    def encode(self, sentences: Sequence[Sentence]) -> list[Encoded]:
        """Tokenise sentences, cut to what the model can read."""
        names = self.tag_names
        return [self._encode(sentence, names) for sentence in sentences]

    def batches(
        self, encoded: Sequence[Encoded], size: int = 0
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Pad sentences of similar length together; yields inputs and parts of speech `[B, K]`."""
        columns = {name: [e.inputs[name] for e in encoded] for name in encoded[0].inputs}
        texts = TokenisedTexts(columns, truncated=0)
        for group in texts.groups(size or self.options.batch_size):
            longest = len(encoded[group[0]])
            tags = [encoded[i].tags + [-1] * (longest - len(encoded[i])) for i in group]
            yield self.model.padded(texts, group), torch.tensor(tags)

    def draw(self, name: str, figure: str, *arguments: Any, **settings: Any) -> None:
        """Save one of the package's figures, if matplotlib is installed."""
        try:
            axes = getattr(figures, figure)(*arguments, **settings)
        except InputError as error:
            print(f"No figure {name}: {error}")
            return
        axes.figure.savefig(self.options.out / f"{name}.png")
        self.figures.append(f"{name}.png")

    def _encode(self, sentence: Sentence, names: list[str]) -> Encoded:
        first, *second = sentence.texts
        texts = self.model.tokenise([sentence.words if names else first], pairs=second or None)
        inputs = {name: list(rows[0]) for name, rows in texts.columns.items()}
        places = [names.index(tag) for tag in sentence.tags] if names else []
        words = texts.words[0] if texts.words else [None] * len(inputs["input_ids"])
        return Encoded(inputs, [-1 if word is None else places[word] for word in words])


def prepare(description: str, arguments: list[str] | None = None) -> Setting:
    """Read the command line, load the model, read the sentences."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="", help="folder or name on the Hub; a packaged one")
    parser.add_argument("--data", type=Path, help="lines or JSON lines; packaged paragraphs")
    parser.add_argument("--limit", type=int, default=100, help="sentences to look at")
    parser.add_argument("--out", type=Path, default=Path("paper-results"), help="folder to write")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--attributed", type=int, default=20, help="of them, to attribute: slow")
    parser.add_argument("--probes", type=int, default=2, help="of Hidden Token Attribution")
    parser.add_argument("--thorough", action="store_true", help="train maps as long as the paper")
    parser.add_argument("--halves", action="store_true", help="check that halves merge to a whole")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    sentences = read(options.data)
    return Setting(load_text_model(options.model or str(model_folder())), sentences, options)


def read(file: Path | None) -> list[Sentence]:
    """Read a file: a sentence a line, a pair with a tab between, or JSON objects.

    Objects hold `text` or `sentence`, or for a pair `sentence1` and `sentence2`; beside them
    lists `words` and `upos`, if parts of speech are known.
    """
    if file is None:
        whole = paragraphs()
        parts = [part for text in whole for part in re.split(r"(?<=[.?!]) ", text)]
        return [Sentence((text,)) for text in [*parts, *whole]]
    lines = read_examples(str(file), one_per_line=True)
    if file.suffix in (".jsonl", ".json"):
        return [_of_record(json.loads(line)) for line in lines]
    return [Sentence(tuple(line.split("\t")[:2])) for line in lines]


def report(setting: Setting, name: str, run: Callable[[Setting], dict[str, Any]]) -> None:
    """Run an experiment, print how long it took, and write its numbers."""
    start = time.perf_counter()
    setting.figures = []
    numbers = run(setting)
    seconds = time.perf_counter() - start
    document = {
        "experiment": name,
        "model": setting.model.name,
        "data": "packaged paragraphs"
        if setting.options.data is None
        else str(setting.options.data),
        "seconds": seconds,
        "figures": setting.figures,
        **numbers,
    }
    path = setting.options.out / f"{name}.json"
    path.write_text(json.dumps(_plain(document), indent=1, ensure_ascii=False) + "\n")
    print(f"\n{name}: {seconds:.0f} s, written to {path}\n")


def print_layers(title: str, columns: Sequence[tuple[str, Any]], places: int = 3) -> None:
    """Print named numbers `[L]`, a row for each layer."""
    widths = [max(len(name), places + 4) for name, _ in columns]
    names = "  ".join(f"{name:>{w}}" for (name, _), w in zip(columns, widths, strict=True))
    print(f"\n{title}\n  layer  {names}")
    rows = zip(*(list(values) for _, values in columns), strict=True)
    for layer, row in enumerate(rows):
        cells = (f"{float(cell):{w}.{places}f}" for cell, w in zip(row, widths, strict=True))
        print(f"  {layer:5}  " + "  ".join(cells))


def _of_record(record: dict[str, Any]) -> Sentence:
    if "sentence1" in record:
        return Sentence((record["sentence1"], record["sentence2"]))
    text = record["text"] if "text" in record else record["sentence"]
    words, tags = (tuple(record.get(name, ())) for name in ("words", "upos"))
    if len(words) != len(tags):
        raise InputError(f"{len(words)} words with {len(tags)} parts of speech: {text!r}.")
    return Sentence((text,), words, tags)


def _type(token: str) -> int:
    """Place in `TYPES` of a token that is not special."""
    bare = token.removeprefix("##").lstrip("Ġ▁")
    if bare in (".", ","):
        return 2
    return 3 if bare and all(unicodedata.category(c).startswith("P") for c in bare) else 4


def _plain(value: Any) -> Any:
    """Tensors as lists, NaN as None."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
