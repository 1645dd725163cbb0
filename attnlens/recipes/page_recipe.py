"""The interactive report of a run: what to look at more closely, and the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

import attnlens
from attnlens.attention.maps import AttentionMap, EffectiveAttention
from attnlens.attribution.hidden_tokens import HiddenTokenAttribution
from attnlens.cli.terminal import counting, say
from attnlens.errors import AttnLensError, InputError
from attnlens.lens import Lens
from attnlens.recipes.statistics_recipe import Run, Settings
from attnlens.recovery.map_training import MapTraining
from attnlens.recovery.token_identifiability import TokenIdentifiability
from attnlens.recovery.token_maps import MapKind
from attnlens.texts.loading import TextModel

PagePath = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write an interactive report.")
]
PageHeads = Annotated[
    str | None,
    typer.Option("--heads", help="Heads with maps in the report, as in 0,3; by default all."),
]
PageExamples = Annotated[
    int, typer.Option("--examples", min=1, help="Examples with maps in the report, from the first.")
]
PageTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Tokens of an example to show in the report.")
]
Megabytes = Annotated[
    float, typer.Option("--megabytes", min=2.5, help="Largest size of the report.")
]
Attribution = Annotated[
    bool,
    typer.Option(
        "--attribution", help="Put hidden token attribution into the report: seconds per example."
    ),
]
Identifiability = Annotated[
    bool,
    typer.Option(
        "--identifiability",
        help="Put token identifiability into the report; needs some dozen examples.",
    ),
]

_MAPS: tuple[MapKind, ...] = ("naive", "linear", "mlp")
_TRAINING = MapTraining(learning_rate=3e-3, max_epochs=30, patience=5)
_PROBES = 8


@dataclass(frozen=True)
class Page:
    """What the report is to hold.

    Attributes:
        path: the file.
        heads: heads with maps, or None for all.
        examples: examples with maps, from the first.
        tokens: most tokens of an example.
        megabytes: largest size of the file.
        attribution: whether to attribute the hidden states of those examples.
        identifiability: whether to identify the tokens of all examples.
    """

    path: Path
    heads: tuple[int, ...] | None = None
    examples: int = 12
    tokens: int = 128
    megabytes: float = 10
    attribution: bool = False
    identifiability: bool = False

    def __post_init__(self) -> None:
        if not self.path.absolute().parent.is_dir():
            raise InputError(f"Cannot write {self.path}: its folder does not exist.")

    def collectors(self, model: TextModel) -> list[TokenIdentifiability]:
        """Return what is to watch the run over all examples."""
        if not self.identifiability:
            return []
        words = model.model.get_input_embeddings()
        return [TokenIdentifiability("mlp", words=words, training=_TRAINING)]


def read_heads(text: str | None) -> tuple[int, ...] | None:
    """Read `0,3`.

    Args:
        text: the option, or None.

    Returns:
        The heads, or None for all.

    Raises:
        InputError: if it is something else.
    """
    if text is None:
        return None
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names or not all(name.isdecimal() for name in names):
        raise InputError(f"heads must be indices, as in 0,3. Got {text!r}.")
    return tuple(dict.fromkeys(map(int, names)))


def look_closely(
    model: TextModel, texts: Sequence[str], settings: Settings, page: Page
) -> tuple[list[Any], list[list[str]]]:
    """Keep maps, and attribution if wanted, of the first examples, one by one in their order.

    Args:
        model: the model.
        texts: all examples.
        settings: of the run.
        page: what is wanted.

    Returns:
        What to report, and the tokens of each example.
    """
    maps = EffectiveAttention(heads=page.heads)
    attribution = [HiddenTokenAttribution(_PROBES, keep="matrices")] if page.attribution else []
    chosen = texts[: page.examples]
    kept: list[AttentionMap] = []
    tokens = []
    lens = Lens(model.model, maps, *attribution, layers=settings.layers)
    with counting("Looking closely", len(chosen)) as advance, lens, torch.no_grad():
        for text in chosen:
            for batch in model.batches(model.tokenise([text], settings.max_length), 1):
                model.model(**batch)
                ids = batch["input_ids"][0].tolist()
                tokens.append(list(model.tokenizer.convert_ids_to_tokens(ids)))
            kept += [_beginning(entry, page.tokens) for entry in maps.compute()]
            maps.reset()
            advance(1)
    return [*kept, *attribution], tokens


def _beginning(entry: AttentionMap, tokens: int) -> AttentionMap:
    """Drop what will not be shown, so that long examples do not fill the memory."""
    raw, effective = (m[..., :tokens, :tokens].clone() for m in (entry.raw, entry.effective))
    return replace(entry, raw=raw, effective=effective)


def write_page(
    run: Run,
    page: Page,
    seen: tuple[list[Any], list[list[str]]],
    collectors: Sequence[TokenIdentifiability],
) -> None:
    """Write the report of a run.

    Args:
        run: the run over all examples.
        page: what is wanted.
        seen: from :func:`look_closely`.
        collectors: what watched the run, from :meth:`Page.collectors`.

    Raises:
        InputError: if the file cannot be written, or be that small.
    """
    closely, tokens = seen
    rates = []
    try:
        rates = [entry.using(kind).compute() for entry in collectors for kind in _MAPS]
    except AttnLensError as error:
        say(f"[yellow]note:[/] Tokens were not identified. {escape(str(error))}")
    report = attnlens.report(
        [run.statistics, *rates, *closely],
        tokens=tokens,
        model=Path(run.model).name if Path(run.model).is_dir() else run.model,
        settings={**asdict(run.settings), "text": Path(run.settings.text).name},
        max_tokens=page.tokens,
        max_bytes=int(page.megabytes * 1e6),
    )
    try:
        report.save(page.path)
    except OSError as error:
        raise InputError(f"Cannot write {page.path}: {error.strerror or error}.") from error
    for note in report.notes:
        say(f"[yellow]note:[/] {escape(note)}")
    if run.examples > page.examples:
        say(f"[yellow]note:[/] Maps are of the first {page.examples} of {run.examples} examples.")
    say(f"Written to {escape(str(page.path))}.")
