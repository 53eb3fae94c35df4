"""Options and output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tensortap.errors import HarvestError, needs

Command = TypeVar("Command", bound=Callable[..., Any])

run_argument = click.argument("path", metavar="RUN")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is there.")
site_option = click.option(
    "--site", "sites", multiple=True, metavar="PATTERN", help="Sites such as 'blocks.*.mlp:output'."
)
tokenizer_option = click.option(
    "--tokenizer", metavar="FILE", help="A tokenizer.json, for the text of a harvest's samples."
)


class StepRange(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.3
    """`7`, `-1` (the last), `10:20` (without 20), `10:` or `:20`."""

    name = "N|A:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | slice:
        """Return a step's number or a slice of steps."""
        try:
            first, colon, last = str(value).partition(":")
            if not colon:
                return int(first)
            return slice(int(first) if first else None, int(last) if last else None)
        except ValueError:
            self.fail(f"must be a step or a range of steps (7, 10:20, 10: or :20), got {value!r}", param, ctx)


step_option = click.option("--step", type=StepRange(), help="One step (-1: the last), or steps A up to B.")


def limit_option(default: int) -> Callable[[Command], Command]:
    """Return the option for the number of rows."""
    return click.option("--limit", type=click.IntRange(0), metavar="N", default=default, show_default=True,
                        help="At most this many rows; 0 shows all.")  # fmt: skip


def selection(command: Command) -> Command:
    """Add the options that choose records of a run."""
    for option in (json_option, step_option, site_option, run_argument):
        command = option(command)
    return command


def decoder(path: str) -> Callable[[list[int]], str]:
    """Return how a tokenizer of the `tokenizers` package turns token ids into text."""
    with needs("--tokenizer", "tokenizers"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exceptions
        raise HarvestError(f"--tokenizer must be a tokenizer.json, got {path!r}: {error}") from error
    decode: Callable[[list[int]], str] = tokenizer.decode
    return decode


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, allow_nan=False, indent=1))
