"""`attnlens scan` and `attnlens merge`: a corpus of any size, in one job or in many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from tqdm import tqdm

from attnlens.attention.statistics import HeadStatisticsResult
from attnlens.cli.options import MaxLength, ModelName, names_in
from attnlens.cli.terminal import bars, say
from attnlens.corpus import Corpus, Fields, Scan, merge_shards
from attnlens.corpus.readers import Format
from attnlens.corpus.records import Rejected
from attnlens.corpus.settings import OnError, Settings
from attnlens.errors import InputError
from attnlens.recipes.corpus_scan import scan_corpus
from attnlens.recipes.ingredients import reader
from attnlens.recovery import TokenIdentifiabilityResult
from attnlens.reporting.tables import explanation, head_table, layer_table, rates_table
from attnlens.results import LayeredResult


def scan(
    model: ModelName,
    data: Annotated[
        list[Path],
        typer.Option("--data", metavar="FILE", help="Text, JSONL, CSV, Parquet or data set."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Checkpoints and results go here.")
    ],
    observer: Annotated[
        list[str] | None,
        typer.Option("--observer", help="As in attribution:probes=2; may be repeated."),
    ] = None,
    text_field: Annotated[str, typer.Option("--text-field", help="Field of the text.")] = "text",
    pair_field: Annotated[
        str | None, typer.Option("--pair-field", help="Field of a second text, read after it.")
    ] = None,
    words_field: Annotated[
        str | None, typer.Option("--words-field", help="Field of a list of words, for a text.")
    ] = None,
    labels_field: Annotated[
        str | None, typer.Option("--labels-field", help="Field of a list of labels of words.")
    ] = None,
    label_names: Annotated[
        str | None,
        typer.Option("--label-names", help="As in NOUN,VERB,[CLS]; by default all there are."),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Of the files; else by the suffix.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Most examples at once.")
    ] = Settings.batch_size,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", min=1, help="Most tokens at once, with padding.")
    ] = Settings.batch_tokens,
    chunk: Annotated[
        int, typer.Option("--chunk", min=1, help="Examples sorted by length together.")
    ] = Settings.chunk,
    max_length: MaxLength = None,
    on_error: Annotated[
        OnError, typer.Option("--on-error", help="What to do with bad records.")
    ] = "skip",
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Only a part, I from 0; see merge.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the checkpoint in DIR, if there is one.")
    ] = True,
    checkpoint_every: Annotated[
        float, typer.Option("--checkpoint-every", min=0, help="Seconds between checkpoints.")
    ] = 30.0,
) -> None:
    """Scan a corpus with any observers; interrupted, the same command goes on."""
    corpus = Corpus(data, Fields(text_field, pair_field, words_field, labels_field), form)
    part = None if shard is None else _shard(shard)
    with bars() as progress:
        text_model = reader(model, progress)
    result = scan_corpus(
        text_model,
        corpus,
        observer or ["head-statistics"],
        label_names=None if label_names is None else names_in(label_names),
        out=out,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        chunk=chunk,
        max_length=max_length,
        checkpoint_every=checkpoint_every,
        resume=resume,
        on_error=on_error,
        report=_tell,
        shard=part,
        progress=Console(stderr=True).is_terminal,
    )
    if result.shard.index == 0 or not result.shard.complete:
        _show(result, out)


def merge(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the results.")],
    shards: Annotated[
        list[Path], typer.Argument(metavar="SHARD_DIR", help="What `scan --shard` wrote.")
    ],
) -> None:
    """Merge the shards of a corpus that `attnlens scan --shard` scanned one by one."""
    _show(merge_shards(out, shards), out)


def _tell(rejected: Rejected) -> None:
    """Say it above the bar, if there is one."""
    tqdm.write(str(rejected), file=sys.stderr)


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise InputError(f"--shard must be as in 0/4, the first of four. Got {text!r}.")
    return int(index), int(count)


def _show(result: Scan, out: Path) -> None:
    """Print a short summary."""
    console = Console(highlight=False, markup=False)
    counts = result.counts
    if result.shard.complete:
        for name, entry in result.results.items():
            _show_result(name, entry, console)
    console.print(
        f"{counts.records:,} records of {counts.tokens / max(counts.records, 1):.0f} tokens on "
        f"average, {counts.truncated:,} of them cut; {counts.rejected:,} rejected"
    )
    say(f"Written to {out}.")
    if not result.shard.complete:
        index, count = result.shard.index, result.shard.count
        say(f"This is shard {index} of {count}. Take all together with attnlens merge.")


def _show_result(name: str, result: Any, console: Console) -> None:
    if isinstance(result, HeadStatisticsResult):
        console.print(head_table(result, width=console.width))
        console.print(f"\n{explanation(result)}\n")
    elif isinstance(result, TokenIdentifiabilityResult):
        console.print(rates_table([result]))
    elif isinstance(result, LayeredResult):
        console.print(layer_table(name, result))
