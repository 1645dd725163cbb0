"""One HTML file that shows results in a browser, with nothing fetched from anywhere."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from attnlens.attention.maps import EffectiveAttention
from attnlens.attention.statistics import HeadStatistics
from attnlens.capture import Capture
from attnlens.errors import InputError
from attnlens.files import versions, write_atomically
from attnlens.lens import Lens
from attnlens.reporting.content import Content, Names
from attnlens.reporting.examples import Wanted
from attnlens.reporting.modules import asset, script
from attnlens.showing import page_of

__all__ = ["Report", "report"]

MOST_BYTES = 10_000_000
_NOTES_BYTES = 4_000  # what the notes on maps may take, generously
_FRAME_HEIGHT = 900  # pixels of a page in a notebook


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

    def _repr_html_(self) -> str:
        """The page within a frame of its own, for notebooks; scripts run, nothing is fetched."""
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            f'title="attnlens report" style="width:100%;height:{_FRAME_HEIGHT}px;border:0">'
            f"</iframe>"
        )


def report(
    results: Any,
    *,
    tokens: Sequence[Sequence[str]] | None = None,
    targets: Sequence[Sequence[str]] | None = None,
    segments: Sequence[Sequence[int]] | None = None,
    pictures: Sequence[Any] | None = None,
    second: tuple[str, Any] | None = None,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
    example: int | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    max_tokens: int = 128,
    max_bytes: int = MOST_BYTES,
) -> Report:
    """Lay results out as an interactive page; needs `jinja2`.

    The page shows layer × head grids of statistics, and of every head and example raw and
    effective attention and their difference as maps, over the running text, as lines, as thumbnails
    and side by side with another; attribution by layer for a token, and curves over layers:
    whichever the results hold. The steps of a generated text are one map, row by row.

    Args:
        results: a :class:`~attnlens.Lens` that has looked, observers, or what they computed; one
            or several.
        tokens: tokens of each example, in the order in which the examples were seen, padding
            left out or kept. Positions stand in for them where they are not given.
        targets: tokens of each example's decoder, where it has its own.
        segments: of each token of each example which text of a pair it is of, 0 or 1, as in
            `token_type_ids`.
        pictures: of each example the picture that a vision model saw, as a PIL image or an array
            `[height, width, 3]`.
        second: name and maps of a second model that read the same examples.
        model: name of the model; of a folder only its last part is shown.
        settings: what else to say about the run; of paths only the last part is shown.
        notes: what else to say of what was left out.
        example: index of the only example whose maps to include; None includes all.
        layers: layer indices of the maps to include; None includes all.
        heads: head indices of the maps to include; None includes all that fit.
        max_tokens: most tokens of an example to show, from the first.
        max_bytes: bound on the size of the file. To keep it, maps are rounded to fewer bits,
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
    wanted = Wanted(
        example,
        None if layers is None else frozenset(layers),
        None if heads is None else frozenset(heads),
    )
    names = Names(tokens, targets, segments, pictures)
    content = Content(results, None if second is None else second[1], names, wanted)
    about = {
        "model": without_folders(model),
        "models": [without_folders(name) for name in (model, *(second or ())[:1])],
        "settings": without_folders(dict(settings or {})),
        "versions": versions(),
    }
    given = list(notes)
    bare = template.render(content=content.without_maps(max_tokens) | about | {"notes": given})
    room = max_bytes - len(bare.encode()) - _NOTES_BYTES
    document = content.with_maps(max_tokens, room) | about
    document["notes"] = given + document["notes"]
    page = template.render(content=document)
    if len(page.encode()) > max_bytes:
        raise InputError(
            f"The page needs {len(page.encode()):,} bytes, above max_bytes={max_bytes:,}. Pass "
            f"fewer examples, fewer max_tokens, or raise max_bytes."
        )
    return Report(page, tuple(document["notes"]))


@page_of.register
def _of_lens(lens: Lens, **choices: Any) -> Report:
    return report(lens, **{"model": type(lens.model).__name__} | choices)


@page_of.register
def _of_capture(capture: Capture, **choices: Any) -> Report:
    observers = HeadStatistics(), EffectiveAttention()
    for observer in observers:
        observer.update(capture)
    return report(observers, **{"model": capture.site} | choices)


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
    """The page without its content, with its script and the digest that lets it run."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        raise InputError(
            'The report needs jinja2. Install it: pip install "attnlens[report]"'
        ) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    behaviour = script()
    constants = {
        "style": asset("page.css"),
        "behaviour": behaviour,
        "digest": base64.b64encode(sha256(behaviour.encode()).digest()).decode(),
    }
    return environment.from_string(asset("page.html"), globals=constants)
