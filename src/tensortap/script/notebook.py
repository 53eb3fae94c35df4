"""`%load_ext tensortap`: record the models that a notebook trains, as `tensortap run` does for a script."""

from __future__ import annotations

from typing import Any, Final

from tensortap.script.options import RunOptions
from tensortap.script.session import ScriptRun

_RUNS: Final[list[ScriptRun]] = []


def load_ipython_extension(ipython: Any) -> None:
    """Record the models that cells call from now on, into a new run in `runs/`."""
    if not _RUNS:
        _RUNS.append(ScriptRun(RunOptions("notebook")))
        _RUNS[0].start()


def unload_ipython_extension(ipython: Any) -> None:
    """Close the run and say where it is."""
    while _RUNS:
        _RUNS.pop().finish()
