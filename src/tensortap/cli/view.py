"""`tensortap view`: runs in the browser."""

from __future__ import annotations

import click

from tensortap.view.server.launch import view


@click.command("view")
@click.argument("path", metavar="[RUN | FOLDER]", default="runs")
@click.option("--port", type=click.IntRange(1, 65535), help="Where to listen (default: 6160, or the next free one).")
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address lets other machines in.")
@click.option("--no-open", is_flag=True, help="Do not open the page in a browser.")
def command(path: str, port: int | None, host: str, no_open: bool) -> None:
    """Open a run, or a folder of runs, in the browser; live while it trains."""
    view(path, host, port, not no_open, click.echo)
