"""`tensortap export`: a run in another format."""

from __future__ import annotations

from typing import Final

import click

from tensortap.cli.options import overwrite_option, print_json, selection
from tensortap.sinks import export
from tensortap.store.run import open_run
from tensortap.text import printable
from tensortap.view.terminal.arguments import check_sites, resolve_steps
from tensortap.view.terminal.progress import waiting

FORMATS: Final = ("csv", "jsonl", "npy", "tensorboard")


@click.command("export")
@selection
@click.option("--to", type=click.Choice(FORMATS), required=True,
              help="csv and jsonl: records; npy: kept tensors; tensorboard: records and metrics.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(),
              help="The file, or for npy and tensorboard the folder, to write.  [default: RUN.csv, …]")  # fmt: skip
@overwrite_option
def command(
    path: str, sites: tuple[str, ...], step: int | slice | None, to: str, output: str | None, overwrite: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write a run's records or tensors in another format."""
    with waiting(f"exporting {path}") as advance:
        run = open_run(path)
        chosen, steps = check_sites(run, sites), resolve_steps(run, step)
        output = output or export.default_path(run, to)
        done = export.export(run, to, output, sites=chosen, steps=steps, overwrite=overwrite, progress=advance)
    if as_json:
        print_json(done._asdict())
    else:
        click.echo(printable(export.describe(done)))
