"""A progress bar on stderr for what takes longer than a second."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE: Final = 1.0
Advance = Callable[[int, int], None]


@contextlib.contextmanager
def waiting(what: str, console: Console | None = None, patience: float = PATIENCE) -> Iterator[Advance]:
    """Show a bar if the block takes long and stderr is a terminal; the block reports `(done, total)`.

    >>> with waiting("reading") as advance:
    ...     advance(1, 2)
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task(what, total=None)
    timer = threading.Timer(patience, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
