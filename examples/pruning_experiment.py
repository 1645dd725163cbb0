"""Which score finds the heads that a classifier can do without?

A small sentence encoder is fine-tuned to classify passages, its heads are masked in steps of 10 %,
lowest score first, and accuracy is measured at each step, for several scores and seeds. Then half
of the heads are removed for good, and the gain is timed.

    python examples/pruning_experiment.py                       # a small built-in task
    python examples/pruning_experiment.py TRAIN.jsonl DEV.jsonl # one {"text": …, "genre": …} a line

Consecutive texts of one genre are joined into passages longer than the width of a head, because
below that all attention is effective. Takes about ten minutes on two cores with files, three
without. Needs: pip install "attnlens[demo,report]"
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from genres import Passage, read_passages, write_passages
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from attnlens import prune_heads
from attnlens.demo import model_folder
from attnlens.pruning import PruningCurve, pruning_curve

ENCODER = model_folder()
TOKENS = 96  # a passage is cut at so many
TRAIN, DEV, SCORED = 480, 160, 64  # passages to train, evaluate and score on
EPOCHS, BATCH, RATE = 2, 16, 3e-4
SCORES = (
    "effective_norm",
    "effective_fraction",
    "output_norm",
    "gradient",
    "attention_norm",
    "magnitude",
    "random",
)

Batch = dict[str, Tensor]


def batches(passages: Sequence[Passage], genres: Sequence[str]) -> Iterator[Batch]:
    """Tokenise passages, in their order."""
    tokenizer = AutoTokenizer.from_pretrained(ENCODER)
    for start in range(0, len(passages), BATCH):
        part = passages[start : start + BATCH]
        texts = [passage.text for passage in part]
        batch = tokenizer(
            texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        labels = torch.tensor([genres.index(passage.genre) for passage in part])
        yield {**batch, "labels": labels}


def fine_tune(passages: Sequence[Passage], genres: Sequence[str], seed: int) -> nn.Module:
    """Train the encoder with a new classifier on top."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(ENCODER, num_labels=len(genres))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    steps = EPOCHS * -(-len(passages) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    model.train()
    for epoch in range(EPOCHS):
        shuffled = random.Random(f"{seed}/{epoch}").sample(passages, len(passages))
        for batch in batches(shuffled, genres):
            model(**batch).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, dev: Sequence[Batch]) -> float:
    """The share of passages whose genre is right."""
    right = sum(int((model(**b).logits.argmax(-1) == b["labels"]).sum()) for b in dev)
    return right / sum(len(batch["labels"]) for batch in dev)


def experiment(
    train: Sequence[Passage], dev: Sequence[Passage], genres: Sequence[str], seed: int
) -> tuple[nn.Module, PruningCurve]:
    """Fine-tune with one seed and trace the curve of every score."""
    model = fine_tune(train, genres, seed)
    seen = sorted(dev, key=lambda passage: len(passage.text))  # little padding
    evaluated = list(batches(seen, genres))
    curve = pruning_curve(
        model,
        lambda model: accuracy(model, evaluated),
        SCORES,
        batches=list(batches(train[:SCORED], genres)),
        seeds=[seed],
    )
    return model, curve


@torch.no_grad()
def gain(model: nn.Module, pruned: nn.Module, batch: Batch, repeats: int = 15) -> float:
    """Time of the whole model over that of the pruned one, timed in turns."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(2 * repeats):
        start = time.perf_counter()
        (model, pruned)[turn % 2](**batch)
        times[turn % 2].append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


def main() -> None:
    """Run the experiment and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", nargs="?", type=Path, help="JSONL with text and genre")
    parser.add_argument("dev", nargs="?", type=Path, help="JSONL with text and genre")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="write the curves to this image")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.perf_counter()
    if options.train and options.dev:
        train, dev = read_passages(options.train), read_passages(options.dev)
    else:
        train, dev = write_passages(TRAIN // 2, 0), write_passages(DEV, 1)
    dice = random.Random(0)
    train = dice.sample(train, min(TRAIN, len(train)))
    dev = dice.sample(dev, min(DEV, len(dev)))
    genres = sorted({passage.genre for passage in train})
    print(f"{len(train)} passages to train on, {len(dev)} to evaluate, genres {', '.join(genres)}")

    merged: PruningCurve | None = None
    for seed in range(options.seeds):
        model, curve = experiment(train, dev, genres, seed)
        merged = curve if merged is None else merged.merge(curve)
        print(f"seed {seed}: accuracy {curve.points[0].value:.3f}", flush=True)
    assert merged is not None
    print(f"\nAccuracy by share of heads masked, mean ± sd over {options.seeds} seeds\n")
    print(merged.table())

    pruned = copy.deepcopy(model)
    batch = next(batches(dev, genres))
    report = prune_heads(pruned, curve.plan("output_norm", 0.5))
    ratio = gain(model, pruned, {k: v for k, v in batch.items() if k != "labels"})
    print(f"\nHalf of the heads removed, lowest output norm first:\n{report}")
    print(f"a batch of {list(batch['input_ids'].shape)} tokens runs {ratio:.2f} × as fast")
    if options.plot:
        axes = merged.plot()
        axes.set_ylabel("accuracy")
        axes.figure.savefig(options.plot, dpi=150)
    print(f"{(time.perf_counter() - start) / 60:.0f} minutes, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
