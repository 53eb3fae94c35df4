"""The options of `tensortap run`: what to run, and what to record of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tensortap.adapters.lookup import world_now
from tensortap.adapters.protocol import watched_by_default
from tensortap.errors import ProbeError, RunError, RunExistsError
from tensortap.reduce.reducers import Reducer, content_hash, full, histogram, quantiles, rows, sample, stats
from tensortap.select.patterns import Candidate
from tensortap.select.probes import Probe, probe
from tensortap.select.triggers import every
from tensortap.store.files import Files
from tensortap.store.names import RUN_JSON

_KEEPS: Final = "stats, histogram, hash, full, sample:256, rows:0,2 and quantiles:0.05,0.5,0.95"
_PLAIN: Final[dict[str, Callable[[], Reducer]]] = {
    "stats": stats,
    "histogram": histogram,
    "hash": content_hash,
    "full": full,
}


# What `--watch` chooses; `recommended` is what the rules of `tensortap check` read.
PRESETS: Final[dict[str, tuple[Callable[[Candidate], bool] | str, ...]]] = {
    "outputs": (watched_by_default,),
    "gradients": (watched_by_default, "**:{grad_output,grad}"),
    "recommended": (watched_by_default, "**:{grad_output,grad,param,update}"),
    "everything": ("**:{input,output,grad_input,grad_output,param,grad,update,buffer}",),
}


class RunOptions(NamedTuple):
    """What to run, and what to record of it."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    sites: tuple[str, ...] = ()
    watch: str = "outputs"
    every: int = 1
    keep: tuple[str, ...] = ()
    to: str | None = None
    resume: bool = False
    overwrite: bool = False


def parse_reducer(text: str) -> Reducer:
    """Return the reducer that `--keep` names.

    >>> parse_reducer("sample:64"), parse_reducer("rows:0,2")
    (Sample(n=64, seed=0), Rows(indices=(0, 2)))
    """
    kind, _, rest = text.partition(":")
    try:
        if kind in _PLAIN and not rest:
            return _PLAIN[kind]()
        if kind == "sample":
            return sample(int(rest))
        if kind == "rows":
            return rows([int(i) for i in rest.split(",")])
        if kind == "quantiles":
            return quantiles(*map(float, rest.split(",")))
    except ValueError as error:
        if isinstance(error, ProbeError):
            raise
    raise ProbeError(f"--keep must be one of {_KEEPS}, got {text!r}")


def probe_for(options: RunOptions) -> Probe:
    """Return the probe that the options describe."""
    keep = [parse_reducer(text) for text in options.keep] or None
    return probe(*(options.sites or PRESETS[options.watch]), keep=keep, when=every(options.every))


def checked_path(options: RunOptions) -> str | None:
    """Return the absolute path of `--to`, for the script may change its folder; None without the option."""
    if options.resume and options.overwrite:
        raise RunError("--resume and --overwrite exclude each other; give one of them")
    if options.to is None:
        return None
    files = Files(options.to if "://" in options.to else Path(options.to).absolute())
    first = world_now().rank == 0  # another rank may find what the first one has begun
    if first and files.exists(RUN_JSON) and not (options.resume or options.overwrite):
        raise RunExistsError(
            f"{options.to!r} already holds a run, and it is not overwritten. Give another path, go on with it "
            "(--resume), or begin it anew (--overwrite)"
        )
    return files.url


def script_name(options: RunOptions) -> str:
    """Return the name of the script or module, for the name of the run's folder."""
    name = options.target if options.module else Path(options.target).absolute().stem
    return re.sub(r"[^\w.-]", "_", name)
