"""Pages of the site that are made of the code: a page for every public name, and benchmarks.

`mkdocs build -f docs/mkdocs.yml` calls the two functions that mkdocs knows by name.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
MODULES = {
    "attnlens": "Names at the top",
    "attnlens.attention": "Attention, head by head",
    "attnlens.attribution": "Attribution",
    "attnlens.identifiability": "Identifiability",
    "attnlens.recovery": "Token identifiability",
    "attnlens.pruning": "Heads removed",
    "attnlens.training": "Training",
    "attnlens.corpus": "Corpora",
    "attnlens.recipes": "What the commands compute",
    "attnlens.reporting.page": "The page",
    "attnlens.reporting.figures": "Figures",
    "attnlens.checking": "Checks",
    "attnlens.comparison": "Comparison",
    "attnlens.capture": "Captures",
    "attnlens.observer": "Observers of one's own",
    "attnlens.results": "Results",
    "attnlens.functional": "Pure functions",
    "attnlens.kernels": "Kernels",
    "attnlens.errors": "Errors",
}


def public_names() -> dict[str, dict[str, str]]:
    """List every public name of every public module, each object once, under its shortest name.

    Returns:
        By module, the path of each name.
    """
    claimed: set[int] = set()
    names: dict[str, dict[str, str]] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        exported = getattr(module, "__all__", None) or [
            name
            for name, item in vars(module).items()
            if not name.startswith("_") and getattr(item, "__module__", None) == module_name
        ]
        names[module_name] = {}
        for name in sorted(exported, key=str.lower):
            item = getattr(module, name)
            if inspect.ismodule(item) or id(item) in claimed:  # shorter names come first
                continue
            claimed.add(id(item))
            names[module_name][name] = f"{module_name}.{name}"
    return {module: named for module, named in names.items() if named}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API into the navigation."""
    api: list[Any] = [{"Overview": "api/index.md"}]
    for module, named in public_names().items():
        api.append({MODULES[module]: [{name: f"api/{path}.md"} for name, path in named.items()]})
    assert config.nav is not None
    place = next(i for i, part in enumerate(config.nav) if "Architectures" in part)
    config.nav.insert(place, {"API": api})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages."""

    def add(path: str, text: str) -> None:
        files.append(File.generated(config, path, content=text))

    overview = ["# API", "", "Every public name, by the module that holds it.", ""]
    for module, named in public_names().items():
        about = (inspect.getdoc(importlib.import_module(module)) or "").splitlines()[0]
        overview += [f"## {MODULES[module]}", "", f"`{module}`: {about}", ""]
        for name, path in named.items():
            overview.append(f"- [`{name}`]({path}.md)")
            add(f"api/{path}.md", f"---\ntitle: {name}\n---\n\n::: {path}\n")
        overview.append("")
    add("api/index.md", "\n".join(overview))
    add("benchmarks.md", _benchmarks())
    picture = ROOT / "benchmarks" / "results" / "growth.svg"
    files.append(File.generated(config, "pictures/growth.svg", abs_src_path=str(picture)))
    for path in sorted((ROOT / "examples" / "pictures").iterdir()):
        files.append(File.generated(config, f"pictures/{path.name}", abs_src_path=str(path)))
    return files


def _benchmarks() -> str:
    """Every figure of every recorded run, as tables."""
    lines = [
        "# Benchmarks",
        "",
        "`python -m benchmarks` compares with the textbook ways on your machine, after checking",
        "that the results agree. Every figure is a ratio of two things measured side by side.",
        "",
        "![Time and memory of one layer from 128 to 8192 tokens](pictures/growth.svg)",
        "",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        machine = ", ".join(f"{name} {value}" for name, value in run["machine"].items())
        lines += [f"## {path.stem}", "", machine, ""]
        for case in run["cases"]:
            lines += [f"### {case['name']}", "", *_table(case["comparisons"]), ""]
    return "\n".join(lines)


def _table(comparisons: list[dict[str, Any]]) -> list[str]:
    """The rows of one case."""
    rows = ["| setting | what | against | |", "|---|---|---|---|"]
    for entry in comparisons:
        words = "×" if entry["ratio_is"] == "cost" else "× as fast"
        ratio = f"{entry['ratio']:.3g} {words}"
        rows.append(f"| {entry['setting']} | {entry['subject']} | {entry['baseline']} | {ratio} |")
    return rows
