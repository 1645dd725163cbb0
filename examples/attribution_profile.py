"""How local are hidden states, is that learned, and does it differ by part of speech?

python examples/attribution_profile.py                  # with and without a band on attention
python examples/attribution_profile.py labelled.jsonl   # by part of speech

A labelled file holds one JSON object a line, with lists `words` and `upos` of the same length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from attnlens import HiddenTokenAttribution, Lens
from attnlens.demo import model_folder
from attnlens.texts.batching import TextModel
from attnlens.texts.loading import load_text_model

SENTENCES = [
    "The mill stopped at noon because the river had frozen again overnight.",
    "Nobody on the night bus noticed that the driver was humming an opera.",
    "Our neighbour paints boats, although he has never learned how to swim.",
    "If the oven smells of cloves, somebody has been baking without me.",
    "A small museum in the valley keeps every key that tourists have lost.",
    "The judge read the letter twice and then folded it into a paper bird.",
    "Snow fell on the tennis courts, and the foxes took them over at dusk.",
    "She owes her excellent handwriting to a teacher who could not see.",
    "The bridge hums in the wind, so the town named an evening after it.",
    "Before the auction began, three clocks in the hall struck different hours.",
    "He sold the piano but kept the stool, which fits under any window.",
    "The last page of the atlas was blank, and the child drew an island there.",
]
WIDTH = 2  # tokens that the band lets a token see on either side
PROBES = 4
COLUMNS = ("1", "2", "3", "4-5", "6-10", "11+")

Batch = dict[str, Tensor]


def band(mask: Tensor, width: int = WIDTH) -> Tensor:
    """Turn a padding mask `[B, K]` into one that hides all tokens further away than `width`."""
    position = torch.arange(mask.shape[1])
    near = (position[:, None] - position).abs() <= width
    return (near & mask.bool()[:, None])[:, None]  # [B, 1, Q, K]


def look(model: Any, batches: list[Batch], **settings: Any) -> HiddenTokenAttribution:
    """Attribute every hidden state of some batches."""
    observer = HiddenTokenAttribution(PROBES, **settings)
    with Lens(model, observer), torch.no_grad():
        for batch in batches:
            observer.labels = batch.get("labels")
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return observer


def print_distances(title: str, observer: HiddenTokenAttribution) -> None:
    """Print what a token takes from itself and from one neighbour at each distance."""
    result = observer.compute()
    print(f"\n{title}\n  contribution in % of the token itself and of one neighbour at distance")
    print("  layer  itself " + "".join(f"{column:>7}" for column in COLUMNS))
    for (_, layer), own, row in zip(result.layers, result.own, result.distance, strict=True):
        cells = "".join(f"{100 * share:7.2f}" for share in row[0].tolist())
        print(f"  {layer:5}  {100 * own[0].item():6.1f} {cells}")


def is_locality_learned(sentences: list[str]) -> None:
    """Compare the trained model with itself under a band, and with untrained weights."""
    encoder = load_text_model(str(model_folder()))
    trained = encoder.model
    torch.manual_seed(0)
    untrained = AutoModel.from_config(trained.config).eval()
    batch = encoder.padded(encoder.tokenise(sentences), range(len(sentences)))
    banded = {**batch, "attention_mask": band(batch["attention_mask"])}
    print_distances("Trained", look(trained, [batch]))
    print_distances(f"Trained, attention only to {WIDTH} neighbours", look(trained, [banded]))
    print_distances("Untrained", look(untrained, [batch]))
    print("\nWhere nearer neighbours contribute more without a band, and do not in the untrained")
    print("model, the locality is learned: no mask asked for it.")


def by_part_of_speech(path: Path, sentences: int = 24) -> None:
    """Print the own contribution of tokens by the part of speech of their word."""
    encoder = load_text_model(str(model_folder()))
    with path.open(encoding="utf-8") as lines:
        entries = [json.loads(line) for line in islice(lines, sentences)]
    names = sorted({tag for entry in entries for tag in entry["upos"]})
    batches = list(labelled(encoder, entries, names))
    result = look(encoder.model, batches, label_names=names).compute()
    print("Own contribution in %, by part of speech and layer")
    print(f"  {'':6}{'tokens':>7}" + "".join(f"{layer:>7}" for _, layer in result.layers))
    for group in result.own[-1].argsort(descending=True).tolist():
        cells = "".join(f"{100 * own:7.1f}" for own in result.own[:, group].tolist())
        print(f"  {names[group]:6}{int(result.tokens[0, group]):>7}{cells}")


def labelled(
    encoder: TextModel, entries: list[dict[str, list[str]]], names: list[str]
) -> Iterator[Batch]:
    """Tokenise words and give every token the label of its word, or -1."""
    texts = encoder.tokenise([entry["words"] for entry in entries], max_length=32)
    for group in texts.groups(8):
        batch = encoder.padded(texts, group)
        labels = torch.full_like(batch["input_ids"], -1)
        for row, place in zip(labels, group, strict=True):
            for token, word in enumerate(texts.words[place]):
                if word is not None:
                    row[token] = names.index(entries[place]["upos"][word])
        yield {**batch, "labels": labels}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        by_part_of_speech(Path(sys.argv[1]))
    else:
        is_locality_learned(SENTENCES)
