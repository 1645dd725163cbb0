"""`attnlens identify`: can attention be read off a head's output, and tokens off hidden states?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from attnlens.cli.choices import EPOCHS, LEARNING_RATE, PATIENCE, Distance, Map, Part
from attnlens.cli.options import (
    AsJson,
    BatchSize,
    Layers,
    Lines,
    MaxLength,
    ModelName,
    Sentences,
    TextFiles,
    examples,
    layers_in,
)
from attnlens.cli.terminal import bars, print_json, say, say_idle

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from attnlens.recipes.identification import Identification


def identify(
    context: typer.Context,
    model: ModelName,
    text: TextFiles = None,
    sentence: Sentences = None,
    lines: Lines = False,
    part: Annotated[Part, typer.Option("--part", help="What to identify.")] = "both",
    witnesses: Annotated[
        bool,
        typer.Option(
            "--witnesses", help="Construct other attention with the same output, for one text."
        ),
    ] = False,
    witness_tokens: Annotated[
        int, typer.Option("--witness-tokens", min=2, help="Tokens to keep of the longest text.")
    ] = 64,
    maps: Annotated[
        list[Map] | None,
        typer.Option("--map", help="Map back to tokens; may be repeated, by default all."),
    ] = None,
    distance: Annotated[
        Distance, typer.Option("--distance", help="Of training and search.")
    ] = "cosine",
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Most epochs of training; 1000 in the paper.")
    ] = EPOCHS,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="Of Adam; 1e-4 in the paper.")
    ] = LEARNING_RATE,
    patience: Annotated[
        int, typer.Option("--patience", min=1, help="Epochs without progress; 20 in the paper.")
    ] = PATIENCE,
    seed: Annotated[int, typer.Option("--seed", help="Of the splits and the training.")] = 0,
    as_json: AsJson = False,
    layers: Layers = None,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
) -> None:
    """Tell whether outputs determine attention, and whether hidden states determine tokens."""
    from rich.console import Console

    from attnlens.recipes.identification import MAPS, identify_texts
    from attnlens.recovery.map_training import MapTraining

    if part == "heads":
        training_options = ("maps", "distance", "epochs", "learning_rate", "patience", "seed")
        say_idle(context, training_options, "with --part heads")
    if part == "tokens":
        say_idle(context, ("witnesses", "witness_tokens"), "with --part tokens")
    elif not witnesses:
        say_idle(context, ("witness_tokens",), "without --witnesses")
    places = layers_in(layers)
    training = MapTraining(
        learning_rate=learning_rate,
        max_epochs=epochs,
        patience=patience,
        progress=Console(stderr=True).is_terminal,
    )
    texts = examples(text, sentence, lines)
    with bars() as progress:
        result = identify_texts(
            model,
            texts,
            part=part,
            witness_tokens=witness_tokens if witnesses else None,
            maps=[kind for kind in MAPS if kind in (maps or MAPS)],
            distance=distance,
            training=training,
            seed=seed,
            layers=places,
            batch_size=batch_size,
            max_length=max_length,
            progress=progress,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result)


def _show(result: Identification) -> None:
    from rich.console import Console

    from attnlens.reporting.tables import rates_table

    console = Console(highlight=False, markup=False)
    if result.heads:
        console.print(_heads_table(result))
        longest = max(result.heads, key=lambda layer: layer.longest)
        console.print(f"The longest text, {longest.site}, head 0: {longest.verdict}\n")
    if result.witnesses:
        console.print(_witness_table(result), "")
        for reason in dict.fromkeys(layer.reason for layer in result.witnesses if layer.reason):
            say(reason, "note")
    if result.tokens:
        console.print(rates_table(result.tokens))
    if result.note:
        say(f"Tokens were not looked at. {result.note}", "note")


def _heads_table(result: Identification) -> RenderableType:
    """Share of texts whose attention is determined by the output, over the heads of a layer."""
    from attnlens.reporting.tables import text_table

    title = f"Texts (of {result.texts}) in which outputs determine attention, %"
    columns = ["layer", "among all matrices", "among heads of its width", "n − rank(T)"]
    rows = [
        [
            str(place),
            _range(100 * layer.identifiable_simplex),
            "–" if (share := layer.identifiable_softmax) is None else _range(100 * share),
            _range(layer.nullity),
        ]
        for place, layer in enumerate(result.heads)
    ]
    return text_table(title, columns, rows)


def _witness_table(result: Identification) -> RenderableType:
    """How far every head's attention can move."""
    from attnlens.reporting.tables import text_table

    worst = max(layer.residual for layer in result.witnesses)
    title = (
        f"Other attention with the same output for {result.witness_tokens} tokens, right to "
        f"{worst:.0e}"
    )
    columns = ["layer", "any matrix, ½ Σ|A' − A|", "same width, ‖A' − A‖/‖A‖", "heads found"]
    rows = []
    for place, layer in enumerate(result.witnesses):
        distances = layer.softmax_distance[~layer.softmax_distance.isnan()]
        moved = _range(distances) if len(distances) else "–"
        count = f"{len(distances)} of {len(layer.softmax_distance)}"
        rows.append([str(place), _range(layer.simplex_total_variation), moved, count])
    return text_table(title, columns, rows)


def _range(values: Tensor) -> str:
    """Smallest and largest of the heads, or one number if they are the same."""
    digits = 3 if float(values.max()) < 1.5 and values.is_floating_point() else 1
    low, high = (f"{float(value):.{digits}f}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} – {high}"
