"""`attnlens identify`: can attention be read off a head's output, and tokens off hidden states?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from attnlens.attention.recording import Recording
from attnlens.cli.options import AsJson, BatchSize, Lines, MaxLength, ModelName, Text
from attnlens.cli.terminal import loaded, plain_errors, say
from attnlens.errors import AttnLensError, InputError
from attnlens.lens import Lens, record
from attnlens.recipes.identification import Findings, LayerVerdict, LayerWitnesses
from attnlens.recovery.map_training import MapTraining
from attnlens.recovery.token_identifiability import TokenIdentifiability
from attnlens.recovery.token_maps import Distance, MapKind
from attnlens.reporting.rates_table import rates_table
from attnlens.texts.loading import TextModel, TokenisedTexts
from attnlens.texts.reading import read_examples

MAPS: tuple[MapKind, ...] = ("naive", "linear", "mlp")
PARTS = ("both", "heads", "tokens")


def identify(
    model: ModelName,
    text: Text,
    lines: Lines = False,
    part: Annotated[str, typer.Option("--part", help=f"One of: {', '.join(PARTS)}.")] = "both",
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
        str, typer.Option("--maps", help=f"Maps back to tokens, of: {', '.join(MAPS)}.")
    ] = ",".join(MAPS),
    distance: Annotated[
        str, typer.Option("--distance", help="Of training and search: cosine or l2.")
    ] = "cosine",
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Most epochs of training; 1000 in the paper.")
    ] = 30,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="Of Adam; 1e-4 in the paper.")
    ] = 3e-3,
    patience: Annotated[
        int, typer.Option("--patience", min=1, help="Epochs without progress; 20 in the paper.")
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Of the splits and the training.")] = 0,
    as_json: AsJson = False,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
) -> None:
    """Tell whether outputs determine attention, and whether hidden states determine tokens."""
    with plain_errors():
        chosen = _chosen(part, maps)
        training = MapTraining(
            learning_rate=learning_rate,
            max_epochs=epochs,
            patience=patience,
            progress=Console(stderr=True).is_terminal,
        )
        examples = read_examples(text, lines)
        text_model = loaded(model)
        tokenised = text_model.tokenise(examples, max_length)
        collector = TokenIdentifiability(
            "mlp",
            _distance(distance),
            words=text_model.model.get_input_embeddings(),
            seed=seed,
            training=training,
        )
        findings = Findings(text_model.name, len(examples))
        observers = () if part == "heads" else (collector,)
        _read(text_model, tokenised, batch_size, observers, findings, heads=part != "tokens")
        if witnesses and part != "tokens":
            _construct(text_model, tokenised, witness_tokens, findings)
        if part != "heads":
            try:
                findings.tokens = [collector.using(kind).compute() for kind in chosen]
            except AttnLensError as error:
                if part == "tokens":
                    raise
                findings.note = str(error)
        if as_json:
            print(findings.to_json())
        else:
            _show(findings)


def _chosen(part: str, maps: str) -> list[MapKind]:
    """Check what was asked for, and read the maps."""
    if part not in PARTS:
        raise InputError(f"No part {part!r}. There are: {', '.join(PARTS)}.")
    names = [name.strip() for name in maps.split(",")]
    chosen = [kind for kind in MAPS if kind in names]
    if not chosen or set(names) - set(MAPS):
        raise InputError(f"maps must be some of {', '.join(MAPS)}. Got {maps!r}.")
    return chosen


def _distance(name: str) -> Distance:
    for known in get_args(Distance):
        if name == known:
            return known
    raise InputError(f"distance must be cosine or l2. Got {name!r}.")


def _read(
    model: TextModel,
    texts: TokenisedTexts,
    batch_size: int,
    observers: Sequence[TokenIdentifiability],
    findings: Findings,
    *,
    heads: bool,
) -> None:
    """Run the texts through the model once, for both halves."""
    verdicts: dict[tuple[str, int, int], LayerVerdict] = {}
    recording = Recording()
    watching = (*observers, recording) if heads else observers
    with Lens(model.model, *watching), torch.no_grad():
        for batch in model.batches(texts, batch_size):
            model.model(**batch)
            for capture in recording.compute():
                key = (capture.site, capture.layer, capture.call)
                if key not in verdicts:
                    none = torch.zeros(capture.shape[1], dtype=torch.int64)
                    verdicts[key] = LayerVerdict(capture.site, none, none, none.double())
                verdicts[key].add(capture)
            recording.reset()
    findings.heads = list(verdicts.values())


def _construct(model: TextModel, texts: TokenisedTexts, tokens: int, findings: Findings) -> None:
    """Construct the witnesses of every layer for the beginning of the longest text."""
    longest = texts.by_length[0]
    rows = {
        name: torch.tensor([column[longest][:tokens]]) for name, column in texts.columns.items()
    }
    findings.witness_tokens = rows["input_ids"].shape[1]
    with Console(stderr=True).status("Constructing witnesses …"):
        findings.witnesses = [LayerWitnesses.of(c) for c in record(model.model, **rows)]


def _show(findings: Findings) -> None:
    console = Console(highlight=False)
    if findings.heads:
        console.print(_heads_table(findings))
        words = max(findings.heads, key=lambda layer: layer.longest)
        console.print(f"The longest text, {words.name}, head 0: {escape(words.words)}\n")
    if findings.witnesses:
        console.print(_witness_table(findings))
        for reason in dict.fromkeys(w.reason for w in findings.witnesses if w.reason):
            say(f"[yellow]note:[/] {escape(reason)}")
    if findings.tokens:
        console.print(escape(rates_table(findings.tokens)))
    if findings.note:
        say(f"[yellow]note:[/] Tokens were not looked at. {escape(findings.note)}")


def _heads_table(findings: Findings) -> Table:
    """Share of texts whose attention is determined by the output, over the heads of a layer."""
    table = Table(
        title=f"Texts (of {findings.texts}) in which outputs determine attention, %",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("layer", justify="right")
    for column in ("among all matrices", "among heads of its width", "n − rank(T)"):
        table.add_column(column, justify="right")
    for place, layer in enumerate(findings.heads):
        softmax = "–" if layer.softmax is None else _range(100 * layer.softmax / layer.texts)
        simplex = _range(100 * layer.simplex / layer.texts)
        table.add_row(str(place), simplex, softmax, _range(layer.nullity / layer.texts))
    return table


def _witness_table(findings: Findings) -> Table:
    """How far every head's attention can move."""
    worst = max(layer.residual for layer in findings.witnesses)
    table = Table(
        title=f"Other attention with the same output for {findings.witness_tokens} tokens, "
        f"right to {worst:.0e}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("layer", justify="right")
    table.add_column("any matrix, ½ Σ|A' − A|", justify="right")
    table.add_column("same width, ‖A' − A‖/‖A‖", justify="right")
    table.add_column("heads found", justify="right")
    for place, layer in enumerate(findings.witnesses):
        found = layer.distance[~layer.distance.isnan()]
        distance = _range(found) if len(found) else "–"
        count = f"{len(found)} of {len(layer.distance)}"
        table.add_row(str(place), _range(layer.total_variation), distance, count)
    return table


def _range(values: Tensor) -> str:
    """Smallest and largest of the heads, or one number if they are the same."""
    digits = 3 if float(values.max()) < 1.5 and values.is_floating_point() else 1
    low, high = (f"{float(value):.{digits}f}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} – {high}"
