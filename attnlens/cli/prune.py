"""`attnlens prune`: choose heads by a score, and remove them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from attnlens.cli.options import BatchSize, Lines, MaxLength, ModelName, require_folder
from attnlens.cli.terminal import bars, say, writing
from attnlens.recipes.head_choice import SCORES, choose_heads
from attnlens.texts.reading import read_examples

if TYPE_CHECKING:
    Score = str
else:  # the choices are known when the program runs
    Score = Literal[SCORES]


def prune(
    model: ModelName,
    data: Annotated[
        str, typer.Option("--data", metavar="FILE", help="UTF-8 text; - is standard input.")
    ],
    plan: Annotated[
        Path, typer.Option("--plan", metavar="FILE", help="Write the chosen heads here, as JSON.")
    ],
    score: Annotated[
        Score, typer.Option("--score", help="What ranks the heads.")
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
    require_folder(plan)
    texts = read_examples(data, lines)
    with bars() as progress:
        choice = choose_heads(
            model,
            texts,
            score=score,
            fraction=fraction,
            per_layer=per_layer,
            seed=seed,
            batch_size=batch_size,
            max_length=max_length,
            about={"data": data},
            progress=progress,
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(choice.plan)} of {choice.heads} heads chosen:")
    for (stack, layer), heads in choice.plan.heads.items():
        console.print(f"  {stack} {layer}: {', '.join(map(str, heads))}")
    console.print(
        f"Without them the last hidden states keep a cosine of {choice.cosine:.3f} with those of "
        f"the whole model, the mean over the tokens of {len(texts)} examples."
    )
    with writing(plan):
        choice.write(plan)
    if output is not None:
        with writing(output):
            console.print(str(choice.remove(output)))
        say("Load it with attnlens.pruning.load_pruned.")
