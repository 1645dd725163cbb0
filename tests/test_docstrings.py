"""Examples in the docstrings of public names run as they stand."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import runpy
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlens
from attnlens import Capture, Observer
from attnlens.corpus import Fields, Record
from attnlens.demo import paragraphs
from attnlens.observer import LayerObserver, SumObserver
from attnlens.pruning import Plan
from attnlens.recovery import MapTraining
from attnlens.results import Result
from attnlens.training import Monitor

ROOT = Path(__file__).parents[1]
NAMED = runpy.run_path(str(ROOT / "docs" / "site.py"))["public_names"]()
ITEMS = {
    path: getattr(importlib.import_module(module), name)
    for module, names in NAMED.items()
    for name, path in names.items()
}


@pytest.fixture
def names(minilm, tmp_path) -> dict[str, Any]:
    """What every example may use."""
    texts = [paragraphs()[0][:80], paragraphs()[1][:60]]
    torch.manual_seed(0)
    return {
        "torch": torch,
        "copy": copy,
        "attnlens": attnlens,
        "model": minilm.model,
        "tokenizer": minilm.tokenizer,
        "batch": minilm.tokenize(texts),
        "folder": tmp_path,
        **{name: getattr(attnlens, name) for name in attnlens.__all__},
        **{path.rsplit(".", 1)[1]: item for path, item in ITEMS.items()},
    }


def example(path: str) -> doctest.DocTest:
    """The example of a name; without examples if it has none."""
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
    (found,) = finder.find(ITEMS[path], path, globs={}) or [None]
    return found


def is_handed_over(item: Any) -> bool:
    """Results, errors and records are made by what has an example of its own."""
    kinds = (Result, BaseException, Warning)
    made = inspect.isclass(item) and (issubclass(item, kinds) or hasattr(item, "_fields"))
    made = made or is_dataclass(item) or inspect.isabstract(item) or item is Monitor
    return made and item not in USERS_MAKE


USERS_MAKE = {Capture, Fields, MapTraining, Observer, Plan, Record, SumObserver, LayerObserver}
MADE = [
    path
    for path, item in ITEMS.items()
    if (inspect.isfunction(item) or inspect.isclass(item)) and not is_handed_over(item)
]


@pytest.mark.parametrize("path", MADE)
def test_the_example_runs(path: str, names: dict[str, Any]) -> None:
    found = example(path)
    assert found.examples, f"{path} has no example"
    module, _, _ = path.rpartition(".")
    found.globs = names | vars(importlib.import_module(module))
    failures = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(found, out=failures.append)
    assert not failures, "".join(failures)
