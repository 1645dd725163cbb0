"""`attnlens scan` and `attnlens merge`: a corpus of any size, in one job or in many."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnlens.attention.statistics import HeadStatisticsResult
from attnlens.cli.options import MaxLength, ModelName
from attnlens.cli.terminal import loaded, plain_errors, say
from attnlens.corpus import Corpus, Fields, Scan, merge_shards, named_observer, scan
from attnlens.corpus.readers import Format
from attnlens.corpus.records import Rejected
from attnlens.corpus.scanning import OnError, Settings
from attnlens.errors import InputError
from attnlens.recovery.token_identifiability import TokenIdentifiabilityResult
from attnlens.reporting.head_table import explanation, head_table
from attnlens.reporting.rates_table import rates_table
from attnlens.results import cell, row_labels
from attnlens.texts.loading import TextModel

_COLUMNS = 6
_HAS_TQDM = find_spec("tqdm") is not None


def scan_corpus(
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
        str | None,
        typer.Option("--format", help=f"One of {', '.join(get_args(Format))}; else by the suffix."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Most examples at once.")
    ] = Settings.batch_size,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", min=1, help="Most tokens at once, with padding.")
    ] = Settings.batch_tokens,
    window: Annotated[
        int, typer.Option("--window", min=1, help="Examples sorted by length together.")
    ] = Settings.window,
    max_length: MaxLength = None,
    on_error: Annotated[
        str, typer.Option("--on-error", help="What bad records do: skip or raise.")
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
    with plain_errors():
        fields = Fields(text_field, pair_field, words_field, labels_field)
        corpus = Corpus(data, fields, _one_of(Format, form, "--format"))
        part = None if shard is None else _shard(shard)
        text_model = loaded(model)
        names = _label_names(corpus, text_model, label_names)
        specs = observer or ["head-statistics"]
        for spec in specs:
            named_observer(spec, names)  # before a long run
        result = scan(
            text_model.model,
            text_model.tokenizer,
            corpus,
            specs,
            label_names=names,
            out=out,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            window=window,
            max_length=max_length,
            checkpoint_every=checkpoint_every,
            resume=resume,
            on_error=_one_of(OnError, on_error, "--on-error") or "skip",
            report=_tell,
            shard=part,
            progress=Console(stderr=True).is_terminal and _HAS_TQDM,
            name=text_model.name,
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
    with plain_errors():
        _show(merge_shards(out, shards), out)


def _tell(rejected: Rejected) -> None:
    """Say it above the bar, if there is one."""
    if _HAS_TQDM:
        from tqdm import tqdm

        tqdm.write(str(rejected), file=sys.stderr)
    else:
        say(escape(str(rejected)))


def _one_of(kind: Any, value: str | None, option: str) -> Any:
    known = get_args(kind)
    if value is not None and value not in known:
        raise InputError(f"{option} must be one of {', '.join(known)}. Got {value!r}.")
    return value


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise InputError(f"--shard must be as in 0/4, the first of four. Got {text!r}.")
    return int(index), int(count)


def _label_names(corpus: Corpus, model: TextModel, given: str | None) -> tuple[str, ...]:
    """Labels that observers tell apart: as given, or those of the corpus and special tokens."""
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    if corpus.fields.labels is None:
        return ()
    special = model.tokenizer.convert_ids_to_tokens(model.tokenizer("")["input_ids"])
    return tuple(dict.fromkeys((*corpus.label_names(), *special)))


def _show(result: Scan, out: Path) -> None:
    """Print a short summary."""
    console = Console(highlight=False)
    counts = result.counts
    if result.shard.complete:
        for name, found in result.results.items():
            _show_result(name, found, console)
    console.print(
        f"{counts.records:,} records of {counts.tokens / max(counts.records, 1):.0f} tokens on "
        f"average, {counts.truncated:,} of them cut; {counts.rejected:,} rejected"
    )
    say(f"Written to {escape(str(out))}.")
    if not result.shard.complete:
        index, count = result.shard.index, result.shard.count
        say(f"This is shard {index} of {count}. Take all together with attnlens merge.")


def _show_result(name: str, result: Any, console: Console) -> None:
    if isinstance(result, HeadStatisticsResult):
        console.print(head_table(result, width=console.width))
        console.print(f"\n{escape(explanation(result))}\n")
    elif isinstance(result, TokenIdentifiabilityResult):
        console.print(escape(rates_table([result])))
    elif hasattr(result, "layers") and hasattr(result, "tensors"):
        console.print(_layer_table(name, result))


def _layer_table(name: str, result: Any) -> Table:
    """The first quantities of a result, averaged over all but the layers."""
    table = Table(title=name, title_justify="left", box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    rows = len(result.layers)
    columns = {
        quantity: tensor.double().reshape(rows, -1).nanmean(1).tolist()
        for quantity, tensor in result.tensors().items()
        if tensor.dim() in (1, 2) and len(tensor) == rows
    }
    shown = list(columns)[:_COLUMNS]
    for quantity in shown:
        table.add_column(quantity.replace("_", " "), justify="right")
    for row, label in enumerate(row_labels(result)):
        table.add_row(label, *(_number(columns[quantity][row]) for quantity in shown))
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else cell(value)
