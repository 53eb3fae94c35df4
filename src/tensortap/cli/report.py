"""`tensortap report`: a run as one HTML file."""

from __future__ import annotations

import click

from tensortap.cli.options import json_option, overwrite_option, print_json, run_argument
from tensortap.text import printable
from tensortap.view.report import report
from tensortap.view.terminal.progress import waiting


@click.command("report")
@run_argument
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The HTML file to write.")
@overwrite_option
@json_option
def command(path: str, output: str, overwrite: bool, as_json: bool) -> None:
    """Write a run as one HTML file that opens without a server or a network."""
    with waiting(f"writing {output}") as advance:
        done = report.report(path, output, overwrite=overwrite, progress=advance)
    if as_json:
        print_json(done._asdict())
    else:
        click.echo(printable(report.describe(done)))
