"""Effective for what? How much attention heads, layers and the answer of a model can see.

    python examples/effective_for_what.py                       # a small built-in task
    python examples/effective_for_what.py TRAIN.jsonl DEV.jsonl # one {"text": …, "genre": …} a line

A small sentence encoder is fine-tuned to classify passages by genre. On texts of 8 to 120 tokens:

1. the share of attention that counts for the head, the layer and the answer, for the encoder's
   sentence embedding (384 outputs) and the classifier's logits, by layer and by length;
2. what happens to the logits when one layer's attention is replaced: by what its heads see, by the
   simplest distribution with the same output, by what moves the answer, by random changes of the
   same size; to first order and at full size;
3. accuracy while heads are masked, lowest score first, for five seeds.

Takes under twenty minutes on two cores. Needs: pip install "attnlens[demo,report]"
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from genres import Passage, read_passages, write_passages
from pruning_experiment import ENCODER, accuracy, batches, fine_tune
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from attnlens import Capture, effective_for, record
from attnlens.pruning import PruningCurve, pruning_curve

TRAIN, DEV, SCORED = 320, 96, 32  # passages to train, evaluate and score on
TEXTS, EMBEDDED, REPLACED = 200, 30, 30  # texts for logits, for embeddings and for replacements
STEPS = 5  # of a pruning curve
SHORTEST, LONGEST = 8, 120  # tokens
GROUPS = ((8, 32), (33, 64), (65, 120))
SMALL = 1e-4  # step of a derivative, in float64

Batch = dict[str, Tensor]
Shares = list[tuple[int, Any]]


def texts_of_all_lengths(passages: Sequence[Passage], count: int, seed: int = 0) -> list[Batch]:
    """Cut passages to lengths that are spread evenly, in tokens."""
    tokenizer = AutoTokenizer.from_pretrained(ENCODER)
    dice = random.Random(seed)
    found: list[Batch] = []
    for passage in dice.choices(passages, k=20 * count):
        length = dice.randint(SHORTEST, LONGEST)
        batch = tokenizer(passage.text, truncation=True, max_length=length, return_tensors="pt")
        if batch["input_ids"].shape[1] == length and len(found) < count:
            found.append(dict(batch))
    return found


def shares(model: nn.Module, texts: Sequence[Batch], outputs: Any) -> Shares:
    """The three shares of every text, with its length."""
    return [(text["input_ids"].shape[1], effective_for(model, text, outputs)) for text in texts]


def print_shares(title: str, found: Shares) -> None:
    """Print the shares by layer and by length, in percent."""
    print(f"\n{title}: share of ‖A‖² that counts for the head / the answer, %, by layer")
    for low, high in GROUPS:
        some = [shares for length, shares in found if low <= length <= high]
        if not some:
            continue
        cells = []
        for layer in range(len(some[0].layers)):
            two = [
                100 * torch.stack([getattr(one, name)[layer].mean() for one in some]).mean()
                for name in ("head", "answer")
            ]
            cells.append(" / ".join(f"{share:.1f}" for share in two))
        print(f"{low:>3}–{high:<3} tokens, {len(some):>3} texts | " + " | ".join(cells), flush=True)
    apart = max(float((shares.layer - shares.heads).abs().max()) for _, shares in found)
    print(f"layers against all of their heads together: at most {apart:.0e} apart")


@contextmanager
def replaced(model: nn.Module, capture: Capture, attention: Tensor) -> Iterator[None]:
    """Let a layer attend as told."""
    assert capture.output_projection is not None
    context = (attention @ capture.value).transpose(1, 2).flatten(2)
    module = model.get_submodule(capture.output_projection.name)
    handle = module.register_forward_pre_hook(lambda _, given: (context, *given[1:]))
    try:
        yield
    finally:
        handle.remove()


def stochastic(maps: Tensor, attention: Tensor) -> Tensor:
    """The distribution that is left of maps when negative entries are dropped, else attention."""
    positive = maps.clamp(min=0)
    total = positive.sum(-1, keepdim=True)
    return torch.where(total > 0, positive / total, attention)


def at_distance(attention: Tensor, distance: Tensor, generator: torch.Generator) -> Tensor:
    """A random distribution on the way from A to other rows of it, so far away, per head."""
    other = attention[..., torch.randperm(attention.shape[-1], generator=generator)]
    step = other - attention
    size = torch.linalg.matrix_norm(step)
    return attention + (distance / size).clamp(max=1)[..., None, None] * step


@torch.no_grad()
def replacements(model: nn.Module, texts: Sequence[Batch]) -> dict[str, list[list[float]]]:
    """Move every layer's attention in several ways; by name, slope and change of the logits.

    Both are norms over the logits. A slope is the derivative along the way from A to A'.
    """
    generator = torch.Generator().manual_seed(0)
    moved: dict[str, list[list[float]]] = {}
    for text in texts:
        answer = model(**text).logits
        found = effective_for(model, text, "logits", maps=True)
        for capture, maps in zip(record(model, **text), found.maps, strict=True):
            attention = capture.attention()
            noise = torch.randn(attention.shape, generator=generator, dtype=attention.dtype)

            def away(point: Tensor, noise: Tensor = noise, attention: Tensor = attention) -> Tensor:
                size = torch.linalg.matrix_norm(point - attention)
                return attention + (size / torch.linalg.matrix_norm(noise))[..., None, None] * noise

            nearest = stochastic(maps, attention)
            distance = torch.linalg.matrix_norm(nearest - attention)
            simplest = capture.minimal_distribution().distribution
            apart = torch.linalg.matrix_norm(simplest - attention)
            ways = {
                "what the head sees, A⊥": capture.effective_attention(),
                "the simplest distribution": simplest,
                "… random distribution as far": at_distance(attention, apart, generator),
                "what moves the answer, A_out": maps,
                "… random change as large": away(maps),
                "A_out as a distribution": nearest,
                "… random distribution as far ": at_distance(attention, distance, generator),
            }
            for name, point in ways.items():
                changes = []
                for step in (SMALL, 1.0):
                    with replaced(model, capture, attention + step * (point - attention)):
                        changes.append(float((model(**text).logits - answer).norm()) / step)
                size = float((point - attention).norm() / attention.norm())
                moved.setdefault(name, []).append([*changes, size])
    return moved


def answer_scores(model: nn.Module, texts: Sequence[Batch]) -> Tensor:
    """Mean `‖A_out‖` of every head, `[L, H]`."""
    norms = [effective_for(model, text, "logits").answer_norm for text in texts]
    return torch.stack(norms).mean(0)


def prune(model: nn.Module, train: Sequence[Passage], dev: Sequence[Batch], genres: Sequence[str],
          seed: int) -> PruningCurve:  # fmt: skip
    """Trace accuracy by the share of heads masked, for four scores."""
    scored = list(batches(train[:SCORED], genres))
    inputs = [{k: v for k, v in batch.items() if k != "labels"} for batch in scored]
    scores: dict[str, Tensor | str] = {"answer_norm": answer_scores(model, inputs)}
    evaluate: Callable[[nn.Module], float] = lambda model: accuracy(model, dev)  # noqa: E731
    named = ("gradient", "output_norm", "random")
    curve = pruning_curve(model, evaluate, named, batches=scored, seeds=[seed], steps=STEPS)
    own = pruning_curve(model, evaluate, scores, batches=scored, seeds=[seed], steps=STEPS)
    return curve.merge(own)


def draw(path: Path, found: dict[str, Shares], merged: PruningCurve) -> None:
    """Draw the shares by layer, and the pruning curves."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6))
    for panel, (title, some) in zip(axes, found.items(), strict=False):
        for name in ("head", "answer"):
            rows = torch.stack([
                torch.stack([row.mean() for row in getattr(one, name)]) for _, one in some
            ])
            panel.plot(range(rows.shape[1]), rows.mean(0), marker="o", label=name)
        panel.set(title=title, xlabel="layer", ylabel="share of ‖A‖²", ylim=(0, 1.05))
        panel.legend()
    merged.plot(axes=axes[2])
    axes[2].set(title="heads masked", ylabel="accuracy")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the study and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", nargs="?", type=Path, help="JSONL with text and genre")
    parser.add_argument("dev", nargs="?", type=Path, help="JSONL with text and genre")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the texts to look at")
    parser.add_argument("--plot", type=Path, help="write a picture")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.perf_counter()
    if options.train and options.dev:
        train, dev = read_passages(options.train), read_passages(options.dev)
    else:
        train, dev = write_passages(TRAIN // 2, 0), write_passages(DEV, 1)
    dice = random.Random(0)
    train = dice.sample(train, min(int(options.fraction * TRAIN), len(train)))
    genres = sorted({passage.genre for passage in train})
    texts, embedded, moving = (
        texts_of_all_lengths(dev, max(2, int(options.fraction * count)))
        for count in (TEXTS, EMBEDDED, REPLACED)
    )
    kept = dice.sample(dev, min(int(options.fraction * DEV), len(dev)))
    evaluated = list(batches(sorted(kept, key=lambda passage: len(passage.text)), genres))

    found = {}
    encoder = AutoModel.from_pretrained(ENCODER).eval()
    found["sentence embedding"] = shares(encoder, embedded, "embedding")
    print_shares("Encoder, sentence embedding", found["sentence embedding"])
    merged: PruningCurve | None = None
    for seed in range(options.seeds):
        model = fine_tune(train, genres, seed)
        if seed == 0:
            print(f"\nClassifier of {', '.join(genres)}, accuracy {accuracy(model, evaluated):.3f}")
            found["logits"] = shares(model, texts, "logits")
            print_shares("Classifier, logits", found["logits"])
            print(f"\nOne layer's attention replaced, mean over layers and {len(moving)} texts")
            print(f"{'by':<32}{'‖A′ − A‖/‖A‖':>14}{'slope':>12}{'change of logits':>18}")
            for name, rows in replacements(model.double(), moving).items():
                slope, change, size = torch.tensor(rows).mean(0).tolist()
                print(f"{name:<32}{size:>14.3f}{slope:>12.2e}{change:>18.2e}", flush=True)
            model.float()
        curve = prune(model, train, evaluated, genres, seed)
        merged = curve if merged is None else merged.merge(curve)
        if options.plot:
            draw(options.plot, found, merged)
        print(f"\nAccuracy by share of heads masked, mean ± sd over {seed + 1} seed(s)\n")
        print(merged.table(), flush=True)
    print(f"{(time.perf_counter() - start) / 60:.0f} minutes, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
