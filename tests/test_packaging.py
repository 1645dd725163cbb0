"""What a wheel holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import attnlens

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_the_package_and_its_data(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    finished = subprocess.run(build, capture_output=True, text=True, timeout=1800)
    assert finished.returncode == 0, finished.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnlens").rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js")
        or path.name in ("py.typed", "paragraphs.txt")
    }
    assert {"attnlens/py.typed", "attnlens/demo/paragraphs.txt"} <= sources <= names
    info = f"attnlens-{attnlens.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"attnlens", info}
    entry_points = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt")
    assert b"attnlens = attnlens.cli:main" in entry_points
