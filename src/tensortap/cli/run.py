"""`tensortap run`: a script as `python` would run it, and recorded."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import click

from tensortap.cli.errors import explain
from tensortap.errors import TensortapError
from tensortap.script.environment import LAUNCHER_COMMANDS
from tensortap.script.options import PRESETS, THIN, RunOptions
from tensortap.script.session import ScriptRun


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--sites",
    multiple=True,
    metavar="PATTERN",
    help="What to observe, at every step (default: as --watch says).",
)
@click.option("--watch", type=click.Choice(list(PRESETS)), default=THIN, show_default=True,
              help="What to observe, where --sites does not say it. thin: outputs, and at a few steps inputs, "
              "gradients, parameters and updates; recommended: what `check` reads, at every step.")  # fmt: skip
@click.option("--every", type=click.IntRange(1), metavar="N", default=1, help="Observe every N-th step only.")
@click.option(
    "--keep",
    multiple=True,
    metavar="WHAT",
    help="stats, histogram, hash, sample:N, rows:0,2, quantiles:0.5,0.95 or full (default: the first two; thin: "
    "stats, and histogram at a few steps).",
)
@click.option(
    "--budget",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="After the first 256 steps observe as many as cost no more than this share of the step time, such as 0.03 "
    "(default: every step). For one process.",
)
@click.option("--to", metavar="RUN", help="The folder to write (default: a new one in runs/).")
@click.option("--resume", is_flag=True, help="Continue the run that is there.")
@click.option("--overwrite", is_flag=True, help="Replace the run that is there.")
@click.option("--twice", is_flag=True, help="Run the script twice, and report the first bit that differs.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.argument("target", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(twice: bool, **options: Any) -> None:
    """Run a script as `python` would, and record its models of PyTorch or Keras, or compiled steps of JAX.

    The script needs no edit. Arguments after its name are the script's own.
    """
    ScriptRun(RunOptions(**options)).run()


def run_script(arguments: list[str]) -> None:
    """Parse our options, then run the script with Python's own streams, warnings and exit codes."""
    try:
        with command.make_context("tensortap run", list(arguments)) as context:
            _check_script(context)
            if context.params.pop("twice"):
                from tensortap.cli.twice import run_twice  # what compares runs is not loaded into every script

                sys.exit(run_twice(arguments, context))
            run = ScriptRun(RunOptions(**context.params))
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (TensortapError, OSError) as error:
        sys.exit(explain(error))
    run.run()
    sys.exit()


def _check_script(context: click.Context) -> None:
    """Refuse a script that cannot be read; `torchrun` and `accelerate` may be named as in a terminal."""
    target = context.params["target"]
    if context.params["module"] or os.access(target, os.R_OK):
        return
    command = shutil.which(target) if target in LAUNCHER_COMMANDS else None
    if command is None:
        raise click.UsageError(f"can't open file {os.path.abspath(target)!r}", context)  # noqa: PTH100
    context.params["target"] = command
