"""The command `tensortap`: one file a command."""

from tensortap.cli.commands import main

__all__ = ["main"]
