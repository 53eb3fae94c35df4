"""The entry point of the command `tensortap`."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import importlib
import os
import sys
import threading
from typing import Final, NoReturn

import click

from tensortap.cli.errors import ExplainingGroup
from tensortap.version import __version__

_PLAIN: Final = {"−": "-", "–": "-", "·": "|", "…": "~", "×": "x", "→": ">"}


@click.group(cls=ExplainingGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tensortap", message="%(prog)s %(version)s", help="Print the version.")
def cli() -> None:
    """See every tensor inside a running network, and change nothing."""


def main() -> None:
    """Run the command that `sys.argv` names, and end the process."""
    if sys.argv[1:2] == ["run"]:  # past click's streams, warnings and exit codes: the script has Python's
        importlib.import_module("tensortap.cli.run").run_script(sys.argv[2:])
    try:
        run_command()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))


def run_command() -> None:
    """Run the command that `sys.argv` names, any but `run`; raise SystemExit with its code."""
    codecs.register_error("tensortap", _plain_characters)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="tensortap")  # type: ignore[union-attr]
    cli.main(prog_name="tensortap")


def _leave(code: int) -> NoReturn:
    """End the process as Python would, but for the destructors of C++.

    Threads of a library may still be at work then, and now and then a process was aborted that had done everything it
    was to do; Arrow is known for it (apache/arrow 34314).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def _plain_characters(error: UnicodeError) -> tuple[str, int]:
    """Replace what a stream that is not UTF-8 cannot print: a minus stays a minus, the rest is a question mark."""
    assert isinstance(error, UnicodeEncodeError)
    bad = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c, "?") for c in bad), error.end
