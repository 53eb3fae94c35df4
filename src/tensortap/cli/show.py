"""`tensortap show`: a run on the terminal."""

from __future__ import annotations

import sys

import click

from tensortap.cli.options import decoder, limit_option, print_json, selection, tokenizer_option
from tensortap.harvest.folder import is_harvest
from tensortap.store.run import open_run
from tensortap.view.terminal.arguments import check_sites, resolve_steps
from tensortap.view.terminal.harvest import harvest_json, show_harvest
from tensortap.view.terminal.live import follow
from tensortap.view.terminal.ordering import SORTS
from tensortap.view.terminal.progress import waiting
from tensortap.view.terminal.show import draw, read_view
from tensortap.view.terminal.tensor_files import holds_tensors, show_tensors


@click.command("show")
@selection
@click.option("--sort", type=click.Choice(list(SORTS)), default="worst", show_default=True,
              help="Which rows come first.")  # fmt: skip
@click.option("--phase", type=click.Choice(("train", "eval")),
              help="Steps of training or of evaluation, if each has its own numbers.")  # fmt: skip
@limit_option(40)
@click.option("--wide", is_flag=True, help="All columns and whole names, though lines may be longer than the terminal.")
@click.option("--live", is_flag=True, help="Draw it again as it grows, until it ends or q is pressed.")
@click.option("--dimension", type=int, metavar="N", help="For a harvest: the samples that activate a dimension most.")
@tokenizer_option
def command(
    path: str, sites: tuple[str, ...], step: int | slice | None, sort: str, phase: str | None, limit: int, wide: bool,
    live: bool, dimension: int | None, tokenizer: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show a run: a line for every site, the worst first; or one site in detail.

    RUN may also be a file of tensors (.npy, .npz or .safetensors) or a harvest.
    """
    if holds_tensors(path):
        show_tensors(path, as_json)
    elif is_harvest(path) and as_json:
        print_json(harvest_json(path))
    elif is_harvest(path):
        show_harvest(path, sites, dimension, None if tokenizer is None else decoder(tokenizer))
    elif live and not as_json and sys.stdout.isatty():
        run = open_run(path)
        follow(run, check_sites(run, sites) if run.steps else list(sites) or None, sort)
    else:
        with waiting(f"reading {path}"):
            run = open_run(path)
            view = read_view(run, check_sites(run, sites), resolve_steps(run, step), sort, limit, phase)
        if as_json:
            print_json(view.as_json())
        else:
            draw(view, wide=wide)
