"""Load a model, and the tokenizer of one that reads text, from a folder or from the Hub."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, logging

from attnlens.errors import AttnLensWarning, InputError
from attnlens.texts.batching import TextModel

# Tokenizers that know no limit say 1e30.
_NO_LIMIT = 10**9
_LONGEST_NAME = 200
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_logging: Any = logging


def load_model(name: str) -> PreTrainedModel:
    """Load a model of any kind with transformers' automatic class.

    Code that comes with a checkpoint is never run.

    Args:
        name: a local folder, or the name of a model on the Hugging Face Hub.

    Returns:
        The model in evaluation mode, on the CPU.

    Raises:
        InputError: if there is no such model, or it cannot be loaded.
    """
    model, report = _load("model", name, AutoModel, output_loading_info=True)
    _warn_of_missing(name, report["missing_keys"])
    loaded: PreTrainedModel = model.eval()
    return loaded


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
    name = name or getattr(model.config, "name_or_path", "") or type(model).__name__
    _require_text(model, name)
    return TextModel(name, model, tokenizer, _longest(model, tokenizer))


def load_text_model(name: str, load: Callable[[str], Any] = load_model) -> TextModel:
    """Load a model and its tokenizer.

    Of an encoder-decoder the encoder is kept, which a warning says, and of a model with a text
    tower that tower. Code that comes with a checkpoint is never run.

    Args:
        name: a local folder, or the name of a model on the Hugging Face Hub.
        load: loads the model.

    Returns:
        The model in evaluation mode, on the CPU.

    Raises:
        InputError: if there is no such model, it cannot be loaded, or it does not read text.
    """
    model = _text_part(load(name), name)
    _require_text(model, name)
    tokenizer = _load("tokenizer", name, AutoTokenizer)
    loaded = text_model(model, tokenizer, name)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise InputError(
            f"{name} has no tokenizer: only special tokens were found. Put the files of the "
            f"tokenizer (tokenizer.json or a vocabulary) beside the model."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return loaded


def _require_text(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that reads something else, before its tokenizer is missed."""
    reads = model.main_input_name
    if reads == "pixel_values":
        raise InputError(
            f"{name} reads pixels, not text. For images: attnlens report --images FILE."
        )
    if reads in ("input_values", "input_features"):
        raise InputError(f"{name} reads sound, not text. In Python, a Lens looks at any model.")
    if reads != "input_ids":
        raise InputError(f"{name} reads {reads}, not text. In Python, a Lens looks at any model.")


def _load(what: str, name: str, cls: Any, **options: Any) -> Any:
    """Call `from_pretrained`, and turn whatever it raises into an InputError."""
    local = _is_folder(name)
    try:
        with _quietly(local):
            return cls.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "ignore_mismatched_sizes" in reason:  # what it points at was silenced
            reason = "its weights are not of the sizes that its config.json says."
        raise InputError(f"Cannot load the {what} of {name}: {reason}{_advice(local)}") from error


def _is_folder(name: str) -> bool:
    """Tell a folder from a name on the Hub, and refuse what is neither."""
    if name and os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, CONFIG_NAME)):
            raise InputError(f"The folder {name} holds no model: it has no config.json.")
        return True
    if os.path.isfile(name):
        raise InputError(f"{name} is a file. Give the folder that holds config.json.")
    if not _HUB_NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InputError(f"There is no folder {name!r}, nor can a model on the Hub have that name.")
    return False


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


def _text_part(model: Any, name: str) -> Any:
    """The part of a model that reads text."""
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
        warnings.warn(
            f"{name} is an encoder-decoder. Only its encoder is looked at.",
            AttnLensWarning,
            stacklevel=3,
        )
    tower = getattr(model, "text_model", None)
    return tower if isinstance(tower, PreTrainedModel) else model


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
    verbosity, bars = _logging.get_verbosity(), _logging.is_progress_bar_enabled()
    _logging.set_verbosity_error()
    if without_bars:
        _logging.disable_progress_bar()
    try:
        yield
    finally:
        _logging.set_verbosity(verbosity)
        if without_bars and bars:
            _logging.enable_progress_bar()
