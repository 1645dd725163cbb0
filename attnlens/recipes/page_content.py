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
    """

    heads: tuple[int, ...] | None = None
    examples: int = 12
    tokens: int = 128
    megabytes: float = 10
    attribution: bool = False
    identifiability: bool = False


@dataclass(frozen=True, eq=False)
class CloseLook:
    """What was seen of the first examples, one by one in their order.

    Attributes:
        results: maps by example and layer, and attribution if there is any.
        tokens: tokens of each example.
    """

    results: Sequence[Any]
    tokens: Sequence[Sequence[str]]


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
    maps = EffectiveAttention(heads=content.heads)
    attribution = [HiddenTokenAttribution(_PROBES, keep="matrices")] if content.attribution else []
    first = texts[: content.examples]
    entries: list[AttentionMap] = []
    tokens = []
    progress("Looking closely", 0, len(first))
    with Lens(model.model, maps, *attribution, layers=layers), torch.no_grad():
        for place, text in enumerate(first):
            (batch,) = model.batches(model.tokenise([text], max_length), 1)
            model.model(**batch)
            tokens.append(model.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist()))
            entries += [_beginning(entry, content.tokens) for entry in maps.compute()]
            maps.reset()
            progress("Looking closely", place + 1, len(first))
    return CloseLook([*entries, *attribution], tokens)


def _beginning(entry: AttentionMap, tokens: int) -> AttentionMap:
    """Drop what will not be shown, so that long examples do not fill the memory."""
    raw, effective = (m[..., :tokens, :tokens].clone() for m in (entry.raw, entry.effective))
    return replace(entry, raw=raw, effective=effective)


def lay_out(
    results: Sequence[Any],
    closely: CloseLook,
    content: PageContent,
    model: str,
    settings: Mapping[str, Any],
) -> Report:
    """Lay results out as a page that names no folder of this machine.

    Args:
        results: what was seen of all examples.
        closely: what was seen of the first.
        content: what the page is to hold.
        model: name of the model.
        settings: how it was run.

    Returns:
        The page.
    """
    source = {"text": [Path(name).name for name in settings["text"]]} if "text" in settings else {}
    return report(
        [*results, *closely.results],
        tokens=closely.tokens,
        model=Path(model).name if Path(model).is_dir() else model,
        settings={**settings, **source},
        max_tokens=content.tokens,
        max_bytes=int(content.megabytes * 1e6),
    )
