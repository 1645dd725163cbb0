"""Statistics of every head over texts, and a page that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from attnlens.attention.statistics import HeadHealthResult, HeadStatistics, HeadStatisticsResult
from attnlens.errors import AttnLensError
from attnlens.files import write_atomically
from attnlens.lens import Lens
from attnlens.recipes.identification import identified_tokens, token_collector
from attnlens.recipes.ingredients import Progress, as_json, reader, run_batches, silent
from attnlens.recipes.page_content import CloseLook, PageContent, lay_out, look_closely
from attnlens.recovery.token_identifiability import TokenIdentifiability
from attnlens.reporting.page import Report
from attnlens.results import plain
from attnlens.saving import save
from attnlens.texts.batching import TextModel

FIELDS = tuple(entry.name for entry in fields(HeadHealthResult) if entry.type == "Tensor")


@dataclass(frozen=True, eq=False)
class HeadReport:
    """Every head of a model over texts.

    Attributes:
        model: name of the model.
        settings: how it was run.
        examples: number of texts.
        truncated: number of texts that were cut to the model's limit.
        statistics: one number per head and quantity.
        page: the page, if there is to be one.
        notes: what was cut or left out, in sentences.
    """

    model: str
    settings: Mapping[str, Any]
    examples: int
    truncated: int
    statistics: HeadStatisticsResult
    page: Report | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the page and the notes, ready for JSON."""
        names = ("model", "examples", "truncated", "settings", "statistics")
        return plain({name: getattr(self, name) for name in names})

    def write(self, folder: Path) -> None:
        """Write `head_statistics.safetensors` and `head_statistics.json`.

        Args:
            folder: where to; it must exist.
        """
        path = folder / "head_statistics.safetensors"
        save(self.statistics, path, model=self.model, settings=self.settings)
        write_atomically(path.with_suffix(".json"), f"{as_json(self.to_dict())}\n".encode())


def report_heads(
    model: TextModel | str,
    texts: Sequence[str],
    *,
    layers: Iterable[int | str] | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    page: PageContent | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> HeadReport:
    """Look at every head of a model while it reads texts.

    Args:
        model: the model, or its name.
        texts: at least one.
        layers: indices or module names of the layers to look at; None looks at all.
        batch_size: most texts in a batch.
        max_length: most tokens of a text; by default what the model can read.
        page: what a page is to hold; None makes none.
        about: what else to record as settings, such as where the texts are from.
        progress: told how far it is.

    Returns:
        The statistics, the page, and notes on what was cut or left out.
    """
    text_model = reader(model, progress)
    layers = None if layers is None else tuple(layers)
    options = {"batch_size": batch_size, "max_length": max_length, "layers": layers}
    if page is not None:  # first, because it may be refused
        closely = look_closely(text_model, texts, page, layers, max_length, progress)
    collectors = [token_collector(text_model)] if page and page.identifiability else []
    observer = HeadStatistics(fields="health")
    tokenised = text_model.tokenise(texts, max_length)
    with Lens(text_model.model, observer, *collectors, layers=layers):
        for _ in run_batches(text_model, tokenised, batch_size, progress):
            pass
    report = HeadReport(
        text_model.name,
        {**(about or {}), **options},
        len(texts),
        tokenised.truncated,
        observer.compute(),
    )
    if tokenised.truncated:
        limit = max_length or text_model.longest
        note = f"{tokenised.truncated} of {len(texts)} examples were longer than {limit} tokens"
        report = replace(report, notes=(f"{note} and were cut there.",))
    return report if page is None else _with_page(report, page, closely, collectors)


def _with_page(
    report: HeadReport,
    content: PageContent,
    closely: CloseLook,
    collectors: Sequence[TokenIdentifiability],
) -> HeadReport:
    results: list[Any] = [report.statistics]
    notes = list(report.notes)
    try:
        results += [rates for entry in collectors for rates in identified_tokens(entry)]
    except AttnLensError as error:
        notes.append(f"Tokens were not identified. {error}")
    notes += content.notes(report.examples)
    page = lay_out(results, closely, content, report.model, report.settings, notes)
    return replace(report, page=page, notes=page.notes)
