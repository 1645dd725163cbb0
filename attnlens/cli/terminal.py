"""What every command does at the terminal: load a model, report errors in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnlens.errors import AttnLensError, AttnLensWarning
from attnlens.texts.loading import TextModel, load_text_model


def say(message: str) -> None:
    """Tell the person, on standard error, so that standard output holds the result alone."""
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors that attnlens raises on purpose into one line and exit code 2."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, AttnLensWarning):
            say(f"[yellow]note:[/] {escape(str(message))}")
        else:
            others(message, category, *place, **more)

    others = warnings.showwarning
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", AttnLensWarning)
            warnings.showwarning = show
            yield
    except AttnLensError as error:
        say(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from error


@contextmanager
def counting(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar at the terminal that a function moves on by some examples."""
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def loaded(name: str) -> TextModel:
    """Load a model and its tokenizer, saying so meanwhile."""
    with Console(stderr=True).status(f"Loading {escape(name)} …"):
        return load_text_model(name)
