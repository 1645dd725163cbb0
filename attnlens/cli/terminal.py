"""What every command does at the terminal: tell of progress, of files and of errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from typer.core import TyperGroup

from attnlens.errors import AttnLensError, AttnLensWarning, InputError
from attnlens.recipes import ingredients


def say(message: str, kind: str = "", style: str = "yellow") -> None:
    """Tell the person, on standard error, so that standard output holds the result alone.

    Args:
        message: plain text.
        kind: what comes first, such as `"note"`.
        style: of the kind.
    """
    label = f"[{style}]{kind}:[/] " if kind else ""
    Console(stderr=True, highlight=False).print(f"{label}{escape(message)}", soft_wrap=True)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document, with the versions of the libraries, on standard output."""
    print(ingredients.as_json(document))


class Commands(TyperGroup):
    """Commands whose intended errors are one line and exit code 2, and warnings one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, AttnLensWarning):
                say(str(message), "note")
            else:
                others(message, category, *place, **more)

        others = warnings.showwarning
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", AttnLensWarning)
                warnings.showwarning = show
                return super().invoke(ctx)
        except AttnLensError as error:
            say(str(error), "error", "red")
            raise typer.Exit(2) from error


@contextmanager
def bars() -> Iterator[ingredients.Progress]:
    """Show a bar at the terminal for whatever takes time, one after the other."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)

    def show(doing: str, done: int, total: int) -> None:
        if done == 0:
            bar.add_task(escape(doing), total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done)
        if done == total:
            bar.stop()
            bar.remove_task(bar.task_ids[0])

    try:
        yield show if console.is_terminal else ingredients.silent
    finally:
        if bar.task_ids:  # something failed on its way
            bar.stop()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say that something was written, or why it could not be.

    Args:
        path: the file or folder.

    Raises:
        InputError: if the block fails for want of space or permission.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from error
    say(f"Written to {path}.")
