"""The heads of the packaged encoder reading the packaged paragraphs."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlens.attention.distributions import MinimalDistribution, MinimalDistributionResult
from attnlens.demo import MODEL, TEXT, model_folder, paragraphs
from attnlens.lens import Lens
from attnlens.recipes.head_report import HeadReport, report_heads
from attnlens.recipes.ingredients import Progress, reader, silent
from attnlens.recipes.page_content import PageContent


def report_demo(page: PageContent | None = None, progress: Progress = silent) -> HeadReport:
    """Look at every head of a small sentence encoder while it reads twelve paragraphs.

    Args:
        page: what a page is to hold; None makes none.
        progress: told how far it is.

    Returns:
        The statistics, the page, and notes on what was cut or left out.
    """
    model = replace(reader(str(model_folder()), progress), name=MODEL)
    about = {"text": [TEXT], "lines": False}
    return report_heads(model, paragraphs(), page=page, about=about, progress=progress)


def movable_attention(progress: Progress = silent) -> MinimalDistributionResult:
    """Find how much attention to the first paragraph could lie elsewhere; takes some seconds.

    Args:
        progress: told how far it is.

    Returns:
        How far the simplest distributions with the same outputs are from attention.
    """
    text_model = reader(str(model_folder()), progress)
    (batch,) = text_model.batches(text_model.tokenise(paragraphs()[:1]), 1)
    observer = MinimalDistribution()
    with Lens(text_model.model, observer), torch.no_grad():
        text_model.model(**batch)
    return observer.compute()
