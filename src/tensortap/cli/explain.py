"""`tensortap explain`: a run's story as text."""

from __future__ import annotations

import shutil
from typing import Final

import click

from tensortap.cli.errors import UNDECIDED, explain
from tensortap.cli.options import run_argument
from tensortap.errors import TensortapError
from tensortap.store.run import open_run
from tensortap.text import wrapped
from tensortap.view.agent.story import story
from tensortap.view.terminal.progress import waiting

_WIDEST: Final = 100  # lines of prose are no wider, however wide the terminal is


@click.command("explain")
@run_argument
@click.pass_context
def command(ctx: click.Context, path: str) -> None:
    """Tell in plain text what happened in a run and what is wrong with it.

    For a person or a prompt: metrics, then each thing that is wrong, the earliest first, and the change to make.
    """
    try:
        with waiting(f"reading {path}"):
            said = story(open_run(path))
    except (TensortapError, OSError) as error:
        explain(error)
        ctx.exit(UNDECIDED)
    click.echo(wrapped(said, min(shutil.get_terminal_size().columns, _WIDEST)))
