"""The command `tensortap`: one short function a command.

What a command needs is imported when it runs, so that `tensortap --help` answers at once.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from tensortap.errors import TensortapError

if TYPE_CHECKING:
    from tensortap.store.run import Run

DIFFERS, TROUBLE = 1, 2  # of `diff`, as with diff(1)
OURS, UNEXPECTED, INTERRUPTED, BROKEN_PIPE = 1, 70, 128 + signal.SIGINT, 128 + signal.SIGPIPE
LEVELS: Final = ("info", "warning", "error")
SORTS: Final = ("worst", "order", "name", "std", "absmax", "zeros", "nan")
TARGETS: Final = ("csv", "jsonl", "npy", "tensorboard")
Command = TypeVar("Command", bound=Callable[..., Any])


class Commands(click.Group):
    """Commands whose errors are a line or two on stderr and an exit code, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; see the exit codes above."""
        try:
            with _plain_warnings():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            _silence()
            ctx.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except Exception as error:
            ctx.exit(_explain(error))


class StepRange(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.3
    """`7`, `-1` (the last), `10:20` (without 20), `10:` or `:20`."""

    name = "N|A:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | slice:
        """A number or a slice."""
        try:
            first, colon, last = str(value).partition(":")
            if not colon:
                return int(first)
            return slice(int(first) if first else None, int(last) if last else None)
        except ValueError:
            self.fail(f"{value!r} is neither a step nor a range of steps; write 7, 10:20, 10: or :20", param, ctx)


def _selection(command: Command) -> Command:
    """The options by which commands choose what of a run they take."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--step", type=StepRange(), help="One step (-1: the last), or steps A up to B."),
        click.option("--site", "sites", multiple=True, metavar="PATTERN", help="Sites such as 'blocks.*.mlp:output'."),
        click.argument("path", metavar="RUN"),
    ):
        command = option(command)
    return command


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        try:
            click.echo(f"tensortap {metadata.version('tensortap')}")
        except metadata.PackageNotFoundError:
            click.echo("tensortap (run from its source, not installed)")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Say which.")
def cli() -> None:
    """See every tensor inside a running network, and change nothing."""


@cli.command()
@_selection
@click.option("--sort", type=click.Choice(SORTS), default="worst", show_default=True, help="Which rows come first.")
@click.option("--limit", type=click.IntRange(0), metavar="N", default=40, show_default=True,
              help="At most so many rows; 0: all.")  # fmt: skip
@click.option("--live", is_flag=True, help="Draw it again as it grows, until it ends or q is pressed.")
def show(
    path: str, sites: tuple[str, ...], step: int | slice | None, sort: str, limit: int, live: bool, as_json: bool
) -> None:
    """Show a run: a line for every site, the worst first; or one site closely.

    RUN may also be a file of tensors: .npy, .npz or .safetensors.
    """
    from tensortap.view.terminal.tensor_files import is_tensors, show_tensors

    if is_tensors(path):
        show_tensors(path, as_json)
        return
    from tensortap.view.terminal.arguments import sites_asked, steps_asked
    from tensortap.view.terminal.progress import waiting
    from tensortap.view.terminal.show import draw, look

    if live and not as_json and sys.stdout.isatty():
        from tensortap.view.terminal.live import follow

        run = _open(path)
        follow(run, sites_asked(run, sites) if run.steps else list(sites) or None, sort)
        return
    with waiting(f"reading {path}"):
        run = _open(path)
        seen = look(run, sites_asked(run, sites), steps_asked(run, step), sort, limit)
    if as_json:
        _print_json(seen.as_json())
    else:
        draw(seen)


@cli.command()
@_selection
@click.option(
    "--to",
    type=click.Choice(TARGETS),
    required=True,
    help="csv and jsonl: records; npy: kept tensors; tensorboard: records and metrics.",
)
@click.option("-o", "--output", type=click.Path(),
              help="The file, or for npy and tensorboard the folder, to write.  [default: RUN.csv, …]")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
