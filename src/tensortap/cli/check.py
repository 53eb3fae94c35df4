"""`tensortap check`: the rules' findings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from tensortap.cli.errors import FAILED, UNDECIDED, explain
from tensortap.cli.harvest import load
from tensortap.cli.options import json_option, print_json
from tensortap.errors import ProbeError, TensortapError
from tensortap.finding import Severity
from tensortap.harvest.drift import drift
from tensortap.inspect import check_model
from tensortap.store.run import open_run
from tensortap.view.terminal.findings import check_run, draw_findings, draw_model_findings, load_rules
from tensortap.view.terminal.harvest import draw_drift
from tensortap.view.terminal.progress import waiting

LEVELS: Final = ("info", "warning", "error")


@click.command("check")
@click.argument("path", metavar="RUN", required=False)
@click.option("--model", metavar="MODULE:FACTORY",
              help="Instead of a run: a function that returns (model, batch[, target, loss]).")  # fmt: skip
@click.option("--rule", "rules", multiple=True, metavar="NAME",
              help="Only this rule; a rule of yours is 'module:name'.")  # fmt: skip
@click.option("--reference", metavar="RUN", help="A run to compare with, for the rule on drift.")
@click.option("--against", metavar="HARVEST", help="For a harvest: the baseline to compare it with.")
@click.option("--fail-on", type=click.Choice(LEVELS), default="error", show_default=True,
              help="Exit with 1 when a finding is at least this severe.")  # fmt: skip
@click.option("--all", "every", is_flag=True, help="Show every finding, and why rules had no data.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, path: str | None, model: str | None, rules: tuple[str, ...], reference: str | None,
    against: str | None, fail_on: Any, every: bool, as_json: bool,
) -> None:  # fmt: skip
    """Ask the rules what is wrong with a run, where, and what to do about it.

    Exits with 0 when nothing as bad as --fail-on was found, with 1 when something was, with 2 when the run cannot be
    read. With --against, RUN is a harvest, and 1 means that it has drifted from its baseline. With --model a model is
    checked on one batch, without training: docs/check-model.md.
    """
    if (path is None) == (model is None):
        raise click.UsageError("give a RUN, or --model module:factory")
    if model is not None:
        ctx.exit(_check_model(model, rules, fail_on, every, as_json))
    assert path is not None
    if against is not None:
        ctx.exit(_check_drift(path, against, as_json))
    try:
        with waiting(f"checking {path}"):
            checked = check_run(open_run(path), load_rules(rules), open_run(reference) if reference else None)
    except (TensortapError, OSError) as error:
        explain(error)
        ctx.exit(UNDECIDED)
    failed = bool(checked.findings.at_least(fail_on))
    if as_json:
        print_json(checked.as_json(failed))
    else:
        draw_findings(checked, every)
    sys.stdout.flush()
    ctx.exit(FAILED if failed else 0)


def _check_model(name: str, checks: Sequence[str], fail_on: Severity, every: bool, as_json: bool) -> int:
    """Check the model that a function makes, and return the exit code."""
    try:
        with waiting(f"checking {name}"):
            found = check_model(**_made(name), checks=checks or None)
    except Exception as error:  # also what the user's own code raises: nothing was found out
        explain(error)
        return UNDECIDED
    failed = bool(found.at_least(fail_on))
    if as_json:
        print_json({"model": name, "failed": failed, **found.as_json()})
    else:
        draw_model_findings(name, found, every)
    sys.stdout.flush()
    return FAILED if failed else 0


def _made(name: str) -> dict[str, Any]:
    """Call the factory and return the arguments of `check_model`."""
    made = load(name)()
    if isinstance(made, Mapping):
        return dict(made)
    if isinstance(made, tuple) and len(made) in (2, 3, 4):
        return dict(zip(("model", "batch", "target", "loss"), made, strict=False))
    raise ProbeError(
        f"--model {name} must return (model, batch), (model, batch, target, loss) or a dict of the arguments of "
        f"tensortap.check_model, got {type(made).__name__}; write `return model, batch`"
    )


def _check_drift(path: str, baseline: str, as_json: bool) -> int:
    """Compare a harvest with its baseline and return the exit code."""
    try:
        with waiting(f"checking {path}"):
            found = drift(baseline, path)
    except (TensortapError, OSError) as error:
        explain(error)
        return UNDECIDED
    if as_json:
        print_json(found.to_dict())
    else:
        draw_drift(found)
    sys.stdout.flush()
    return 0 if found else FAILED
