"""`tensortap run --twice`: a script run two times, and whether it did the same to the last bit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import click
from click.core import ParameterSource

from tensortap.cli.errors import FAILED, UNDECIDED, explain
from tensortap.diff.runs import diff
from tensortap.errors import TensortapError
from tensortap.script.options import RunOptions, script_name
from tensortap.view.terminal.diff import draw_diff

_WITH_VALUE: Final = ("--sites", "--watch", "--every", "--keep", "--budget")


def run_twice(arguments: Sequence[str], context: click.Context) -> int:
    """Run a script twice with the same options, compare the runs bit by bit, and return the exit code.

    0 means that it is deterministic, 1 that it is not, 2 that the runs cannot be compared; a failing script keeps
    its own exit code.
    """
    options = RunOptions(**context.params)
    base = options.to or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{script_name(options)}"
    paths = [f"{base}-first", f"{base}-second"]
    for path in paths:
        words = ["--to", path, *_defaults(context), *_without_ours(arguments)]
        done = subprocess.run([sys.executable, "-m", "tensortap", "run", *words], check=False)
        if done.returncode:
            return done.returncode
    try:
        found = diff(*paths, bitwise=True)
    except (TensortapError, OSError) as error:
        explain(error)
        return UNDECIDED
    draw_diff(found, 5)
    return 0 if found else FAILED


def _defaults(context: click.Context) -> list[str]:
    """Return what is recorded where the user did not say: all that a step computes, by its hash."""
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    watched = [] if given & {"sites", "watch"} else ["--watch", "recommended"]
    return [*watched, *([] if "keep" in given else ["--keep", "stats", "--keep", "hash"])]


def _without_ours(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without our flag and folder. What follows the script's name is the script's own.

    >>> _without_ours(["--twice", "--to", "x", "--every", "2", "train.py", "--to", "y"])
    ['--every', '2', 'train.py', '--to', 'y']
    """
    left, words = list(arguments), list[str]()
    left.remove("--twice")
    while left:
        word = left.pop(0)
        if word == "--to":
            left.pop(0)
        elif not word.startswith("--to="):
            words.append(word)
            if not word.startswith("-"):
                break
            if word in _WITH_VALUE:
                words.append(left.pop(0))
    return [*words, *left]
