"""What a person sees of a scan: how far it is, and what was rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from attnlens.corpus.records import Rejected
from attnlens.errors import InputError


class Bar:
    """A bar with rate and time left on standard error, or nothing.

    Args:
        total: number of lines to come, or None where it is not known.
        shown: whether there is a bar.

    Raises:
        InputError: if there is to be one, and tqdm is not installed.
    """

    def __init__(self, total: int | None, shown: bool) -> None:
        self._total = total
        self._make: Callable[..., Any] | None = None
        self._bar: Any = None
        if shown:
            try:
                from tqdm.auto import tqdm
            except ModuleNotFoundError as error:
                raise InputError(
                    "progress=True needs tqdm. Run: pip install 'attnlens[corpus]'"
                ) from error
            self._make = tqdm

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, line: int) -> None:
        """Show the bar, at a line whence the rate is measured.

        Args:
            line: number of lines that are done.
        """
        if self._make is not None and self._bar is None:
            self._bar = self._make(total=self._total, initial=line, unit="line", smoothing=0.05)

    def move(self, line: int) -> None:
        """Tell how many lines are done.

        Args:
            line: their number, of all files together.
        """
        if self._bar is not None:
            self._bar.update(line - self._bar.n)


class RejectedLog:
    """Writes what was rejected into a file, a line each, and tells whoever wants to know.

    Args:
        path: the file, which is begun anew, and does not exist while there is nothing to write;
            None writes none.
        report: told of each, or None.
    """

    def __init__(self, path: Path | None, report: Callable[[Rejected], None] | None) -> None:
        self._path = path
        self._report = report
        self._file: IO[str] | None = None
        if path is not None:
            path.unlink(missing_ok=True)

    def __enter__(self) -> RejectedLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, entry: Rejected, known: bool) -> None:
        """Write an entry.

        Args:
            entry: the entry.
            known: whether it was told of before, by a run that was interrupted.
        """
        if self._file is None and self._path is not None:
            self._file = open(self._path, "w", encoding="utf-8")
        if self._file is not None:
            self._file.write(f"{entry}\n")
        if self._report is not None and not known:
            self._report(entry)
