"""One HTML file that shows results in a browser, with nothing fetched from anywhere."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from attnlens.errors import InputError
from attnlens.files import versions, write_atomically
from attnlens.reporting.content import document

MOST_BYTES = 10_000_000
_SHELL_BYTES = 100_000  # markup, notes and settings, generously


@dataclass(frozen=True)
class Report:
    """A page, ready to be saved.

    Attributes:
        html: the whole file.
        notes: what was left out of it, and why.
    """

    html: str = field(repr=False)
    notes: tuple[str, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, whole or not at all.

        Args:
            path: where to; the folder must exist.
        """
        write_atomically(path, self.html.encode())


def report(
    results: Any,
    *,
    tokens: Sequence[Sequence[str]] | None = None,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    max_tokens: int = 128,
    max_bytes: int = MOST_BYTES,
) -> Report:
    """Lay results out as an interactive page; needs `plotly`.

    The page shows layer × head grids of statistics, raw and effective attention and their
    difference for a head and an example, attribution by layer for a token, and curves over
    layers: whichever the results hold.

    Args:
        results: a :class:`~attnlens.Lens` that has looked, observers, or what they computed; one
            or several.
        tokens: tokens of each example, in the order in which the examples were seen, padding
            left out or kept. Positions stand in for them where they are not given.
        model: name of the model; of a folder only its last part is shown.
        settings: what else to say about the run; of paths only the last part is shown.
        layers: layer indices of the maps to include; None includes all.
        heads: head indices of the maps to include; None includes all that fit.
        max_tokens: most tokens of an example to show, from the first.
        max_bytes: bound on the size of the file. To keep it, maps are rounded to fewer decimals,
            then cut to fewer tokens, then those of some heads left out; the page says so.

    Returns:
        The page.

    Raises:
        InputError: if there is nothing to show, tokens do not fit, or the page cannot be that
            small.
    """
    plotly = _plotly()
    style, body, behaviour = _asset("page.css"), _asset("page.html"), _behaviour()
    parts = (plotly.packed, style, behaviour, body)
    fixed = sum(len(part.encode()) for part in parts) + _SHELL_BYTES
    content = document(
        results,
        tokens,
        None if layers is None else set(layers),
        None if heads is None else set(heads),
        max_tokens,
        max_bytes - fixed,
    )
    content |= {
        "model": without_folders(model),
        "settings": without_folders(dict(settings or {})),
        "versions": versions(),
    }
    page = body.replace("/*style*/", style)
    for name, digest in {"plotly": plotly.digest, "behaviour": _digest(behaviour)}.items():
        page = page.replace(f"{{{{{name} digest}}}}", digest)
    page = page.replace("{{title}}", html.escape(f"attnlens · {content['model'] or 'report'}"))
    head, between, tail = _split(page, "{{plotly}}", "{{behaviour}}")
    before, after = head.split("{{content}}")
    page = "".join([before, _as_json(content), after, plotly.packed, between, behaviour, tail])
    if len(page.encode()) > max_bytes:
        raise InputError(
            f"The page needs {len(page.encode()):,} bytes, above max_bytes={max_bytes:,}. Pass "
            f"fewer examples, fewer max_tokens, or raise max_bytes."
        )
    return Report(page, tuple(content["notes"]))


def without_folders(entry: Any) -> Any:
    """Replace every absolute path in settings by its last part.

    Args:
        entry: a string, or lists and mappings of strings.

    Returns:
        The same without folders of the user's machine.
    """
    if isinstance(entry, Mapping):
        return {str(name): without_folders(value) for name, value in entry.items()}
    if isinstance(entry, (list, tuple, set, frozenset)):
        return [without_folders(value) for value in entry]
    if isinstance(entry, os.PathLike):
        entry = os.fspath(entry)
    if not isinstance(entry, str):
        return entry if isinstance(entry, (bool, int, float, type(None))) else repr(type(entry))
    for path in (PureWindowsPath(entry), PurePosixPath(entry)):
        if path.is_absolute() or path.drive or (path.parts and path.parts[0] in ("~", "..", ".")):
            return path.name
    return entry


class _Script(NamedTuple):
    """A script to be unpacked by the page, and the digest by which the browser lets it run."""

    packed: str
    digest: str


@cache
def _plotly() -> _Script:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise InputError(
            'The report needs plotly. Install it: pip install "attnlens[report]"'
        ) from error
    script: str = get_plotlyjs()
    small = gzip.compress(script.encode(), mtime=0)
    return _Script(base64.b64encode(small).decode(), _digest(script))


def _behaviour() -> str:
    """The page's own scripts as one, in a scope of its own."""
    scripts = "\n".join(_asset(f"{name}.js") for name in ("data", "figures", "page"))
    return f'"use strict";\n(() => {{\n{scripts}}})();\n'


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _split(page: str, *marks: str) -> list[str]:
    parts = []
    for mark in marks:
        part, page = page.split(mark)
        parts.append(part)
    return [*parts, page]


def _digest(script: str) -> str:
    return base64.b64encode(sha256(script.encode()).digest()).decode()


def _as_json(content: Mapping[str, Any]) -> str:
    """JSON that is inert inside a script element, whatever its strings hold."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text
