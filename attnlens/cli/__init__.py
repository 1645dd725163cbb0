"""The command line; its libraries come with the `demo` extra."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `attnlens`."""
    try:
        from attnlens.cli.commands import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(
            f'The attnlens command needs {missing}. Run: pip install "attnlens[demo]"',
            file=sys.stderr,
        )
        sys.exit(2)
    app()
