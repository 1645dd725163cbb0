"""Load a text model with its tokenizer, and turn texts into batches for it."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from attnlens.errors import AttnLensWarning, InputError

# Tokenizers that know no limit say 1e30.
_NO_LIMIT = 10**9
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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

    @property
    def by_length(self) -> list[int]:
        """Indices of the texts, longest first, so that a batch too large fails at once."""
        lengths = self.lengths
        return sorted(range(len(lengths)), key=lambda index: -lengths[index])


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
        truncated = 0
        if limit is not None:
            truncated = sum(len(ids) > limit for ids in encoded["input_ids"])
        if truncated:
            encoded = self.tokenizer(
                *inputs, is_split_into_words=split, truncation=True, max_length=limit
            )
        self._require_known_ids(encoded["input_ids"])
        accepted = inspect.signature(self.model.forward).parameters
        kept = {name: lists for name, lists in encoded.data.items() if name in accepted}
        words = [encoded.word_ids(index) for index in range(len(texts))] if split else None
        return TokenisedTexts(kept, truncated, words)

    def batches(self, texts: TokenisedTexts, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Pad texts of similar length together.

        Args:
            texts: from :meth:`tokenise`.
            batch_size: most texts in a batch.

        Yields:
            Keyword arguments of the model, `[B, K]` each, the longest texts first.

        """
        self.require_padding(batch_size)
        order = texts.by_length
        for start in range(0, len(order), batch_size):
            yield self.padded(texts, order[start : start + batch_size])

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

    def padded(self, texts: TokenisedTexts, chosen: Sequence[int]) -> dict[str, Tensor]:
        """Pad some of the texts to the length of the longest.

        Args:
            texts: from :meth:`tokenise`.
            chosen: their indices.

        Returns:
            Keyword arguments of the model, `[B, K]` each.
        """
        part = {name: [list(rows[i]) for i in chosen] for name, rows in texts.columns.items()}
        padding = len(chosen) > 1
        return dict(self.tokenizer.pad(part, padding=padding, return_tensors="pt", verbose=False))

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
        known = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        largest = max((max(ids, default=0) for ids in rows), default=0)
        if known is not None and largest >= known:
            raise InputError(
                f"The tokenizer of {self.name} gave token id {largest}, but the model knows only "
                f"{known} tokens. They do not belong together."
            )


def load_model(name: str) -> PreTrainedModel:
    """Load a model of any kind with transformers' automatic class.

    Code that comes with a checkpoint is never run.

    Args:
        name: a local folder, or the name of a model on the Hugging Face Hub.

    Returns:
        The model in evaluation mode, on the CPU.
    """
    local = _is_folder(name)
    with _quietly(local), _failing_to_load("model", name, local):
        loaded: PreTrainedModel = AutoModel.from_pretrained(name, trust_remote_code=False)
    return loaded.eval()


def text_model(model: nn.Module, tokenizer: Any, name: str = "") -> TextModel:
    """Take a model and its tokenizer together.

    Args:
        model: a model that reads text.
        tokenizer: its own.
        name: of the model, for the record; by default what its configuration says.

    Returns:
        Both, with the longest text that they can read.

    Raises:
        InputError: if the model reads something else than text, or they are not of transformers.
    """
    for part, kind in ((model, PreTrainedModel), (tokenizer, PreTrainedTokenizerBase)):
        if not isinstance(part, kind):
            raise InputError(f"{type(part).__name__} is no {kind.__name__} of transformers.")
    assert isinstance(model, PreTrainedModel)
    known = name or getattr(model.config, "name_or_path", "") or type(model).__name__
    if model.main_input_name != "input_ids":
        raise InputError(f"{known} reads {model.main_input_name}, not text.")
    return TextModel(known, model, tokenizer, _longest(model, tokenizer))


def load_text_model(name: str) -> TextModel:
    """Load a model and its tokenizer with transformers' automatic classes.

    Of an encoder-decoder the encoder is kept, of a model with a text tower that tower. Code that
    comes with a checkpoint is never run.

    Args:
        name: a local folder, or the name of a model on the Hugging Face Hub.

    Returns:
        The model in evaluation mode, on the CPU.

    Raises:
        InputError: if there is no such model, it cannot be loaded, or it does not read text.
    """
    local = _is_folder(name)
    options: dict[str, Any] = {"trust_remote_code": False}
    with _quietly(local):
        with _failing_to_load("model", name, local):
            loaded, report = AutoModel.from_pretrained(name, output_loading_info=True, **options)
        with _failing_to_load("tokenizer", name, local):
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
    _warn_of_missing(name, report["missing_keys"])
    model = _reader(loaded, name)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise InputError(
            f"{name} has no tokenizer: only special tokens were found. Put the files of the "
            f"tokenizer (tokenizer.json or a vocabulary) beside the model."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return TextModel(name, model, tokenizer, _longest(model, tokenizer))


def _is_folder(name: str) -> bool:
    """Tell a folder from a name on the Hub, and refuse what is neither."""
    if name and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InputError(f"The folder {name} holds no model: it has no config.json.")
        return True
    if Path(name).is_file():
        raise InputError(f"{name} is a file. Give the folder that holds config.json.")
    if not _HUB_NAME.fullmatch(name):
        raise InputError(f"There is no folder {name!r}, nor can a model on the Hub have that name.")
    return False


@contextmanager
def _failing_to_load(what: str, name: str, local: bool) -> Iterator[None]:
    """Turn whatever `from_pretrained` raises into an InputError."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"Cannot load the {what} of {name}: {lines[0]}{_advice(local)}") from error


def _advice(local: bool) -> str:
    if local:
        return ""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off"):
        return " HF_HUB_OFFLINE is set, so only the local cache was searched."
    return " There is no folder of that name either."


def _warn_of_missing(name: str, missing: Sequence[str]) -> None:
    """Say so when weights were made up; an unused pooler is the usual harmless case."""
    invented = sorted(key for key in missing if "pooler" not in key)
    if invented:
        warnings.warn(
            f"{len(invented)} weights are missing in {name} and were initialised at random, "
            f"first {invented[0]}. What follows does not describe a trained model.",
            AttnLensWarning,
            stacklevel=3,
        )


def _reader(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The part of a model that reads text."""
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    tower = getattr(model, "text_model", None)
    if isinstance(tower, PreTrainedModel):
        model = tower
    if model.main_input_name != "input_ids":
        raise InputError(f"{name} reads {model.main_input_name}, not text.")
    return model.eval()


def _longest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The smaller limit of the tokenizer and of the table of positions."""
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < _NO_LIMIT else []
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - _reserved_positions(model))
    return min(limits, default=None)


def _reserved_positions(model: nn.Module) -> int:
    """Rows of the table of positions that no token uses: RoBERTa counts from padding_idx + 1."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


@contextmanager
def _quietly(without_bars: bool) -> Iterator[None]:
    """Silence transformers' remarks for a block, and its progress bars where nothing is fetched."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if without_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if without_bars and bars:
            logging.enable_progress_bar()
