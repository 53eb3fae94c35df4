"""`tensortap run`: run a script, record the models in it, and print a few closing lines."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensortap.adapters.lookup import world_now
from tensortap.errors import TensortapError
from tensortap.portable import after_fork
from tensortap.record import at_exit
from tensortap.script.closing import Seen, closing_lines, say
from tensortap.script.environment import RUN, is_launcher, joined, options_here, variables
from tensortap.script.imports import after_import
from tensortap.script.launch import launch
from tensortap.script.options import RunOptions, budget_for, checked_path, probes_for, script_name
from tensortap.script.totals import Totals
from tensortap.select.probes import Probe
from tensortap.store.default_path import default_path
from tensortap.watch import Tap, watch

if TYPE_CHECKING:
    from tensortap.adapters.jax.script.adapter import JaxScriptAdapter
    from tensortap.adapters.jax.script.watcher import JaxScriptWatcher
    from tensortap.adapters.keras.script import KerasScriptWatcher
    from tensortap.adapters.torch.script.models import ScriptModels
    from tensortap.adapters.torch.script.watcher import ScriptWatcher


class ScriptRun:
    """One script that is run and recorded. Options that cannot work raise here, before anything runs."""

    def __init__(self, options: RunOptions, *, joined: bool = False) -> None:
        self.options = options
        self.joined = joined  # this process was not started by `tensortap run`: its environment says to record
        self.probes = probes_for(options)
        self.totals = Totals()
        self.tap: Tap | None = None
        self.watcher: ScriptWatcher | None = None
        self.keras: KerasScriptWatcher | None = None
        self.jax: JaxScriptWatcher | None = None
        self.models: dict[str, tuple[str, Tap]] = {}  # Keras models: class and tap by name
        self.left_out: dict[str, str] = {}
        self._start = Path.cwd()
        self._to = options.to if joined else checked_path(options)
        self.spawned: Counter[str] = Counter()  # processes that PyTorch has started, by start method
        self._spawns: list[str] = []  # the runs of those processes, one for each time it has started some
        self._pid = os.getpid()
        self._over = False
        self._failed = False  # a model was seen, and its run could not be opened; that was said
        self._ended_by = ""  # the error that ended the script

    def run(self) -> None:
        """Run the script as `python` would, and record the models in it. It ends as the script ends."""
        if is_launcher(self.options):
            os.environ.update(variables(self._path(), self.options))
        else:
            self.start()
        try:
            launch(self.options.target, self.options.args, module=self.options.module)
        except BaseException as error:
            self._ended_by = "" if isinstance(error, SystemExit) and not error.code else type(error).__name__
            raise

    def start(self) -> None:
        """Look for models from now on, until the process ends."""
        after_import("torch", self.watch_torch)
        after_import("keras", self.watch_keras)
        after_import("jax", self.watch_jax)
        atexit.register(self.finish)

    def watch_torch(self) -> None:
        """Look for models, now that PyTorch has been imported."""
        from tensortap.adapters.torch.script.spawning import watch_spawning
        from tensortap.adapters.torch.script.watcher import ScriptWatcher

        watch_spawning(self._spawning)
        self.watcher = ScriptWatcher(self.probes, self.begin, say)
        after_fork(self.watcher.forget)

    def watch_keras(self) -> None:
        """Look for models, now that Keras has been imported."""
        from tensortap.adapters.keras.script import KerasScriptWatcher

        self.keras = KerasScriptWatcher(self.begin_keras)

    def watch_jax(self) -> None:
        """Look for compiled steps, now that JAX has been imported."""
        from tensortap.adapters.jax.script.watcher import JaxScriptWatcher

        self.jax = watcher = JaxScriptWatcher(self.begin_jax)
        for module in ("jax", "flax.nnx", "equinox", "optax"):
            after_import(module, partial(watcher.watch, module))

    def begin_jax(self, adapter: JaxScriptAdapter) -> Tap | None:
        """Open the run for a script's compiled step; None where another framework's model has it."""
        if os.getpid() != self._pid or self._over or self.tap is not None:
            return None
        name = adapter.describe()["class"]
        try:
            tap = self._open(adapter, self.probes, self._path())
        except TensortapError as error:
            self.left_out[name] = str(error)
            return None
        self.models[name] = ("compiled step", tap)
        return tap

    def begin(self, models: ScriptModels) -> Tap:
        """Open the run, now that the first model was called."""
        try:
            return self._open(models, models.matching(), self._path())
        except Exception:
            self._failed = True
            raise

    def begin_keras(self, model: Any) -> None:
        """Watch a model of Keras until the script ends. The first one's run is the script's; others have their own."""
        if os.getpid() != self._pid or self._over:
            return
        name = re.sub(r"[^\w.-]", "_", model.name)
        to = self._path() if self.tap is None else f"{self.tap.path}-{name}"
        try:
            probes = probes_for(self.options, thin=False)
            tap = self._open(model, probes, to, True) if self.tap is None else self._open_further(model, probes, to)
        except TensortapError as error:
            self.left_out[name] = str(error)
            return
        self.models[name] = (type(model).__name__, tap)

    def _path(self) -> str:
        if self._to is None:
            return default_path(script_name(self.options), world_now().rank, str(self._start / "runs"))
        world = world_now()
        rank = world.size > 1 or world.independent
        alone = self.joined and not rank and multiprocessing.parent_process() is not None
        return f"{self._to}-{multiprocessing.current_process().name}" if alone else self._to

    def _spawning(self, count: int, method: str) -> AbstractContextManager[None]:
        """Let processes that PyTorch starts record as ranks of this run, or beside it where this process records."""
        if os.getpid() != self._pid or self._over:
            return nullcontext()
        self.spawned[method] += count
        if self._spawns:
            to = f"{self._spawns[0]}-{len(self._spawns) + 1}"
        elif self.tap is None:
            to = self._path()
            self._to = f"{to}-parent"  # should this process call a model later on
        else:
            to = f"{self.tap.path}-spawned"
        self._spawns.append(to)
        return joined(to, self.options, count)

    def _open_further(self, model: Any, probes: Sequence[Probe], to: str) -> Tap:
        resume, overwrite = self.options.resume, self.options.overwrite
        budget = budget_for(self.options, world_now())
        return watch(model, *probes, to=to, resume=resume, overwrite=overwrite, budget=budget, context=True)

    def _open(self, model: Any, probes: Sequence[Probe], to: str, context: bool = False) -> Tap:
        options = self.options
        self.tap = watch(
            model, *probes, to=[to, self.totals], resume=options.resume, overwrite=options.overwrite,
            budget=budget_for(options, world_now()), context=context,
        )  # fmt: skip
        at_exit.install()
        atexit.unregister(self.finish)
        atexit.register(self.finish)  # what is registered last runs first, and the writer must still be there
        return self.tap

    def finish(self) -> None:
        """Close the run and print where it is, once the script is over. A forked child does neither."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = True
        if self.joined and (ended := getattr(sys, "last_type", None)) is not None:
            self._ended_by = ended.__name__
        for watcher in (self.watcher, self.keras, self.jax):
            if watcher is not None:
                watcher.stop()
        for tap in dict.fromkeys([self.tap, *(tap for _, tap in self.models.values())]):
            if tap is not None:
                tap.ended_by = self._ended_by
                tap.close()
        rank = world_now().rank if self.tap is None else self.tap.recorder.rank  # its process group may be gone
        if rank == 0 and (self.tap is not None or not self.joined):  # one process prints for the whole job
            for line in closing_lines(self.seen(), self.tap, self.totals):
                say(line)

    def seen(self) -> Seen:
        """Return the facts about the script, for the closing lines."""
        models = {name: kind for name, (kind, _) in self.models.items()}
        found = Seen(models, dict(self.left_out), [], [], self.spawned, self._failed)
        found.further.extend(str(tap.path) for _, tap in self.models.values() if tap is not self.tap)
        if self.jax is not None and self.jax.steps.failure:
            found.left_out["compiled functions"] = self.jax.steps.failure
        if self.watcher is not None:
            found.models.update(self.watcher.models.described())
            found.left_out.update(self.watcher.left_out)
            found.unmatched.extend(self.watcher.models.unmatched.values())
        return found


_HERE: Final[list[ScriptRun]] = []  # the run of a process whose environment says to record


def watch_this_process() -> None:
    """Record what this process runs from now on, as its environment says. Nothing here raises into it."""
    if _HERE or not os.environ.get(RUN):
        return
    try:
        _HERE.append(ScriptRun(options_here(sys.argv[0] or "python"), joined=True))
        _HERE[0].start()
    except Exception as error:
        say(f"not watched: {type(error).__name__}: {error}")
