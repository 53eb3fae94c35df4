"""`tensortap run`: run a script, record the models in it, and print a few closing lines."""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tensortap.adapters.lookup import world_now
from tensortap.portable import after_fork
from tensortap.record import at_exit
from tensortap.script.closing import closing_lines, say
from tensortap.script.imports import after_import
from tensortap.script.launch import launch
from tensortap.script.options import RunOptions, checked_path, probe_for, script_name
from tensortap.script.totals import Totals
from tensortap.store.default_path import default_path
from tensortap.watch import Tap, watch

if TYPE_CHECKING:
    from tensortap.adapters.torch.script.models import ScriptModels
    from tensortap.adapters.torch.script.watcher import ScriptWatcher


class ScriptRun:
    """One script that is run and recorded. Options that cannot work raise here, before anything runs."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.probe = probe_for(options)
        self.totals = Totals()
        self.tap: Tap | None = None
        self.watcher: ScriptWatcher | None = None
        self._start = Path.cwd()
        self._to = checked_path(options)
        self._pid = os.getpid()
        self._over = False
        self._ended_by = ""  # the error that ended the script

    def run(self) -> None:
        """Run the script as `python` would, and record the models in it. It ends as the script ends."""
        after_import("torch", self.watch_torch)
        atexit.register(self.finish)
        try:
            launch(self.options.target, self.options.args, module=self.options.module)
        except BaseException as error:
            self._ended_by = "" if isinstance(error, SystemExit) and not error.code else type(error).__name__
            raise

    def watch_torch(self) -> None:
        """Look for models, now that PyTorch has been imported."""
        from tensortap.adapters.torch.script.watcher import ScriptWatcher

        self.watcher = ScriptWatcher(self.probe.patterns, self.begin, say)
        after_fork(self.watcher.forget)

    def begin(self, models: ScriptModels) -> Tap:
        """Open the run, now that the first model was called."""
        to = self._to or default_path(script_name(self.options), world_now().rank, str(self._start / "runs"))
        found = replace(self.probe, patterns=models.matching())
        options = self.options
        self.tap = watch(models, found, to=[to, self.totals], resume=options.resume, overwrite=options.overwrite)
        at_exit.install()
        atexit.unregister(self.finish)
        atexit.register(self.finish)  # what is registered last runs first, and the writer must still be there
        return self.tap

    def finish(self) -> None:
        """Close the run and print where it is, once the script is over. A forked child does neither."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = True
        if self.watcher is not None:
            self.watcher.stop()
        if self.tap is not None:
            self.tap.ended_by = self._ended_by
            self.tap.close()
        if world_now().rank == 0:  # of a job of many processes one speaks
            for line in closing_lines(self.watcher, self.tap, self.totals):
                say(line)
