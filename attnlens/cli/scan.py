"""`attnlens scan` and `attnlens merge`: a corpus of any size, in one job or in many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlens.cli.choices import (
    BATCH_SIZE,
    BATCH_TOKENS,
    CHECKPOINT_EVERY,
    CHUNK,
    OBSERVERS,
    Format,
    OnError,
)
from attnlens.cli.options import (
    AsJson,
    BatchSize,
    MaxLength,
    ModelName,
    Overwrite,
    Sentences,
    names_in,
)
from attnlens.cli.terminal import bars, going_on, print_json, say
from attnlens.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from attnlens.corpus import Corpus, Scan
    from attnlens.corpus.records import Rejected

_MOST_TOLD = 10  # rejected records that are told one by one


def scan(
    model: ModelName,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Checkpoints and results go here.")
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text, JSONL, CSV, Parquet or data set, also .gz and .zst; - is standard input. "
            "May be repeated.",
        ),
    ] = None,
    sentence: Sentences = None,
    observer: Annotated[
        list[str] | None,
        typer.Option(
            "--observer",
            metavar="NAME",
            help=f"As in attribution:probes=2; may be repeated. Of: {', '.join(OBSERVERS)}.",
            autocompletion=lambda incomplete: [n for n in OBSERVERS if n.startswith(incomplete)],
        ),
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
    batch_size: BatchSize = BATCH_SIZE,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", min=1, help="Most tokens at once, with padding.")
    ] = BATCH_TOKENS,
    chunk: Annotated[
        int, typer.Option("--chunk", min=1, help="Examples sorted by length together.")
    ] = CHUNK,
    max_length: MaxLength = None,
    on_error: Annotated[
        OnError, typer.Option("--on-error", help="What to do with bad records.")
    ] = "skip",
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Only a part, I from 0; see merge.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the checkpoint in DIR.")
    ] = True,
    checkpoint_every: Annotated[
        float, typer.Option("--checkpoint-every", min=0, help="Seconds between checkpoints.")
    ] = CHECKPOINT_EVERY,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Scan a corpus with any observers; interrupted, the same command goes on."""
    from rich.console import Console

    from attnlens.recipes.corpus_scan import scan_corpus
    from attnlens.recipes.ingredients import reader

    fields = text_field, pair_field, words_field, labels_field
    corpus = _corpus(text, sentence, fields, form)
    part = None if shard is None else _shard(shard)
    advice = f"The same command goes on from the last checkpoint in {output}."
    with going_on(advice), _telling(output) as tell:
        with bars() as progress:
            text_model = reader(model, progress)
        result = scan_corpus(
            text_model,
            corpus,
            observer or ["head-statistics"],
            label_names=None if label_names is None else names_in(label_names, "--label-names"),
            out=output,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            chunk=chunk,
            max_length=max_length,
            checkpoint_every=checkpoint_every,
            resume=resume,
            on_error=on_error,
            report=tell,
            shard=part,
            progress=Console(stderr=True).is_terminal,
            overwrite=overwrite,
        )
    if result.shard.index == 0 or not result.shard.complete:
        _show(result, output, as_json)


def merge(
    shards: Annotated[
        list[Path], typer.Argument(metavar="SHARD_DIR", help="What `scan --shard` wrote.")
    ],
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder for the results.")
    ],
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Merge the shards of a corpus that `attnlens scan --shard` scanned one by one."""
    from attnlens.corpus import merge_shards

    _show(merge_shards(output, shards, overwrite=overwrite), output, as_json)


@contextmanager
def _telling(output: Path) -> Iterator[Callable[[Rejected], None]]:
    """Tell of the first rejected records, above the bar if there is one, and count the others."""
    from tqdm import tqdm

    count = 0

    def tell(rejected: Rejected) -> None:
        nonlocal count
        count += 1
        if count <= _MOST_TOLD:
            tqdm.write(str(rejected), file=sys.stderr)

    try:
        yield tell
    finally:
        if count > _MOST_TOLD:
            say(f"{count - _MOST_TOLD:,} more in {output}, in *.rejected.txt.", "note")


def _corpus(
    text: list[str] | None,
    sentences: list[str] | None,
    fields: tuple[str, str | None, str | None, str | None],
    form: Format | None,
) -> Corpus | list[str]:
    """The files, or the sentences themselves."""
    from attnlens.corpus import Corpus, Fields

    if text and sentences:
        raise InputError("A corpus is of files or of sentences. Give --text or --sentence.")
    if sentences:
        if any(fields[1:]) or fields[0] != "text" or form:
            raise InputError("Options of fields and formats do nothing with --sentence.")
        return sentences
    if not text:
        raise InputError("There is nothing to read. Give --text FILE or --sentence TEXT.")
    return Corpus(text, Fields(*fields), form)


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise InputError(f"--shard must be as in 0/4, the first of four. Got {text!r}.")
    return int(index), int(count)


def _show(result: Scan, output: Path, as_json: bool) -> None:
    """Print a short summary."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    counts = result.counts
    if as_json:
        results = {name: entry.to_dict() for name, entry in result.results.items()}
        shard = [result.shard.index, result.shard.count]
        print_json({"counts": vars(counts), "shard": shard, "results": results})
    else:
        for name, entry in result.results.items() if result.shard.complete else ():
            _show_result(name, entry, console)
        console.print(
            f"{counts.records:,} records of {counts.tokens / max(counts.records, 1):.0f} tokens "
            f"on average, {counts.truncated:,} of them cut; {counts.rejected:,} rejected"
        )
    say(f"Written to {output}.")
    if not result.shard.complete:
        index, count = result.shard.index, result.shard.count
        say(f"This is shard {index} of {count}. Take all together with attnlens merge.")


def _show_result(name: str, result: Any, console: Console) -> None:
    from attnlens.attention.statistics import HeadStatisticsResult
    from attnlens.recovery import TokenIdentifiabilityResult
    from attnlens.reporting.tables import explanation, head_table, layer_table, rates_table
    from attnlens.results import LayeredResult

    if isinstance(result, HeadStatisticsResult):
        console.print(head_table(result, width=console.width))
        console.print(f"\n{explanation(result)}\n")
    elif isinstance(result, TokenIdentifiabilityResult):
        console.print(rates_table([result]))
    elif isinstance(result, LayeredResult):
        console.print(layer_table(name, result, console.width))
    else:
        entries = result if isinstance(result, list) else [result]
        kinds = ", ".join(sorted({type(entry).__name__ for entry in entries}))
        console.print(f"{name}: {len(entries)} × {kinds}")
