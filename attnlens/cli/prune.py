"""`attnlens prune`: choose heads by a score, and remove them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnlens.cli.choices import Score
from attnlens.cli.options import (
    AsJson,
    BatchSize,
    Lines,
    MaxLength,
    ModelName,
    Overwrite,
    Sentences,
    TextFiles,
    examples,
    read_paths,
)
from attnlens.cli.terminal import bars, print_json, say, say_idle


def prune(
    context: typer.Context,
    model: ModelName,
    text: TextFiles = None,
    sentence: Sentences = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Write the chosen heads here, as JSON."),
    ] = None,
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
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    lines: Lines = False,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
) -> None:
    """Choose the heads of lowest score on a text, say what they do, and remove them if asked."""
    from rich.console import Console

    from attnlens.files import make_folder, require_writable
    from attnlens.recipes.head_choice import choose_heads

    inputs = read_paths(model, text)
    if score != "random":
        say_idle(context, ("seed",), "with --score other than random")
    if plan is not None:
        require_writable(plan, inputs)
    if output is not None:
        make_folder(output, inputs=inputs, overwrite=overwrite)
    else:
        say_idle(context, ("overwrite",), "without --output")
    texts = examples(text, sentence, lines)
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
            about={"text": text or []},
            progress=progress,
        )
    if plan is not None:
        choice.write(plan)
        say(f"Written to {plan}.")
    report = None if output is None else choice.remove(output, overwrite=overwrite)
    if as_json:
        print_json(choice.to_dict())
    else:
        console = Console(highlight=False, markup=False)
        console.print(f"{len(choice.plan)} of {choice.heads} heads chosen:")
        for (stack, layer), heads in choice.plan.heads.items():
            console.print(f"  {stack} {layer}: {', '.join(map(str, heads))}")
        console.print(
            f"Without them the last hidden states keep a cosine of {choice.cosine:.3f} with those "
            f"of the whole model, the mean over the tokens of {len(texts)} examples."
        )
        if report is not None:
            console.print(str(report))
    if output is not None:
        say(f"Written to {output}. The commands read it as any model; Python, with load_pruned.")
