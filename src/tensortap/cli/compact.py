"""`tensortap compact`: fewer, larger files."""

from __future__ import annotations

import click

from tensortap import text
from tensortap.cli.options import json_option, print_json, run_argument
from tensortap.store.compact import compact
from tensortap.view.terminal.progress import waiting


@click.command("compact")
@run_argument
@json_option
def command(path: str, as_json: bool) -> None:
    """Merge a run's many small files into few large ones, which are faster to read."""
    with waiting(f"compacting {path}") as advance:
        done = compact(path, progress=advance)
    if as_json:
        print_json(done._asdict())
        return
    files = f"{done.before_files} → {done.after_files} files"
    if done.damaged_files:
        click.echo(f"{done.damaged_files} files cannot be read to their end; they were kept as they are", err=True)
    size = f"{text.size(done.before_bytes)} → {text.size(done.after_bytes)}"
    click.echo(text.printable(f"{path}: {done.rows} rows, {files}, {size}"))
