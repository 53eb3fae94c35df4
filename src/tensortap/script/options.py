"""The options of `tensortap run`: what to run, and what to record."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tensortap.adapters.lookup import world_now
from tensortap.adapters.protocol import watched_by_default
from tensortap.distributed.ranks import World
from tensortap.errors import RunError, RunExistsError
from tensortap.record.budget import Budget
from tensortap.reduce.reducers import parse_reducer, stats
from tensortap.select.patterns import Candidate
from tensortap.select.ports import PORTS
from tensortap.select.probes import Probe, probe
from tensortap.select.triggers import at, every, powers_of
from tensortap.store.files import Files, check_writable
from tensortap.store.names import RUN_JSON

THIN: Final = "thin"
# What `thin` adds at a few steps, dense at the beginning: so it costs next to nothing in the long run.
SELDOM: Final = ("**:{grad,param,update}", ":input")
A_FEW_STEPS: Final = powers_of(2) | at([0, 3]) | every(256)
# With `--budget` short trainings are seen step by step; later on steps are observed in stretches, for hooks of tiny
# layers cost more to register and to remove than to keep.
FREE_STEPS: Final = 256
STRETCH: Final = 16
# What `--watch` chooses; `recommended` is what the rules of `tensortap check` read.
PRESETS: Final[dict[str, tuple[Callable[[Candidate], bool] | str, ...]]] = {
    THIN: (watched_by_default,),
    "outputs": (watched_by_default,),
    "gradients": (watched_by_default, "**:{grad_output,grad}"),
    "recommended": (watched_by_default, "**:{grad_output,grad,param,update}"),
    "everything": (f"**:{{{','.join(PORTS)}}}",),
}


class RunOptions(NamedTuple):
    """What to run, and what to record of it."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    sites: tuple[str, ...] = ()
    watch: str = THIN
    every: int = 1
    keep: tuple[str, ...] = ()
    budget: float | None = None
    to: str | None = None
    resume: bool = False
    overwrite: bool = False


def probes_for(options: RunOptions, thin: bool = True) -> tuple[Probe, ...]:
    """Return the probes that the options describe: one, or with the preset `thin` one for every step and one for a few.

    `thin=False` gives one in any case, for frameworks in which looking at gradients is not for nothing.
    """
    keep = [parse_reducer(text) for text in options.keep] or None
    chosen, when = options.sites or PRESETS[options.watch], every(options.every)
    if options.sites or options.watch != THIN or not thin:
        return (probe(*chosen, keep=keep, when=when),)
    few = A_FEW_STEPS if options.every == 1 else A_FEW_STEPS & when
    return probe(*chosen, keep=keep or stats(), when=when), probe(*chosen, *SELDOM, keep=keep, when=few)


def budget_for(options: RunOptions, world: World) -> Budget | None:
    """Return the budget that `--budget` asks for. Ranks have none: each would observe steps that no other has."""
    if not options.budget or world.size > 1:
        return None
    return Budget(options.budget, free_steps=FREE_STEPS, stretch=STRETCH, every_step_only=True)


def checked_path(options: RunOptions) -> str | None:
    """Return the absolute path of `--to`, for the script may change its folder; None without the option."""
    if options.resume and options.overwrite:
        raise RunError("only one of --resume and --overwrite must be given, got both: they exclude each other")
    if options.to is None:
        check_writable(Files(Path("runs").absolute()))
        return None
    files = Files(options.to if "://" in options.to else Path(options.to).absolute())
    first = world_now().rank == 0  # another rank may find what the first one has begun
    if first and files.exists(RUN_JSON) and not (options.resume or options.overwrite):
        raise RunExistsError(
            f"{options.to!r} already holds a run, and it is not overwritten. Give another path, continue it "
            "(--resume), or replace it (--overwrite)"
        )
    if first:
        check_writable(files)
    return files.url


def script_name(options: RunOptions) -> str:
    """Return the name of the script or module, for the name of the run's folder."""
    name = options.target if options.module else Path(options.target).absolute().stem
    return re.sub(r"[^\w.-]", "_", name)
