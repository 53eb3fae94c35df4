"""Progress on stderr: a bar with rows a second, the share done, the time left and the bytes; and a line at the end."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tensortap import text


class HarvestProgress:
    """Count what is done, and draw it where stderr is a terminal."""

    def __init__(self, where: str, total: int | None, shown: bool) -> None:
        console = Console(stderr=True)
        self.samples = self.rows = self.bytes = 0
        self._where = where
        self._shown = shown
        self._begun = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"), console=console, disable=not (shown and console.is_terminal),
        )  # fmt: skip
        self._task = self._bar.add_task(f"harvest {where}", total=total, rate="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line."""
        if self._shown:
            sys.stderr.write(f"{self._where}: {line}\n")

    def skipped(self, batches: int) -> None:
        """Count batches that were done before."""
        self._bar.advance(self._task, batches)

    def advance(self, samples: int, rows: int, nbytes: int, batches: int = 1) -> None:
        """Count a batch, or several."""
        self.samples += samples
        self.rows += rows
        self.bytes += nbytes
        seconds = max(time.monotonic() - self._begun, 1e-9)
        self._bar.update(
            self._task, advance=batches, rate=f"{self.rows / seconds:,.0f} rows/s  {text.size(self.bytes)}"
        )  # fmt: skip

    def summary(self) -> str:
        """Return what was done, in a line."""
        seconds = time.monotonic() - self._begun
        rate = f"{self.rows / max(seconds, 1e-9):,.0f} rows/s"
        return f"{self.rows:,} rows of {self.samples:,} samples, {text.size(self.bytes)}, {seconds:.1f} s, {rate}"
