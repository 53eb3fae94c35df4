"""`tensortap mcp`: runs as tools for a language model."""

from __future__ import annotations

import click

from tensortap.cli.errors import UNDECIDED, explain
from tensortap.errors import TensortapError
from tensortap.view.agent.server import server


@click.command("mcp")
@click.argument("path", metavar="[RUN | FOLDER]", default="runs")
@click.option("--control", is_flag=True, help="Offer capture, pause, resume and note of live runs too.")
@click.pass_context
def command(ctx: click.Context, path: str, control: bool) -> None:
    """Serve a run, or a folder of runs, to a language model (MCP). It only reads, unless --control is given.

    It speaks over standard input and output. A client starts it: {"command": "tensortap", "args": ["mcp", "runs"]}.
    """
    try:
        made = server(path, control)
    except (TensortapError, OSError) as error:
        explain(error)
        ctx.exit(UNDECIDED)
    made.run("stdio")
