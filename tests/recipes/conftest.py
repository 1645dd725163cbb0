"""A small model that reads, and texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlens.texts.batching import TextModel
from attnlens.texts.loading import text_model
from tests.support import scanning


@pytest.fixture(scope="package")
def tiny() -> TextModel:
    return text_model(scanning.model(), scanning.tokenizer(), "tiny")


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model as files."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    scanning.model().save_pretrained(path)
    scanning.tokenizer().save_pretrained(path)
    return str(path)
