"""The commands of `tensortap` and the line that `--help` prints for each.

A command is a file in this folder whose `command` is a click command. Its file is imported when the command runs,
so that `tensortap --help` answers at once.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

from tensortap.errors import suggest

COMMANDS: Final = {
    "run": "Run a script as `python` would, and record its models of PyTorch or Keras, or compiled steps of JAX.",
    "env": "Print the line that lets TENSORTAP=RUN record any Python process of this shell.",
    "show": "Show a run: a line for every site, the worst first; or one site in detail.",
    "check": "Ask the rules what is wrong with a run, where, and what to do about it.",
    "harvest": "Run a model over a data set and keep the activations of some sites, each row once.",
    "explain": "Tell in plain text what happened in a run and what is wrong with it.",
    "diff": "Compare run B with run A and report where they first diverge.",
    "ctl": "Ask a run that is being recorded for something. It acts when its step ends.",
    "view": "Open a run, a harvest, or a folder of them, in the browser; live while it trains.",
    "report": "Write a run as one HTML file that opens without a server or a network.",
    "mcp": "Serve a run, or a folder of runs, to a language model (MCP). It only reads, unless --control is given.",
    "export": "Write a run's records or tensors in another format.",
    "compact": "Merge a run's many small files into few large ones, which are faster to read.",
    "doctor": "Print what is installed, what each framework supports, and what is missing.",
}


def load_command(name: str) -> click.Command:
    """Import a command's file and return the command."""
    command: click.Command = importlib.import_module(f"tensortap.cli.{name}").command
    return command


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the registry."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None when there is no such command."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; where there is none of this name, offer the nearest."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            ctx.fail(f"No such command {name!r}.{suggest(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
