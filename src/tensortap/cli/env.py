"""`tensortap env`: the environment in which any Python process records itself."""

from __future__ import annotations

import shlex

import click

from tensortap.script.environment import python_path


@click.command("env")
def command() -> None:
    """Print the line that lets TENSORTAP=RUN record any Python process of this shell.

    eval "$(tensortap env)"; TENSORTAP=runs/x python train.py
    """
    click.echo(f"export PYTHONPATH={shlex.quote(python_path())}")
