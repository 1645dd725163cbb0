"""Scan the files of a corpus with a model by name, and with the labels that there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attnlens.corpus import Corpus, Scan, scan
from attnlens.observer import Observer
from attnlens.recipes.ingredients import reader
from attnlens.texts.batching import TextModel


def scan_corpus(
    model: TextModel | str,
    corpus: Corpus | Iterable[Any],
    observers: Sequence[Observer | str] = ("head-statistics",),
    *,
    label_names: Sequence[str] | None = None,
    **settings: Any,
) -> Scan:
    """Run a corpus through a model, and let observers look.

    Args:
        model: the model, or its name.
        corpus: files, or anything else that :func:`attnlens.scan` reads.
        observers: what to compute, as instances or by name, as in `"attribution:probes=2"`.
        label_names: labels that observers tell apart; by default all that the corpus has, and the
            model's special tokens.
        **settings: the other arguments of :func:`attnlens.scan`.

    Returns:
        What came of the scan.
    """
    text_model = reader(model)
    return scan(
        text_model.model,
        text_model.tokenizer,
        corpus,
        observers,
        label_names=_labels(corpus, text_model) if label_names is None else label_names,
        name=text_model.name,
        **settings,
    )


def _labels(corpus: Corpus | Iterable[Any], model: TextModel) -> tuple[str, ...]:
    if not isinstance(corpus, Corpus) or corpus.fields.labels is None:
        return ()
    special = model.tokenizer.convert_ids_to_tokens(model.tokenizer("")["input_ids"])
    return tuple(dict.fromkeys((*corpus.label_names(), *special)))
