"""What every command does at the terminal: tell of progress, of files and of errors."""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from attnlens.errors import AttnLensError, AttnLensWarning

if TYPE_CHECKING:
    from attnlens.recipes.ingredients import Progress


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM."""


def say(message: str, kind: str = "", style: str = "yellow") -> None:
    """Tell the person, on standard error, so that standard output holds the result alone.

    Args:
        message: plain text.
        kind: what comes first, such as `"note"`.
        style: of the kind.
    """
    from rich.console import Console
    from rich.markup import escape

    label = f"[{style}]{kind}:[/] " if kind else ""
    Console(stderr=True, highlight=False).print(f"{label}{escape(message)}", soft_wrap=True)


def say_idle(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Say so where options were given that do nothing.

    Args:
        context: of the command.
        names: of its parameters.
        why: they do nothing.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            say(f"{parameter.opts[0]} does nothing {why}.", "note")


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document, with the versions of the libraries, on standard output."""
    from attnlens.recipes.ingredients import as_json

    print(as_json(document))


class Commands(TyperGroup):
    """Commands whose intended errors are one line and exit code 2, and warnings one line.

    An interrupted command ends with exit code 130 or, by SIGTERM, 143.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, AttnLensWarning):
                say(str(message), "note")
            else:
                others(message, category, *place, **more)

        others = warnings.showwarning
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", AttnLensWarning)
                warnings.showwarning = show
                return super().invoke(ctx)
        except AttnLensError as error:
            say(_in_words_of_the_shell(str(error), self, ctx), "error", "red")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            say(str(interrupt) or "Interrupted.", "error", "red")
            raise typer.Exit(143 if isinstance(interrupt, Terminated) else 130) from interrupt
        finally:
            signal.signal(signal.SIGTERM, before)


def _terminate(*_: Any) -> NoReturn:
    raise Terminated


@contextmanager
def going_on(advice: str) -> Iterator[None]:
    """Say how to go on if the block is interrupted.

    Args:
        advice: a sentence.

    Raises:
        KeyboardInterrupt: with that sentence.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)(f"Interrupted. {advice}") from interrupt


def _in_words_of_the_shell(message: str, commands: TyperGroup, context: Any) -> str:
    """Write `--no-resume` for `resume=False`, and `--max-length` for `max_length`."""
    command = commands.get_command(context, context.invoked_subcommand or "")
    for parameter in command.params if command else ():
        name, option = str(parameter.name), parameter.opts[0]
        if not option.startswith("--"):
            continue
        off = parameter.secondary_opts[0] if parameter.secondary_opts else option
        message = re.sub(rf"\b{name}=False\b", off, message)
        message = re.sub(rf"\b{name}=True\b", option, message)
        message = re.sub(rf"(?<![\w-]){name}=", f"{option} ", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w-]){name}\b", option, message)
    return message


@contextmanager
def bars() -> Iterator[Progress]:
    """Show a bar at the terminal for whatever takes time, one after the other."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bars

    from attnlens.recipes.ingredients import silent

    console = Console(stderr=True)
    bar = Bars(console=console, transient=True)

    def show(doing: str, done: int, total: int) -> None:
        if done == 0:
            bar.add_task(escape(doing), total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done)
        if done == total:
            bar.stop()
            bar.remove_task(bar.task_ids[0])

    try:
        yield show if console.is_terminal else silent
    finally:
        if bar.task_ids:  # something failed on its way
            bar.stop()
