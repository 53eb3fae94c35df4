"""`tensortap ctl`: ask a run that is being recorded for more, or for less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import click

from tensortap.cli.errors import FAILED
from tensortap.cli.options import print_json
from tensortap.control.client import RankAnswer, ask
from tensortap.control.requests import ControlRequest
from tensortap.text import printable

_KEEP: Final = "stats, histogram, hash, sample:N, rows:0,2, quantiles:0.5,0.95 or full (default: the first two)."

keep_option = click.option("--keep", multiple=True, metavar="WHAT", help=_KEEP)
sites_argument = click.argument("sites", metavar="PATTERN...", nargs=-1, required=True)


def how(action: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every action has."""
    ranks = click.option("--rank", "ranks", type=click.IntRange(0), multiple=True, help="Ask this rank only.")
    wait = click.option("--wait", type=click.FloatRange(0, 60), default=10.0, show_default=True, metavar="SECONDS",
                        help="How long to wait for the running step to end.")  # fmt: skip
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return ranks(wait(as_json(click.pass_context(action))))


@click.group("ctl", subcommand_metavar="ACTION ...")
@click.argument("path", metavar="RUN")
@click.pass_context
def command(ctx: click.Context, path: str) -> None:
    """Ask a run that is being recorded for something. It acts when its step ends.

    What was asked, by whom and when is recorded in the run's events. All ranks are asked. Exits with 1 when one
    refuses.
    """
    ctx.obj = path


@command.command("status")
@how
def status(ctx: click.Context, **given: Any) -> None:
    """Say which step it is at, whether it is paused, and what its probes are."""
    _send(ctx, ControlRequest(action="status"), **given)


@command.command("capture")
@sites_argument
@keep_option
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="For how many steps.")
@how
def capture(ctx: click.Context, sites: tuple[str, ...], keep: tuple[str, ...], steps: int, **given: Any) -> None:
    """Keep more of some sites for a few steps: capture "blocks.3.*" --keep full --steps 3."""
    _send(ctx, ControlRequest(action="capture", sites=sites, keep=keep, steps=steps), **given)


@command.command("snapshot")
@how
def snapshot(ctx: click.Context, **given: Any) -> None:
    """Keep the whole tensors of everything that is watched, and all parameters, of one step."""
    _send(ctx, ControlRequest(action="snapshot"), **given)


@command.command("pause")
@how
def pause(ctx: click.Context, **given: Any) -> None:
    """Record nothing until `resume`. The training goes on."""
    _send(ctx, ControlRequest(action="pause"), **given)


@command.command("resume")
@how
def resume(ctx: click.Context, **given: Any) -> None:
    """Record again, from the next step on."""
    _send(ctx, ControlRequest(action="resume"), **given)


@command.command("note")
@click.argument("text")
@how
def note(ctx: click.Context, text: str, **given: Any) -> None:
    """Put a sentence into the run's events: note "halved the learning rate"."""
    _send(ctx, ControlRequest(action="note", text=text), **given)


@command.group("probe")
def probe() -> None:
    """Observe more sites from now on, or fewer."""


@probe.command("add")
@sites_argument
@keep_option
@click.option(
    "--every", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Every N-th step only."
)
@how
def add(ctx: click.Context, sites: tuple[str, ...], keep: tuple[str, ...], every: int, **given: Any) -> None:
    """Observe more sites, from the next step to the end of the run."""
    _send(ctx, ControlRequest(action="probe add", sites=sites, keep=keep, every=every), **given)


@probe.command("remove")
@click.argument("probe", metavar="NUMBER|PATTERN")
@how
def remove(ctx: click.Context, probe: str, **given: Any) -> None:
    """Stop observing the sites of a probe. `status` lists the probes with their numbers."""
    chosen: dict[str, Any] = {"probe": int(probe)} if probe.isdecimal() else {"sites": (probe,)}
    _send(ctx, ControlRequest(action="probe remove", **chosen), **given)


def _send(
    ctx: click.Context, request: ControlRequest, ranks: tuple[int, ...], wait: float, as_json: bool
) -> None:  # fmt: skip
    answers = ask(ctx.obj, replace(request, wait=wait), ranks)
    if as_json:
        print_json([answer.reply for answer in answers])
    else:
        _print(answers)
    if not all(answer.ok for answer in answers):
        ctx.exit(FAILED)


def _print(answers: Sequence[RankAnswer]) -> None:
    """Print what the ranks said; what several say alike once."""
    said: dict[tuple[str, ...], list[RankAnswer]] = {}
    for answer in answers:
        said.setdefault((answer.said, *_probes(answer)), []).append(answer)
    for (line, *probes), alike in said.items():
        who = "" if len(answers) == 1 else _ranks([answer.rank for answer in alike]) + ": "
        click.echo(printable(f"{who}{line}"), err=not alike[0].ok)
        for probe_line in probes:
            click.echo(printable(f"  {probe_line}"))


def _probes(answer: RankAnswer) -> list[str]:
    return [
        f"{each['number']}: {', '.join(each['sites'])}  keep {', '.join(each['keep'])}  when {each['when']}"
        for each in answer.reply.get("probes", ())
    ]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    joined = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if joined else f"ranks {', '.join(map(str, ranks))}"
