"""What a page shows beside the statistics of heads, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlens.attention.maps import AttentionMap, EffectiveAttention
from attnlens.attribution.hidden_tokens import HiddenTokenAttribution
from attnlens.lens import Lens
from attnlens.recipes.ingredients import Progress
from attnlens.reporting.page import Report, report
from attnlens.texts.batching import TextModel

_PROBES = 8


@dataclass(frozen=True)
class PageContent:
    """What a page is to hold.

    Attributes:
        heads: heads with maps, or None for all.
        examples: number of examples with maps, from the first.
        tokens: most tokens of an example.
        megabytes: largest size of the file.
        attribution: whether to attribute the hidden states of those examples.
        identifiability: whether to identify the tokens of all examples.
        minimal: whether to find the simplest attention with the same output for those examples.
    """

    heads: tuple[int, ...] | None = None
    examples: int = 12
    tokens: int = 128
    megabytes: float = 10
    attribution: bool = False
    identifiability: bool = False
    minimal: bool = False

    def notes(self, examples: int) -> list[str]:
        """Say of how few examples the maps are.

        Args:
            examples: how many there are.

        Returns:
            A sentence, or nothing.
        """
        if examples <= self.examples:
            return []
        return [f"Maps are of the first {self.examples} of {examples} examples."]


@dataclass(frozen=True, eq=False)
class CloseLook:
    """What was seen of the first examples, one by one in their order.

    Attributes:
        results: maps by example and layer, and attribution if there is any.
        tokens: tokens of each example.
        segments: text of a pair that each of them is of.
    """

    results: Sequence[Any]
    tokens: Sequence[Sequence[str]]
    segments: Sequence[Sequence[int]]


def look_closely(
    model: TextModel,
    texts: Sequence[str],
    content: PageContent,
    layers: Iterable[int | str] | None,
    max_length: int | None,
    progress: Progress,
) -> CloseLook:
    """Keep maps, and attribution if wanted, of the first examples.

    Args:
        model: the model.
        texts: all examples.
        content: what the page is to hold.
        layers: layers to look at, or None for all.
        max_length: most tokens that the model reads of an example.
        progress: told after each example.

    Returns:
        What was seen.
    """
    maps = EffectiveAttention(heads=content.heads, minimal=content.minimal)
    attribution = [HiddenTokenAttribution(_PROBES, keep="matrices")] if content.attribution else []
    first = texts[: content.examples]
    entries: list[AttentionMap] = []
    tokens, segments = [], []
    progress("Looking closely", 0, len(first))
    with Lens(model.model, maps, *attribution, layers=layers), torch.no_grad():
        for place, text in enumerate(first):
            (batch,) = model.batches(model.tokenise([text], max_length), 1)
            model.model(**batch)
            ids = batch["input_ids"]
            tokens.append(model.tokenizer.convert_ids_to_tokens(ids[0].tolist()))
            segments.append(batch.get("token_type_ids", torch.zeros_like(ids))[0].tolist())
            entries += [_beginning(entry, content.tokens) for entry in maps.compute()]
            maps.reset()
            progress("Looking closely", place + 1, len(first))
    return CloseLook([*entries, *attribution], tokens, segments)


def _beginning(entry: AttentionMap, tokens: int) -> AttentionMap:
    """Drop what will not be shown, so that long examples do not fill the memory."""
    first = {
        name: maps[..., :tokens, :tokens].clone()
        for name in ("raw", "effective", "value_norm", "minimal")
        if (maps := getattr(entry, name)) is not None
    }
    return replace(entry, **first)


def lay_out(
    results: Sequence[Any],
    closely: CloseLook,
    content: PageContent,
    model: str,
    settings: Mapping[str, Any],
    notes: Sequence[str],
    second: tuple[str, CloseLook] | None = None,
) -> Report:
    """Lay results out as a page that names no folder of this machine.

    Args:
        results: what was seen of all examples.
        closely: what was seen of the first.
        content: what the page is to hold.
        model: name of the model.
        settings: how it was run.
        notes: what was cut or left out before.
        second: name of a second model, and what was seen of the first examples there.

    Returns:
        The page.
    """
    source = {"text": [Path(name).name for name in settings["text"]]} if "text" in settings else {}
    return report(
        [*results, *closely.results],
        tokens=closely.tokens,
        segments=closely.segments,
        second=None if second is None else (_name(second[0]), second[1].results),
        model=_name(model),
        notes=notes,
        settings={**settings, **source},
        max_tokens=content.tokens,
        max_bytes=int(content.megabytes * 1e6),
    )


def _name(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model
