"""One HTML file that shows results in a browser, with nothing fetched from anywhere."""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from attnlens.errors import InputError
from attnlens.files import versions, write_atomically
from attnlens.reporting.content import Content

__all__ = ["Report", "report"]

MOST_BYTES = 10_000_000
_NOTES_BYTES = 4_000  # what the notes may take, generously


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
    """Lay results out as an interactive page; needs `plotly` and `jinja2`.

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

    Examples:
        >>> with Lens(model, HeadStatistics()) as lens, torch.no_grad():
        ...     output = model(**batch)
        >>> page = report(lens)
        >>> page.save(folder / "report.html")
    """
    template = _template()
    content = Content(
        results,
        tokens,
        None if layers is None else set(layers),
        None if heads is None else set(heads),
    )
    about = {
        "model": without_folders(model),
        "settings": without_folders(dict(settings or {})),
        "versions": versions(),
    }
    bare = template.render(content=content.without_maps(max_tokens) | about)
    room = max_bytes - len(bare.encode()) - _NOTES_BYTES
    document = content.with_maps(max_tokens, room) | about
    page = template.render(content=document)
    if len(page.encode()) > max_bytes:
        raise InputError(
            f"The page needs {len(page.encode()):,} bytes, above max_bytes={max_bytes:,}. Pass "
            f"fewer examples, fewer max_tokens, or raise max_bytes."
        )
    return Report(page, tuple(document["notes"]))


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


@cache
def _template() -> Any:
    """The page without its content, with its scripts and the digests that let them run."""
    try:
        from jinja2 import Environment, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise InputError(
            'The report needs plotly and jinja2. Install them: pip install "attnlens[report]"'
        ) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    library: str = get_plotlyjs()
    # The page's own scripts are one, in a scope of its own.
    scripts = "\n".join(_asset(f"{name}.js") for name in ("data", "figures", "page"))
    behaviour = f'"use strict";\n(() => {{\n{scripts}}})();\n'
    constants = {
        "style": _asset("page.css"),
        "library": base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode(),
        "behaviour": behaviour,
        "digests": [_digest(library), _digest(behaviour)],
    }
    return environment.from_string(_asset("page.html"), globals=constants)


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(sha256(script.encode()).digest()).decode()
