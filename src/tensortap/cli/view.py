"""`tensortap view`: runs in the browser."""

from __future__ import annotations

import click

from tensortap.cli.options import decoder, tokenizer_option
from tensortap.view.server.launch import view


@click.command("view")
@click.argument("path", metavar="[RUN | HARVEST | FOLDER]", default="runs")
@click.option("--port", type=click.IntRange(1, 65535), help="Where to listen (default: 6160, or the next free one).")
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address lets other machines in.")
@click.option("--no-open", is_flag=True, help="Do not open the page in a browser.")
@tokenizer_option
@click.option("--control", is_flag=True, help="Let the page ask live runs for more, as `tensortap ctl` does.")
def command(
    path: str, port: int | None, host: str, no_open: bool, tokenizer: str | None, control: bool
) -> None:  # fmt: skip
    """Open a run, a harvest, or a folder of them, in the browser; live while it trains."""
    decode = None if tokenizer is None else decoder(tokenizer)
    view(path, host, port, not no_open, click.echo, decode, control=control)
