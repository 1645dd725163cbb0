"""Can the tokens of a sentence be told from its hidden states, layer by layer?

python examples/identifiability.py                  # a few packaged sentences, seconds
python examples/identifiability.py sentences.jsonl  # or one sentence per line; minutes for 500

Rates by layer for the hidden state as it is (naive), a linear map and an MLP trained to undo the
layers, with controls beside: word embeddings as targets, changed norms, turned directions, and
what a token's position alone tells. Maps are trained more briefly than in Brunner et al. 2020
(Adam with learning rate 1e-4, up to 20 epochs without progress), to be done in minutes on two
cores; `--thorough` trains as they did.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch
from rich.console import Console

from attnlens import Lens, TokenIdentifiability
from attnlens.demo import model_folder, paragraphs
from attnlens.recovery import MapTraining
from attnlens.reporting.tables import rates_table
from attnlens.texts.loading import load_text_model
from attnlens.texts.reading import read_examples

QUICK = {
    "linear": MapTraining(learning_rate=3e-3, max_epochs=25, patience=3),
    "mlp": MapTraining(learning_rate=3e-3, max_epochs=8, patience=2),
}
THOROUGH = {"linear": MapTraining(), "mlp": MapTraining()}


def main() -> None:
    """Collect once, train each map, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="sentences: JSON lines or plain lines")
    parser.add_argument("--count", type=int, default=500, help="sentences to read")
    parser.add_argument("--thorough", action="store_true", help="train as in the paper")
    chosen = parser.parse_args()
    start = time.perf_counter()
    sentences = read(chosen.file)[: chosen.count]
    tokens = collect(sentences)
    results = [tokens.using("naive").compute()]
    for name, training in (THOROUGH if chosen.thorough else QUICK).items():
        results.append(tokens.using(name, training=training).compute())
    Console(highlight=False, soft_wrap=True).print(rates_table(results))
    print(f"\n{len(sentences)} sentences, {time.perf_counter() - start:.0f} s")


def read(file: Path | None) -> list[str]:
    """Sentences of a file, from the key `text` or `sentence` where lines are JSON."""
    if file is None:
        return [s for text in paragraphs() for s in re.split(r"(?<=[.?!]) ", text)]
    lines = read_examples(str(file), one_per_line=True)
    if file.suffix not in (".jsonl", ".json"):
        return lines
    records = [json.loads(line) for line in lines]
    return [record.get("text") or record["sentence"] for record in records]


def collect(sentences: list[str]) -> TokenIdentifiability:
    """Run the sentences through the packaged encoder, and keep the hidden states of all tokens."""
    model = load_text_model(str(model_folder()))
    tokens = TokenIdentifiability("mlp", words=model.model.get_input_embeddings())
    with Lens(model.model, tokens), torch.no_grad():
        for batch in model.batches(model.tokenise(sentences), 16):
            model.model(**batch)
    return tokens


if __name__ == "__main__":
    main()
