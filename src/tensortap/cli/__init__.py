"""The command `tensortap`: one file a command, listed in `registry.py`. May import every other package."""

from tensortap.cli.app import cli, main

__all__ = ["cli", "main"]
