"""A run on the terminal, drawn again as it grows: reads the folder, and needs nothing of the process that writes it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import pyarrow.compute as pc
from rich.console import Console, Group, RenderableType
from rich.text import Text

from tensortap import text
from tensortap.errors import PatternError
from tensortap.sinks.line import printable
from tensortap.store.filters import all_of
from tensortap.store.run import Run
from tensortap.view.terminal import cells
from tensortap.view.terminal.keys import Keys
from tensortap.view.terminal.ordering import SORTS
from tensortap.view.terminal.overview import TREND_OF, Overview, about
from tensortap.view.terminal.recent import STEPS, left_out, recent
from tensortap.view.terminal.screen import Screen, head, sites, title

_EVERY: Final = 1.0
_REST: Final = 9  # at most a tenth of a core, beside a training that wants it
_METRICS: Final = 4
_FEWEST: Final = 3


class Pressed(Protocol):
    """What keys come from."""

    def pressed(self, seconds: float) -> str:
        """The key pressed within so many seconds."""


def follow(run: Run, asked: list[str] | None = None, sort: str = "worst", screen: Screen | None = None) -> None:
    """Draw the run until it ends, or `q` or Ctrl-C is pressed; what was drawn last stays on the terminal."""
    screen = screen or Screen()
    if run.state == "live" and screen.size is not None:
        with contextlib.suppress(KeyboardInterrupt), Keys() as keys, screen.live() as live:
            picture = partial(frame, run, asked, sort, note="q ends this, not the training")
            draw_until(run, lambda: live.update(Group(*picture(screen.size)), refresh=True), keys)
    screen.draw(*frame(run, asked, sort, screen.size))


def draw_until(
    run: Run, draw: Callable[[], None], keys: Pressed, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Draw, rest, and draw again, until the run ends or `q` is pressed."""
    while True:
        begin = clock()
        ended = run.state != "live"  # asked before drawing, so that the last picture has everything
        draw()
        rest = max(_EVERY, _REST * (clock() - begin))
        if ended or keys.pressed(rest) in ("q", "Q"):
            return


def frame(
    run: Run, asked: list[str] | None, sort: str, size: tuple[int, int] | None, note: str = ""
) -> list[RenderableType]:
    """One picture, as tall as the terminal is."""
    view = _view(run, asked, sort)
    if view is None:
        return [title(about(run), "no records yet", 0, 0), Text(note, style="dim")]
    width, height = size or (Screen().width, 10_000)
    above = [*head(view), *_metrics(run, width), Text()]
    below = [Text(said, style="dim") for said in (left_out(run, view), note) if said]
    room = max(height - _lines([*above, *below], width) - 3, _FEWEST)
    shown = SORTS[sort](view.rows)[:room]
    hidden = len(view.rows) - len(shown)
    more = [Text(f"… {hidden} more sites", style="dim")] if hidden else []
    return [*above, sites(view, shown, width), *more, *below]


def _view(run: Run, asked: list[str] | None, sort: str) -> Overview | None:
    try:
        return recent(run, asked, sort if sort in TREND_OF else "std")
    except PatternError:  # what was asked for has not come yet
        return None


def _lines(parts: list[Text], width: int) -> int:
    """How many lines they take, broken to fit."""
    console = Console(width=width)
    return sum(max(len(part.wrap(console, width)), 1) for part in parts)


def _metrics(run: Run, width: int) -> list[Text]:
    """The newest value of each metric, and its way there."""
    series: dict[str, list[float]] = {}
    for row in _numbers(run):
        series.setdefault(row["name"], []).append(row["value"])
    said = [_metric(name, values) for name, values in list(series.items())[:_METRICS]]
    line = Text("   ").join(said)
    line.truncate(width, overflow="ellipsis")
    return [line] if said else []


def _metric(name: str, values: list[float]) -> Text:
    style = "cyan" if math.isfinite(values[-1]) else cells.ALARM
    return Text(f"{printable(name)} {text.number(values[-1])} {text.spark(values)}", style=style)


def _numbers(run: Run) -> list[dict[str, Any]]:
    steps = run.steps[-STEPS:]
    chosen = all_of([pc.field("value").is_valid(), pc.field("step") >= (steps[0] if steps else 0)])
    found: list[dict[str, Any]] = run.metrics().filter(chosen).to_pylist()
    return found
