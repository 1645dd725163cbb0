"""`attnlens compare`: how far the heads of two models are apart on the same text."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from attnlens.cli.options import AsJson, BatchSize, Lines, MaxLength, Text
from attnlens.cli.terminal import loaded, plain_errors
from attnlens.comparison import HeadDrift
from attnlens.comparison import compare as compare_models
from attnlens.errors import InputError
from attnlens.files import versions
from attnlens.results import cell, row_labels, table
from attnlens.texts.loading import TextModel, TokenisedTexts
from attnlens.texts.reading import read_examples

FIELDS = ("effective_cosine", "raw_cosine", "effective_fraction_change")


def compare(
    model_a: Annotated[
        str, typer.Argument(metavar="A", help="Where the drift begins: a folder or a Hub name.")
    ],
    model_b: Annotated[str, typer.Argument(metavar="B", help="Where it has led to.")],
    text: Text,
    lines: Lines = False,
    field: Annotated[
        str, typer.Option("--field", help=f"Quantity to show: {', '.join(FIELDS)}.")
    ] = "effective_cosine",
    as_json: AsJson = False,
    batch_size: BatchSize = 8,
    max_length: MaxLength = None,
) -> None:
    """Compare every head of a model with the same head of another, on the same text."""
    with plain_errors():
        if field not in FIELDS:
            raise InputError(f"No field {field!r}. There are: {', '.join(FIELDS)}.")
        examples = read_examples(text, lines)
        before, after = loaded(model_a), loaded(model_b)
        tokenised = _tokenised_alike(before, after, examples, max_length)
        batches = before.batches(tokenised, batch_size)
        drift = compare_models(before.model, after.model, batches)
        if as_json:
            print(_json(drift, before, after, len(examples), tokenised.truncated))
        else:
            _show(drift, field, before, after)


def _tokenised_alike(
    before: TextModel, after: TextModel, texts: list[str], max_length: int | None
) -> TokenisedTexts:
    """The tokens of the texts, which must be those of both models."""
    tokenised = before.tokenise(texts, max_length)
    other = after.tokenise(texts, max_length)
    if list(tokenised.columns["input_ids"]) != list(other.columns["input_ids"]):
        raise InputError(
            f"{before.name} and {after.name} read the text as different tokens, so their maps "
            f"cannot be compared. Compare a model with one that was trained from it."
        )
    return tokenised


def _json(
    drift: HeadDrift, before: TextModel, after: TextModel, examples: int, truncated: int
) -> str:
    document = {
        "model_a": before.name,
        "model_b": after.name,
        "examples": examples,
        "truncated": truncated,
        "versions": versions(),
        "drift": drift.to_dict(),
    }
    return json.dumps(document, indent=1, allow_nan=False)


def _show(drift: HeadDrift, field: str, before: TextModel, after: TextModel) -> None:
    print(table(drift, field))
    values = drift.tensors()[field]
    moved = (1 - values if field.endswith("cosine") else values.abs()).nan_to_num(-1.0)
    row, head = divmod(int(moved.argmax()), values.shape[1])
    layer = row_labels(drift)[row]
    print(f"\nFrom {before.name} to {after.name}, head {head} of {layer} moved most: ", end="")
    print(f"{cell(values[row, head].item())}.")
