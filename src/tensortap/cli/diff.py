"""`tensortap diff`: two runs compared."""

from __future__ import annotations

import sys

import click

from tensortap.cli.errors import FAILED, UNDECIDED, explain
from tensortap.cli.options import json_option, limit_option, print_json, site_option, step_option
from tensortap.diff.runs import diff
from tensortap.errors import RunError, TensortapError
from tensortap.store.run import open_run
from tensortap.view.terminal.arguments import resolve_steps
from tensortap.view.terminal.diff import draw_diff
from tensortap.view.terminal.progress import waiting


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--map", "renames", multiple=True, metavar="OLD=NEW",
              help="A module's name in A and in B, with all below it: 'h.*.attn=blocks.*.attention'.")  # fmt: skip
@click.option("--rtol", type=click.FloatRange(0), help="Relative tolerance, instead of the one for each type.")
@click.option("--atol", type=click.FloatRange(0), help="Absolute tolerance.  [default: 0]")
@click.option("--mesh", metavar="SIDE=N,…", help="The mesh of B's ranks, if it was not recorded: 'dp=2,tp=4'.")
@click.option("--bitwise", is_flag=True, help="Ask whether the runs are the same to the last bit.")
@site_option
@step_option
@limit_option(20)
@json_option
@click.pass_context
def command(
    ctx: click.Context, a: str, b: str, renames: tuple[str, ...], rtol: float | None, atol: float | None,
    mesh: str | None, bitwise: bool, sites: tuple[str, ...], step: int | slice | None, limit: int, as_json: bool,
) -> None:  # fmt: skip
    """Compare run B with run A and report where they first diverge.

    Exits with 0 when they agree within the tolerance, with 1 when they differ, with 2 when they cannot be compared.
    """
    try:
        with waiting(f"comparing {a} and {b}") as advance:
            first, second = open_run(a), open_run(b)
            found = diff(first, second, map=renames, rtol=rtol, atol=atol, sites=list(sites) or None,
                         steps=resolve_steps(first, step), mesh=_mesh(mesh), bitwise=bitwise,
                         progress=advance)  # fmt: skip
    except (TensortapError, OSError) as error:
        explain(error)
        ctx.exit(UNDECIDED)
    if as_json:
        print_json(found.to_dict())
    else:
        draw_diff(found, limit)
    sys.stdout.flush()
    ctx.exit(0 if found else FAILED)


def _mesh(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and size.strip().isdigit() for name, _, size in pairs):
        raise RunError(f"--mesh must be sides with their sizes, such as dp=2,tp=4, got {text!r}")
    return {name.strip(): int(size) for name, _, size in pairs}
