"""The page's modules under node: their types, and a test of each."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import attnlens.reporting
from attnlens.reporting.modules import script

TOOLS = Path(__file__).parents[1] / "web"
SOURCES = Path(attnlens.reporting.__file__).parent / "web"
MODULES = sorted(path.stem for path in SOURCES.glob("*.js"))


def node(*command):
    """Run a command of node's in the folder of its tests."""
    if shutil.which("node") is None or not (TOOLS / "node_modules").is_dir():
        pytest.fail(f"needs node 20 or newer and its packages: npm ci --prefix {TOOLS}")
    finished = subprocess.run(
        ["node", *command], cwd=TOOLS, capture_output=True, text=True, timeout=1800
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_types_fit():
    node("node_modules/typescript/bin/tsc", "--project", ".")


def test_every_module_is_checked_and_imported():
    for name in MODULES:
        source = (SOURCES / f"{name}.js").read_text(encoding="utf-8")
        assert name == "vendor" or source.startswith("// @ts-check\n")
        assert f"modules.{name} = (() =>" in script()


def test_modules_do_what_they_say():
    said = node("--test")
    assert int(re.search(r"# pass (\d+)", said)[1]) >= 36 and "# fail 0" in said


def test_no_module_writes_markup():
    for name in set(MODULES) - {"vendor"}:
        source = (SOURCES / f"{name}.js").read_text(encoding="utf-8")
        source = re.sub(r"/\*\*.*?\*/", "", source, flags=re.DOTALL)  # types name modules
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", source)
        assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", source)
