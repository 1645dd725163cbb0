"""The command line; its libraries come with the `demo` extra."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run `attnlens`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names and tokens may be no Unicode
            stream.reconfigure(errors="backslashreplace")
    try:
        from attnlens.cli.commands import app

        app(prog_name="attnlens")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f'The attnlens command needs {missing}. Run: pip install "attnlens[demo]"',
            file=sys.stderr,
        )
        sys.exit(2)
