"""Report processes that a script starts by `torch.multiprocessing.spawn`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

_SPAWN: Final[Any] = importlib.import_module("torch.multiprocessing.spawn")  # a function of the package hides it
_PACKAGE: Final[Any] = importlib.import_module("torch.multiprocessing")
Around = Callable[[int, str], AbstractContextManager[None]]


def watch_spawning(around: Around) -> None:
    """Start processes inside the context that `around` gives for their number and start method."""
    start = _SPAWN.start_processes

    @functools.wraps(start)
    def start_processes(
        fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, start_method: str = "spawn"
    ) -> Any:
        with around(nprocs, start_method):
            context = start(fn, args, nprocs, False, daemon, start_method)
        while join and not context.join():
            pass
        return None if join else context

    _SPAWN.start_processes = _PACKAGE.start_processes = start_processes
