"""Turn labels of words into labels of tokens, for observers with names of labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlens.corpus.records import Label, Record
from attnlens.observer import Observer
from attnlens.texts.batching import TokenisedTexts

_NONE = -1  # observers leave tokens with such a label out


class TokenLabels:
    """Give the labels of each batch to every observer that has names of labels, but no labels.

    A token has the label of its word. The label of a special token is its name, such as `[CLS]`.
    Tokens with a label that an observer does not name are left out of its results by label.

    Args:
        observers: observers of any kind.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, observers: Sequence[Observer], tokenizer: Any) -> None:
        names = tokenizer.all_special_tokens
        self._special = dict(zip(tokenizer.all_special_ids, names, strict=True))
        self._padding_side = tokenizer.padding_side
        self._takers: list[tuple[Any, Mapping[Label, int]]] = [
            (observer, {name: place for place, name in enumerate(_names(observer))})
            for observer in observers
            if _names(observer)
        ]

    @contextmanager
    def given(
        self, texts: TokenisedTexts, members: Sequence[int], records: Sequence[Record]
    ) -> Iterator[None]:
        """Set the labels of observers while the model reads a batch.

        Args:
            texts: tokens of a chunk.
            members: indices of the texts in the batch.
            records: records of the chunk.

        Yields:
            Nothing; afterwards the observers have no labels, as before.
        """
        for observer, places in self._takers:
            observer.labels = self._labels(texts, members, records, places)
        try:
            yield
        finally:
            for observer, _ in self._takers:
                observer.labels = None

    def _labels(
        self,
        texts: TokenisedTexts,
        members: Sequence[int],
        records: Sequence[Record],
        places: Mapping[Label, int],
    ) -> Tensor:
        """Labels of the tokens of a batch, `[B, K]`."""
        rows = []
        for index in members:
            ids = texts.columns["input_ids"][index]
            words = [None] * len(ids) if texts.words is None else texts.words[index]
            pairs = zip(ids, words, strict=True)
            labels = [self._label(token, word, records[index], places) for token, word in pairs]
            rows.append(torch.tensor(labels))
        return pad_sequence(rows, True, _NONE, padding_side=self._padding_side)

    def _label(
        self, token: int, word: int | None, record: Record, places: Mapping[Label, int]
    ) -> int:
        if word is None:
            return places.get(self._special.get(token, ""), _NONE)
        if record.labels is None:
            return _NONE
        label = record.labels[word]
        return label if isinstance(label, int) else places.get(label, _NONE)


def _names(observer: Observer) -> tuple[str, ...]:
    """Return the names of labels of an observer; none if it has labels or needs none."""
    names = tuple(getattr(observer, "label_names", ()))
    if getattr(observer, "labels", 0) is not None or names == ("all",):
        return ()
    return names
