"""Arrows go one way: who may import whom, read from the source."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import attnlens

ROOT = Path(attnlens.__file__).parent
MODULES = {
    ".".join(("attnlens", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in sorted(ROOT.rglob("*.py"))
}

# A part may import those of the levels below its own, and itself. Nothing is exempt.
LEVELS = (
    {"errors", "showing"},
    {"kernels"},
    {"algebra"},
    {"files"},
    {"saving"},
    {"results"},
    {"capture"},
    {"observer"},
    {"attention", "attribution", "identifiability", "recovery", "tap", "texts", "demo"},
    {"functional", "lens"},
    {"answering", "checking", "comparison", "corpus", "pruning", "reporting", "training"},
    {"recipes"},
    {"cli"},
    {"__init__", "__main__"},
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}

CORE = {"torch", "transformers", "numpy", "opt_einsum", "safetensors"}
EXTRAS_WELCOME = {"cli", "recipes", "reporting", "corpus"}  # may import extras at the top of a file
TRANSFORMERS_WELCOME = {"pruning", "tap", "texts", "training"}


class Import(NamedTuple):
    """One imported module and whether the statement runs when the file is imported."""

    name: str
    at_top: bool


def part(module: str) -> str:
    """`attnlens.tap.tap` is in `model`; `attnlens` itself is `__init__`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def imports(path: Path) -> Iterator[Import]:
    """Every module a file imports, type-checking blocks included."""

    def visit(node: ast.AST, at_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, at_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                module = child.module or ""
                for alias in child.names:
                    full = f"{module}.{alias.name}"
                    yield Import(full if full in MODULES or full in PACKAGES else module, at_top)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, at_top and not inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True)


PACKAGES = {name.removesuffix(".__init__") for name in MODULES if name.endswith(".__init__")}
EVERY_FILE = pytest.mark.parametrize("module", MODULES)


def test_every_part_has_a_level() -> None:
    assert {part(module) for module in MODULES} <= LEVEL_OF.keys()


@EVERY_FILE
def test_arrows_go_down(module: str) -> None:
    own = part(module)
    for name, _ in imports(MODULES[module]):
        if name.split(".")[0] != "attnlens":
            continue
        below = part(name) == own or LEVEL_OF[part(name)] < LEVEL_OF[own]
        assert below, f"{module} imports {name}"


def test_a_file_name_occurs_once() -> None:
    names = [
        path.name for path in MODULES.values() if path.name not in ("__init__.py", "__main__.py")
    ]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice


@EVERY_FILE
def test_no_name_shadows_a_module(module: str) -> None:
    expected = importlib.import_module(module.removesuffix(".__init__"))
    scope: dict[str, object] = {}
    exec(f"import {module.removesuffix('.__init__')} as found", scope)
    assert scope["found"] is expected


@EVERY_FILE
def test_core_needs_only_its_dependencies(module: str) -> None:
    own = part(module)
    for name, at_top in imports(MODULES[module]):
        package = name.split(".")[0]
        if package in sys.stdlib_module_names or package in CORE or package == "attnlens":
            continue
        if package == "triton":
            assert own == "kernels", f"{module} imports {name}"
        else:
            assert not at_top or own in EXTRAS_WELCOME, f"{module} imports {name} at its top"


@EVERY_FILE
def test_few_parts_know_transformers(module: str) -> None:
    for name, _ in imports(MODULES[module]):
        if name.split(".")[0] == "transformers":
            assert part(module) in TRANSFORMERS_WELCOME, f"{module} imports {name}"
        if part(module) == "kernels":
            assert name.split(".")[0] in {*sys.stdlib_module_names, "torch", "numpy", "triton"} or (
                part(name) in {"kernels", "errors"}
            ), f"{module} imports {name}"


def test_the_public_names_exist() -> None:
    assert len(set(attnlens.__all__)) == len(attnlens.__all__)
    for name in attnlens.__all__:
        assert hasattr(attnlens, name), name
