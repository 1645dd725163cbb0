"""`attnlens prune`: choose heads by a score, and remove them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from attnlens.cli.options import BatchSize, Lines, MaxLength, ModelName
from attnlens.cli.terminal import loaded, plain_errors, say
from attnlens.errors import InputError
from attnlens.files import versions
from attnlens.pruning.curve import pruning_curve
from attnlens.pruning.plan import HeadPlan, write_json
from attnlens.pruning.removal import prune_heads
from attnlens.pruning.scores import STATISTICS
from attnlens.pruning.storage import save_pruned
from attnlens.texts.reading import read_examples

SCORES = (*STATISTICS, "magnitude", "random")  # those that need no labels


def prune(
    model: ModelName,
    data: Annotated[
        str, typer.Option("--data", metavar="FILE", help="UTF-8 text; - is standard input.")
    ],
    plan: Annotated[
        Path, typer.Option("--plan", metavar="FILE", help="Write the chosen heads here, as JSON.")
    ],
    score: Annotated[
        str, typer.Option("--score", help=f"What ranks the heads: {', '.join(SCORES)}.")
    ] = "effective_norm",
    fraction: Annotated[
        float, typer.Option("--fraction", min=0, max=1, help="Share of the heads to choose.")
    ] = 0.5,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="The same share of every layer.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="For the score random.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Remove the heads, and write the model here."),
    ] = None,
    lines: Lines = False,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
) -> None:
    """Choose the heads of lowest score on a text, say what they do, and remove them if asked."""
    with plain_errors():
        if score not in SCORES:
            raise InputError(f"No score {score!r}. There are: {', '.join(SCORES)}.")
        if not plan.parent.is_dir():
            raise InputError(f"Cannot write {plan}: there is no folder {plan.parent}.")
        examples = read_examples(data, lines)
        text_model = loaded(model)
        tokenised = text_model.tokenise(examples, max_length)
        batches = list(text_model.batches(tokenised, batch_size))
        curve = pruning_curve(
            text_model.model,
            _Likeness(batches),
            [score],
            [0.0, fraction] if fraction else [0.0],
            batches=batches,
            per_layer=per_layer,
            seeds=[seed],
        )
        chosen = curve.points[-1]
        settings = {"data": data, "score": score, "fraction": fraction, "per_layer": per_layer}
        _write(plan, chosen.plan, model=model, seed=seed, **settings)
        console = Console(highlight=False)
        console.print(_chosen(chosen.plan, curve.heads), soft_wrap=True)
        console.print(
            f"Without them the last hidden states keep a cosine of {chosen.value:.3f} with those "
            f"of the whole model, the mean over the tokens of {len(examples)} examples.",
            soft_wrap=True,
        )
        say(f"Written to {escape(str(plan))}.")
        if output is not None:
            report = prune_heads(text_model.model, chosen.plan, timing=batches[0])
            save_pruned(text_model.model, output)
            text_model.tokenizer.save_pretrained(output)
            console.print(str(report), soft_wrap=True)
            say(f"Written to {escape(str(output))}. Load it with attnlens.load_pruned.")


class _Likeness:
    """The mean cosine of last hidden states with those of the first model evaluated."""

    def __init__(self, batches: Sequence[dict[str, Tensor]]) -> None:
        self._batches = batches
        self._first: list[Tensor] | None = None

    @torch.no_grad()
    def __call__(self, model: Any) -> float:
        states = [model(**batch).last_hidden_state for batch in self._batches]
        self._first = self._first or states
        similar, tokens = 0.0, 0
        for batch, before, after in zip(self._batches, self._first, states, strict=True):
            real = batch.get("attention_mask", torch.ones(before.shape[:2])).bool()
            similar += float(torch.cosine_similarity(before[real], after[real], -1).sum())
            tokens += int(real.sum())
        return similar / tokens


def _chosen(plan: HeadPlan, total: int) -> str:
    rows = [
        f"  {escape(stack)} {layer}: {', '.join(map(str, heads))}"
        for (stack, layer), heads in plan.heads.items()
    ]
    return "\n".join((f"{len(plan)} of {total} heads chosen:", *rows))


def _write(path: Path, plan: HeadPlan, **notes: Any) -> None:
    try:
        write_json(path, {**plan.to_dict(), **notes, "versions": versions()})
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from error
