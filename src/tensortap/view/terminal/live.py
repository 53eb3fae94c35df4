"""A run on the terminal, drawn again as it grows. It reads the folder only, not the process that writes it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self

import pyarrow.compute as pc
from rich.console import Console, Group, RenderableType
from rich.text import Text

from tensortap import text
from tensortap.errors import PatternError
from tensortap.store import queries
from tensortap.store.filters import all_of
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot
from tensortap.text import printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.ordering import SORTS
from tensortap.view.terminal.overview import (
    RECENT_STEPS,
    TREND_OF,
    Overview,
    about,
    calls_note,
    earlier_steps_note,
    recent_overview,
    site_names,
)
from tensortap.view.terminal.screen import Screen, head, sites, title
from tensortap.view.terminal.site_names import SiteNames

try:
    import termios
    import tty
except ImportError:  # Windows: pictures are drawn, keys are not read
    HAS_TERMIOS = False
else:
    HAS_TERMIOS = True

_EVERY: Final = 1.0
_REST: Final = 9  # at most a tenth of a core, beside a training that wants it
_METRICS: Final = 4
_FEWEST: Final = 3


class KeySource(Protocol):
    """Something that reads keys."""

    def pressed(self, seconds: float) -> str:
        """Return the key pressed within so many seconds; empty when none is."""


class Keyboard:
    """Read keys as they are pressed, without Enter, while it is open; without a terminal it only waits.

    >>> with Keyboard() as keys:
    ...     keys.pressed(0.0)
    ''
    """

    def __init__(self) -> None:
        self._before: Any = None

    def __enter__(self) -> Self:
        if HAS_TERMIOS and sys.stdin is not None and sys.stdin.isatty():
            self._fd = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None

    def pressed(self, seconds: float) -> str:
        """Return the key pressed within so many seconds; empty when none is."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        return os.read(self._fd, 1).decode(errors="replace") if ready else ""


def follow(run: Run, patterns: list[str] | None = None, sort: str = "worst", screen: Screen | None = None) -> None:
    """Draw the run until it ends, or `q` or Ctrl-C is pressed; what was drawn last stays on the terminal."""
    screen = screen or Screen()
    if run.state == "live" and screen.size is not None:
        with contextlib.suppress(KeyboardInterrupt), Keyboard() as keys, screen.live() as live:
            picture = partial(frame, run, patterns, sort, note="q ends this, not the training")
            draw_until(run, lambda: live.update(Group(*picture(screen.size)), refresh=True), keys)
    screen.draw(*frame(run, patterns, sort, screen.size))


def draw_until(
    run: Run, draw: Callable[[], None], keys: KeySource, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Draw, rest, and draw again, until the run ends or `q` is pressed."""
    while True:
        begin = clock()
        ended = run.state != "live"  # read before drawing, so that the last picture has everything
        draw()
        rest = max(_EVERY, _REST * (clock() - begin))
        if ended or keys.pressed(rest) in ("q", "Q"):
            return


def frame(
    run: Run, patterns: list[str] | None, sort: str, size: tuple[int, int] | None, note: str = ""
) -> list[RenderableType]:
    """Return one picture, as tall as the terminal, of one moment of the run."""
    return run.snapshots.read(lambda snapshot: _frame(snapshot, patterns, sort, size, note), whole=True)


def _frame(
    snapshot: Snapshot, patterns: list[str] | None, sort: str, size: tuple[int, int] | None, note: str
) -> list[RenderableType]:
    view = _view(snapshot, patterns, sort)
    if view is None:
        return [title(about(snapshot), "no records yet", 0, 0), Text(note, style="dim")]
    width, height = size or (Screen().width, 10_000)
    above = [*head(view), *_metrics(snapshot, width), Text()]
    said = (calls_note(view, view.rows), earlier_steps_note(view), note)
    below = [Text(each, style="dim") for each in said if each]
    room = max(height - _lines([*above, *below], width) - 3, _FEWEST)
    shown = SORTS[sort](view.rows)[:room]
    hidden = len(view.rows) - len(shown)
    more = [Text(f"… {hidden} more sites", style="dim")] if hidden else []
    return [*above, sites(view, shown, width, SiteNames(site_names(snapshot))), *more, *below]


def _view(snapshot: Snapshot, patterns: list[str] | None, sort: str) -> Overview | None:
    try:
        return recent_overview(snapshot, patterns, sort if sort in TREND_OF else "std")
    except PatternError:  # what was asked for has not come yet
        return None


def _lines(parts: list[Text], width: int) -> int:
    """Return how many lines the parts take at this width."""
    console = Console(width=width)
    return sum(max(len(part.wrap(console, width)), 1) for part in parts)


def _metrics(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the newest value of each metric, with a sparkline."""
    series: dict[str, list[float]] = {}
    for row in _numbers(snapshot):
        series.setdefault(row["name"], []).append(row["value"])
    said = [_metric(name, values) for name, values in list(series.items())[:_METRICS]]
    line = Text("   ").join(said)
    line.truncate(width, overflow="ellipsis")
    return [line] if said else []


def _metric(name: str, values: list[float]) -> Text:
    style = "cyan" if math.isfinite(values[-1]) else formats.ALARM
    return Text(f"{printable(name)} {text.number(values[-1])} {text.spark(values)}", style=style)


def _numbers(snapshot: Snapshot) -> list[dict[str, Any]]:
    first = int(snapshot.steps[-RECENT_STEPS:][0]) if len(snapshot.steps) else 0
    chosen = all_of([pc.field("value").is_valid(), pc.field("step") >= first])
    found: list[dict[str, Any]] = queries.metrics(snapshot).filter(chosen).to_pylist()
    return found