def export(
    path: str, sites: tuple[str, ...], step: int | slice | None, to: str, output: str | None, overwrite: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Write a run's records or tensors in another format."""
    from tensortap.sinks import export as exporting
    from tensortap.view.terminal.arguments import sites_asked, steps_asked
    from tensortap.view.terminal.progress import waiting

    with waiting(f"exporting {path}") as advance:
        run = _open(path)
        chosen, steps = sites_asked(run, sites), steps_asked(run, step)
        output = output or exporting.default_path(run, to)
        done = exporting.export(run, to, output, sites=chosen, steps=steps, overwrite=overwrite, progress=advance)
    if as_json:
        _print_json(done._asdict())
    else:
        click.echo(exporting.describe(done))


@cli.command()
@click.argument("a")
@click.argument("b")
@click.option("--map", "renames", multiple=True, metavar="OLD=NEW",
              help="A module's name in A and in B, with all below it: 'h.*.attn=blocks.*.attention'.")  # fmt: skip
@click.option("--rtol", type=click.FloatRange(0), help="Relative to scale, instead of what goes with the types.")
@click.option("--atol", type=click.FloatRange(0), help="What may differ whatever the scale.  [default: 0]")
@click.option("--site", "sites", multiple=True, metavar="PATTERN", help="Sites such as 'blocks.*.mlp:output'.")
@click.option("--step", type=StepRange(), help="One step (-1: the last of A), or steps A up to B.")
@click.option("--limit", type=click.IntRange(0), metavar="N", default=20, show_default=True,
              help="At most so many rows; 0: all.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def diff(
    ctx: click.Context, a: str, b: str, renames: tuple[str, ...], rtol: float | None, atol: float | None,
    sites: tuple[str, ...], step: int | slice | None, limit: int, as_json: bool,
) -> None:  # fmt: skip
    """Hold run B against run A: where do they first part, and by how much?

    Exits with 0 when they agree within the tolerance, with 1 when they differ, with 2 when that cannot be said.
    """
    from tensortap.diff.runs import diff as hold
    from tensortap.view.terminal.arguments import steps_asked
    from tensortap.view.terminal.diff import draw_diff
    from tensortap.view.terminal.progress import waiting

    try:
        with waiting(f"comparing {a} and {b}") as advance:
            first, second = _open(a), _open(b)
            found = hold(first, second, map=renames, rtol=rtol, atol=atol, sites=list(sites) or None,
                         steps=steps_asked(first, step), progress=advance)  # fmt: skip
    except (TensortapError, OSError) as error:
        _explain(error)
        ctx.exit(TROUBLE)
    if as_json:
        _print_json(found.to_dict())
    else:
        draw_diff(found, limit)
    sys.stdout.flush()
    ctx.exit(0 if found else DIFFERS)


@cli.command()
@click.argument("path", metavar="RUN")
@click.option("--rule", "rules", multiple=True, metavar="NAME",
              help="Only this rule; a rule of yours is 'module:name'.")  # fmt: skip
@click.option("--reference", metavar="RUN", help="A run to hold it against: what has drifted?")
@click.option("--fail-on", type=click.Choice(LEVELS), default="error", show_default=True,
              help="Exit with 1 when there is anything as bad.")  # fmt: skip
@click.option("--all", "every", is_flag=True, help="Show every finding, and why rules had no data.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(
    ctx: click.Context, path: str, rules: tuple[str, ...], reference: str | None, fail_on: Any, every: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Ask the rules what is wrong with a run, the worst first, where, and what people do about it.

    Exits with 0 when nothing as bad as --fail-on was found, with 1 when something was, with 2 when that cannot be said.
    """
    from tensortap.view.terminal.findings import draw_findings, findings_json, rules_asked
    from tensortap.view.terminal.progress import waiting

    try:
        with waiting(f"checking {path}"):
            run = _open(path)
            found = run.findings(rules_asked(rules), reference and _open(reference))
    except (TensortapError, OSError) as error:
        _explain(error)
        ctx.exit(TROUBLE)
    failed = bool(found.at_least(fail_on))
    if as_json:
        _print_json(findings_json(run, found, failed))
    else:
        draw_findings(run, found, every)
    sys.stdout.flush()
    ctx.exit(1 if failed else 0)


@cli.command()
@click.argument("path", metavar="[RUN | FOLDER]", default="runs")
@click.option("--port", type=click.IntRange(1, 65535), help="Where to listen (default: 6160, or the next free one).")
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address lets other machines in.")
@click.option("--no-open", is_flag=True, help="Do not open the page in a browser.")
def view(path: str, port: int | None, host: str, no_open: bool) -> None:
    """Look at a run, or at a folder of runs, in the browser; live while it trains."""
    from tensortap.view.server.launch import view as serve

    serve(path, host, port, not no_open, lambda line: click.echo(line, err=False))


@cli.command()
@click.argument("path", metavar="RUN")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The HTML file to write.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(path: str, output: str, overwrite: bool, as_json: bool) -> None:
    """Write a run as one HTML file that anyone can open, without a server or a network."""
    from tensortap.view.report import report as reporting
    from tensortap.view.terminal.progress import waiting

    with waiting(f"writing {output}") as advance:
        done = reporting.report(path, output, overwrite=overwrite, progress=advance)
    if as_json:
        _print_json(done._asdict())
    else:
        click.echo(reporting.describe(done))


@cli.command()
@click.argument("path", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compact(path: str, as_json: bool) -> None:
    """Fold a run's many small files into few large ones, which are quicker to read."""
    from tensortap import text
    from tensortap.store.compact import compact as fold
    from tensortap.view.terminal.progress import waiting

    with waiting(f"compacting {path}") as advance:
        done = fold(path, progress=advance)
    if as_json:
        _print_json(done._asdict())
        return
    files, sizes = (done.before_files, done.after_files), (done.before_bytes, done.after_bytes)
    click.echo(
        f"{path}: {done.rows} rows, {files[0]} → {files[1]} files, {text.size(sizes[0])} → {text.size(sizes[1])}"
    )


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say what is installed, which kernel is active, what each framework can show, and what is missing."""
    from tensortap.adapters import capabilities
    from tensortap.cli import doctor as examine
    from tensortap.cli.checks import draw_capabilities, draw_checks

    found = examine.checks()
    if as_json:
        _print_json(examine.as_json(found))
    else:
        draw_checks(found)
        draw_capabilities(capabilities.table())


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option("--sites", multiple=True, metavar="PATTERN", help="What to observe (default: the output of every leaf).")
@click.option("--every", type=click.IntRange(1), metavar="N", default=1, help="Observe every N-th step only.")
@click.option(
    "--keep",
    multiple=True,
    metavar="WHAT",
    help="stats, histogram, sample:N, rows:0,2, quantiles:0.5,0.95 or full (default: the first two).",
)
@click.option("--to", metavar="RUN", help="The folder to write (default: a new one in runs/).")
@click.option("--resume", is_flag=True, help="Go on with the run that is there.")
@click.option("--overwrite", is_flag=True, help="Replace the run that is there.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.argument("target", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> None:  # fmt: skip
    """Run a PyTorch script as `python` would, and observe the models in it.

    The script needs no edit. What follows its name is the script's own.
    """
    from tensortap.script.observe import RunOptions, Session

    Session(RunOptions(**options)).run()


def main() -> None:
    """The entry point."""
    if sys.argv[1:2] == ["run"]:
        run_script(sys.argv[2:])
    codecs.register_error("tensortap", _plainer)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="tensortap")  # type: ignore[union-attr]
    cli.main(prog_name="tensortap")


def run_script(words: list[str]) -> None:
    """`run` past click and past our streams, warnings and exit codes: the script has Python's."""
    from tensortap.script.observe import RunOptions, Session

    try:
        with run.make_context("tensortap run", words) as context:
            _check_script(context)
            session = Session(RunOptions(**context.params))
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (TensortapError, OSError) as error:
        sys.exit(_explain(error))
    session.run()
    sys.exit()


def _check_script(context: click.Context) -> None:
    target = context.params["target"]
    if not context.params["module"] and not os.access(target, os.R_OK):
        raise click.UsageError(f"can't open file {os.path.abspath(target)!r}", context)  # noqa: PTH100


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """For streams that are no UTF-8: a minus stays a minus, what has no plain form is a question mark."""
    assert isinstance(error, UnicodeEncodeError)
    bad = error.object[error.start : error.end]
    return "".join({"−": "-", "–": "-", "·": "|", "…": "~", "×": "x", "→": ">"}.get(c, "?") for c in bad), error.end


def _open(path: str) -> Run:
    from tensortap.store.run import open_run

    return open_run(path)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, allow_nan=False, indent=1))


def _explain(error: Exception) -> int:
    """Say what went wrong; the exit code."""
    if os.environ.get("TENSORTAP_DEBUG"):
        traceback.print_exception(error)
    elif isinstance(error, (TensortapError, OSError)):
        click.echo(f"error: {error}", err=True)
    else:
        click.echo(f"unexpected error: {type(error).__name__}: {error}", err=True)
        click.echo("run with TENSORTAP_DEBUG=1 for the traceback", err=True)
    return OURS if isinstance(error, (TensortapError, OSError)) else UNEXPECTED


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as a line on stderr, without file and line number."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *args, **more: click.echo(f"warning: {message}", err=True)
        yield


def _silence() -> None:
    """After a broken pipe: nothing more can be written, and Python must not complain about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
