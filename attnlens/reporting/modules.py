"""The page's modules as one script.

Each file of `web/` is a module with imports and exports, which editors, type checkers and node
read as it is. A page from disk cannot import modules, so that here each becomes a function's scope.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_EXPORTS = re.compile(r"export\s*\{([^}]*)\};?\s*$")  # at the end of a bundle


def asset(name: str) -> str:
    """Read a file of the page.

    Args:
        name: of the file.

    Returns:
        Its text.
    """
    return files(__package__).joinpath("web", name).read_text(encoding="utf-8")


@cache
def script(entry: str = "page") -> str:
    """Join a module with all that it imports.

    Args:
        entry: name of the module, without its ending.

    Returns:
        A script that runs it.
    """
    scopes: dict[str, str] = {}
    _visit(entry, scopes)
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(scopes.values()) + "})();\n"


def _visit(name: str, scopes: dict[str, str]) -> None:
    """Add a module after those that it imports."""
    if name in scopes:
        return
    source = asset(f"{name}.js")
    for _, imported in _IMPORT.findall(source):
        _visit(imported, scopes)
    exports = ", ".join(exported for _, exported in _EXPORT.findall(source))
    if bundle := _EXPORTS.search(source):
        renamed = (entry.strip().split(" as ") for entry in bundle[1].split(","))
        exports = ", ".join(f"{names[-1]}: {names[0]}" for names in renamed)
        source = source[: bundle.start()]
    source = _IMPORT.sub(lambda m: f"const {m[1].replace(' as ', ': ')} = modules.{m[2]};", source)
    source = _EXPORT.sub(r"\1", source)
    scopes[name] = f"modules.{name} = (() => {{\n{source}\nreturn {{ {exports} }};\n}})();\n"
