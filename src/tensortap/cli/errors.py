"""Errors of the command: a line or two on stderr and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, Final

import click

from tensortap.cli.registry import LazyGroup
from tensortap.errors import TensortapError
from tensortap.portable import SIGPIPE
from tensortap.text import printable

FAILED: Final = 1
UNDECIDED: Final = 2  # of `diff` and `check`: the question could not be answered, as with diff(1)
UNEXPECTED: Final = 70
INTERRUPTED: Final = 128 + signal.SIGINT
BROKEN_PIPE: Final = 128 + SIGPIPE


class ExplainingGroup(LazyGroup):
    """A group whose commands end with the exit codes above."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn what it raises into an exit code."""
        try:
            with _plain_warnings():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except Exception as error:
            ctx.exit(explain(error))


def explain(error: Exception) -> int:
    """Print what went wrong and return the exit code."""
    expected = isinstance(error, (TensortapError, OSError))
    if os.environ.get("TENSORTAP_DEBUG"):
        traceback.print_exception(error)
    elif expected:
        click.echo(f"error: {_escaped(error)}", err=True)
    else:
        click.echo(f"unexpected error: {type(error).__name__}: {_escaped(error)}", err=True)
        click.echo("run with TENSORTAP_DEBUG=1 for the traceback", err=True)
    return FAILED if expected else UNEXPECTED


def _escaped(message: object) -> str:
    """Return a message in which nothing steers the terminal: names in it may come from anybody's run."""
    return "\n".join(map(printable, str(message).split("\n")))


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings as a line on stderr, without file and line number."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *args, **more: click.echo(f"warning: {_escaped(message)}", err=True)
        yield


def _silence_stdout() -> None:
    """Discard further output after a broken pipe, so that Python does not complain about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
