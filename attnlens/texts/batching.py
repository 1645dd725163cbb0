"""Texts as token ids, and as padded batches for a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnlens.errors import InputError


@dataclass(frozen=True)
class TokenisedTexts:
    """Texts as token ids, cut to a length.

    Attributes:
        columns: one list of lists per model input, such as `input_ids`.
        truncated: number of texts that were cut.
        words: of texts given as words, the index of the word that each token is of, or None for
            special tokens.
    """

    columns: Mapping[str, Sequence[Sequence[int]]]
    truncated: int
    words: Sequence[Sequence[int | None]] | None = None

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every text, special tokens included."""
        return [len(ids) for ids in self.columns["input_ids"]]

    def groups(self, most: int, most_tokens: int | None = None) -> Iterator[list[int]]:
        """Put texts of similar length together, the longest first: too large a batch fails at once.

        Args:
            most: most texts in a batch.
            most_tokens: most tokens in a batch, padding included; a longer text is a batch of its
                own. None sets no limit.

        Yields:
            Indices of texts.
        """
        lengths = self.lengths
        group: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            tokens = lengths[group[0]] * (len(group) + 1) if group else 0
            too_many = most_tokens is not None and tokens > most_tokens
            if group and (len(group) == most or too_many):
                yield group
                group = []
            group.append(index)
        if group:
            yield group


@dataclass(frozen=True, eq=False)
class TextModel:
    """The part of a model that reads text, with its tokenizer.

    Attributes:
        name: what it was loaded from.
        model: in evaluation mode.
        tokenizer: the model's own.
        longest: most tokens the model can read at once, or None where no limit is known.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    longest: int | None

    def tokenise(
        self,
        texts: Sequence[str] | Sequence[Sequence[str]],
        max_length: int | None = None,
        pairs: Sequence[str] | None = None,
    ) -> TokenisedTexts:
        """Turn texts into token ids, cutting what the model cannot read.

        Args:
            texts: the texts, or the words of each.
            max_length: most tokens to keep of each, special tokens included; by default what
                the model can read.
            pairs: a second text for each, read after it.

        Returns:
            The token ids and how many texts were cut.

        Raises:
            InputError: if `max_length` is out of range, the ids do not belong to the model, or
                words are given to a tokenizer that cannot tell which token is of which.
        """
        limit = self._checked_limit(max_length)
        split = bool(texts) and not isinstance(texts[0], str)
        if split and not self.tokenizer.is_fast:
            raise InputError(
                f"The tokenizer of {self.name} is a slow one, which does not tell the word of a "
                f"token. Give texts instead of words."
            )
        inputs: Any = [list(texts), None if pairs is None else list(pairs)]
        encoded = self.tokenizer(*inputs, is_split_into_words=split, verbose=False)
        truncated = sum(limit is not None and len(ids) > limit for ids in encoded["input_ids"])
        if truncated:
            encoded = self.tokenizer(
                *inputs, is_split_into_words=split, truncation=True, max_length=limit
            )
        self._require_known_ids(encoded["input_ids"])
        accepted = inspect.signature(self.model.forward).parameters
        columns = {name: lists for name, lists in encoded.data.items() if name in accepted}
        words = [encoded.word_ids(index) for index in range(len(texts))] if split else None
        return TokenisedTexts(columns, truncated, words)

    def batches(self, texts: TokenisedTexts, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Pad texts of similar length together.

        Args:
            texts: from :meth:`tokenise`.
            batch_size: most texts in a batch.

        Yields:
            Keyword arguments of the model, `[B, K]` each, the longest texts first.
        """
        self.require_padding(batch_size)
        for group in texts.groups(batch_size):
            yield self.padded(texts, group)

    def require_padding(self, batch_size: int) -> None:
        """Refuse batches of several texts where the tokenizer cannot pad.

        Args:
            batch_size: most texts in a batch.

        Raises:
            InputError: if it has no token for it.
        """
        if batch_size > 1 and self.tokenizer.pad_token is None:
            raise InputError(
                f"The tokenizer of {self.name} has no padding token, so texts of different "
                f"length cannot share a batch. Use a batch size of 1."
            )

    def padded(self, texts: TokenisedTexts, group: Sequence[int]) -> dict[str, Tensor]:
        """Pad some of the texts to the length of the longest.

        Args:
            texts: from :meth:`tokenise`.
            group: their indices.

        Returns:
            Keyword arguments of the model, `[B, K]` each, on its device.
        """
        part = {name: [list(rows[i]) for i in group] for name, rows in texts.columns.items()}
        padding = len(group) > 1
        batch = self.tokenizer.pad(part, padding=padding, return_tensors="pt", verbose=False)
        return {name: tensor.to(self.model.device) for name, tensor in batch.items()}

    def _checked_limit(self, max_length: int | None) -> int | None:
        if max_length is None:
            return self.longest
        least = self.tokenizer.num_special_tokens_to_add() + 1
        if max_length < least or (self.longest is not None and max_length > self.longest):
            most = "" if self.longest is None else f" and at most {self.longest}"
            raise InputError(
                f"max_length must be at least {least}{most} for {self.name}. Got {max_length}."
            )
        return max_length

    def _require_known_ids(self, rows: Sequence[Sequence[int]]) -> None:
        size = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        largest = max((max(ids, default=0) for ids in rows), default=0)
        if size is not None and largest >= size:
            raise InputError(
                f"The tokenizer of {self.name} gave token id {largest}, but the model knows only "
                f"{size} tokens. They do not belong together."
            )
