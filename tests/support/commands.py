"""The command itself, in a process of its own, and what it says."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

from attnlens.cli import main


class Finished(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def command(
    *arguments: object,
    stdin: bytes = b"",
    while_it_runs: Callable[[int], None] | None = None,
    **environment: str,
) -> Finished:
    """Run `attnlens` in a process, which is a fork of this one: torch is imported already.

    Signals, exit code and streams are those of any process. `while_it_runs` is given its number.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, \
            tempfile.TemporaryFile() as err:  # fmt: skip
        given.write(stdin)
        given.seek(0)
        process = os.fork()
        if process == 0:
            _run([str(argument) for argument in arguments], given, out, err, environment)
        try:
            if while_it_runs is not None:
                while_it_runs(process)
        finally:
            _, status = os.waitpid(process, 0)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return Finished(os.waitstatus_to_exitcode(status), *said)


def _run(
    arguments: list[str],
    given: io.BufferedRandom,
    out: io.BufferedRandom,
    err: io.BufferedRandom,
    environment: Mapping[str, str],
) -> None:
    """Become the command, and never return."""
    code = 70
    try:
        for number, file in enumerate((given, out, err)):
            os.dup2(file.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(open(number, mode, closefd=False))
            for number, mode in enumerate(("rb", "wb", "wb"))
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ |= {"COLUMNS": "80", **environment}
        sys.argv = ["attnlens", *arguments]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def without_frame(said: str) -> str:
    """Take away line breaks."""
    return re.sub(r"\s+", " ", said)
