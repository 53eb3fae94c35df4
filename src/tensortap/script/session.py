"""`tensortap run`: puts together a script, what is to be seen of it, and a few last words about what was."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tensortap.adapters.protocol import world_now
from tensortap.errors import ProbeError, RunError, RunExistsError
from tensortap.record import at_exit
from tensortap.reduce.reducers import Reducer, full, histogram, quantiles, rows, sample, stats
from tensortap.script.closing import last_words, say
from tensortap.script.imports import after_import
from tensortap.script.launch import launch
from tensortap.script.tally import Tally
from tensortap.select.probes import Probe, probe
from tensortap.select.triggers import every
from tensortap.store.default_path import default_path
from tensortap.store.files import Files
from tensortap.store.names import RUN_JSON
from tensortap.watch import Tap, leaves, watch

if TYPE_CHECKING:
    from tensortap.adapters.torch.script.models import Models
    from tensortap.adapters.torch.script.watcher import ScriptWatcher

_KEEPS: Final = "stats, histogram, full, sample:256, rows:0,2 and quantiles:0.05,0.5,0.95"
_PLAIN: Final[dict[str, Callable[[], Reducer]]] = {"stats": stats, "histogram": histogram, "full": full}


class RunOptions(NamedTuple):
    """What to run, and what to see of it."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    sites: tuple[str, ...] = ()
    every: int = 1
    keep: tuple[str, ...] = ()
    to: str | None = None
    resume: bool = False
    overwrite: bool = False


class ScriptRun:
    """One script under observation. What cannot work raises here, before anything runs."""

    def __init__(self, plan: RunOptions) -> None:
        self.plan = plan
        self.probe = _probe(plan)
        self.tally = Tally()
        self.tap: Tap | None = None
        self.watcher: ScriptWatcher | None = None
        self._start = Path.cwd()
        self._to = _free_path(plan)
        self._pid = os.getpid()
        self._over = False

    def run(self) -> None:
        """Run the script as `python` would, and observe the models in it. It ends as the script ends."""
        after_import("torch", self.torch_is_here)
        atexit.register(self.finish)
        launch(self.plan.target, self.plan.args, module=self.plan.module)

    def torch_is_here(self) -> None:
        """PyTorch has been imported: look out for models."""
        from tensortap.adapters.torch.script.watcher import ScriptWatcher

        self.watcher = ScriptWatcher(self.probe.patterns, self.begin, say)
        os.register_at_fork(after_in_child=self.watcher.forget)

    def begin(self, models: Models) -> Tap:
        """The first model is there: open the run."""
        to = self._to or default_path(_kind(self.plan), world_now().rank, str(self._start / "runs"))
        found = replace(self.probe, patterns=models.matching())
        self.tap = watch(models, found, to=[to, self.tally], resume=self.plan.resume, overwrite=self.plan.overwrite)
        at_exit.install()
        atexit.unregister(self.finish)
        atexit.register(self.finish)  # what is registered last comes first, and the writer must still be there
        return self.tap

    def finish(self) -> None:
        """The script is over: close the run, and say where it is. A forked child has neither to do."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = True
        if self.watcher is not None:
            self.watcher.stop()
        if self.tap is not None:
            self.tap.close()
        for line in last_words(self.watcher, self.tap, self.tally):
            say(line)


def reducer(words: str) -> Reducer:
    """What `--keep` means.

    >>> reducer("sample:64"), reducer("rows:0,2")
    (Sample(n=64, seed=0), Rows(indices=(0, 2)))
    """
    kind, _, rest = words.partition(":")
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
    raise ProbeError(f"--keep {words!r} means nothing; there are {_KEEPS}")


def _probe(plan: RunOptions) -> Probe:
    keep = [reducer(words) for words in plan.keep] or None
    return probe(*(plan.sites or (leaves,)), keep=keep, when=every(plan.every))


def _free_path(plan: RunOptions) -> str | None:
    """Where the run goes if that was said, made independent of the folder the script may change to."""
    if plan.resume and plan.overwrite:
        raise RunError("--resume and --overwrite exclude each other; give one of them")
    if plan.to is None:
        return None
    files = Files(plan.to if "://" in plan.to else Path(plan.to).absolute())
    if files.exists(RUN_JSON) and not (plan.resume or plan.overwrite):
        raise RunExistsError(
            f"{plan.to!r} already holds a run, and it is not overwritten. Give another path, go on with it "
            "(--resume), or begin it anew (--overwrite)"
        )
    return files.url


def _kind(plan: RunOptions) -> str:
    name = plan.target if plan.module else Path(plan.target).absolute().stem
    return re.sub(r"[^\w.-]", "_", name)
