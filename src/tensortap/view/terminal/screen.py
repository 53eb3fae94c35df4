"""The terminal, and a run on it: its header, its alarms and one line for each site."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensortap import text
from tensortap.sinks.line import nonfinite
from tensortap.store.facts import info, numbered_phases, split_counts
from tensortap.text import printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.columns import Column, grid
from tensortap.view.terminal.overview import TREND, NonFiniteEvent, Overview, SiteRow, calls_note, site_names
from tensortap.view.terminal.site_names import SiteNames

_UNBOUNDED: Final = 10_000
_BARS: Final = 10
_NAMED: Final = 3  # names of sites that were not seen
_STATES: Final = {"live": "green", "crashed": formats.WARN}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command, whose exit codes are its own; rich would exit with 1."""
        raise BrokenPipeError


class Screen:
    """The stream to draw on: as wide as the terminal or COLUMNS; piped, plain and as wide as needed.

    >>> import sys
    >>> Screen(sys.stdout).draw(Text("hello"))
    hello
    """

    def __init__(self, stream: IO[str] | None = None, wide: bool = False) -> None:
        self._console = _Console(file=stream, highlight=False, markup=False, emoji=False)
        columns = os.environ.get("COLUMNS", "")
        if wide or (not self._console.is_terminal and not (columns.isdecimal() and int(columns))):
            self._console.width = _UNBOUNDED
        self.width = self._console.width

    @property
    def size(self) -> tuple[int, int] | None:
        """Return the terminal's columns and lines as they are now; None when the stream is not a terminal."""
        return tuple(self._console.size) if self._console.is_terminal else None  # type: ignore[return-value]

    def live(self) -> Live:
        """Return a display that redraws itself on the terminal's other screen."""
        return Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")

    def draw(self, *parts: RenderableType) -> None:
        """Print parts one below the other."""
        for part in parts:
            if self._console.is_terminal:
                self._console.print(part)
            else:
                self._print_trimmed(part)

    def _print_trimmed(self, part: RenderableType) -> None:
        """Print without the blanks that fill a table's last column."""
        with self._console.capture() as captured:
            self._console.print(part)
        for line in captured.get().splitlines():
            self._console.print(Text(line.rstrip()), soft_wrap=True)


def draw_overview(view: Overview, shown: Sequence[SiteRow], screen: Screen) -> None:
    """Draw the header, then the rows, and how many rows were left out."""
    names = SiteNames(site_names(view.snapshot))
    screen.draw(*head(view), Text(), sites(view, shown, screen.width, names))
    if hidden := len(view.rows) - len(shown):
        screen.draw(Text(f"… {hidden} more sites; --limit 0 shows all", style="dim"))
    screen.draw(*(Text(note, style="dim") for note in (calls_note(view, shown), *names.notes) if note))


def sites(view: Overview, shown: Sequence[SiteRow], width: int, names: SiteNames) -> Table:
    """Return the rows as a table."""
    return grid(list(_columns(view, shown)), shown, width, names)


def head(view: Overview) -> Iterator[Text]:
    """Return the header: the run in one line, then alarms in lines of their own."""
    steps = _many(len(view.steps), f"{view.phase} step" if view.phase else "step")
    yield title(view.about, f"{steps}{_range(view.steps)}", len(view.rows), view.records)
    if view.first_bad:
        yield Text(_alarm(view, view.first_bad), style=formats.ALARM)
    yield from counts_lines(view.about["counts"], info(view.snapshot).get("unseen", {}))
    if others := [phase for phase in numbered_phases(view.snapshot) if view.phase and phase != view.phase]:
        yield Text(f"steps of {others[0]} have their own numbers: --phase {others[0]}", style="dim")


def counts_lines(counts: Mapping[str, int], unseen: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Text]:
    """Return what was counted: what is missing, with a few names of what was not seen, then what only was done."""
    lost, done = split_counts(counts)
    if lost:
        said = [_counted(name, count) + (_few(unseen) if name == "unseen" else "") for name, count in lost.items()]
        yield Text(f"not recorded or went wrong: {', '.join(said)}", style=formats.WARN)
    if done:
        yield Text(f"counted: {', '.join(_counted(name, count) for name, count in done.items())}", style="dim")


def _counted(name: str, count: int) -> str:
    return f"{printable(name).replace('_', ' ')} {count}"


def _few(unseen: Mapping[str, Any]) -> str:
    """Return the first names of sites that were not seen, in parentheses."""
    names = [printable(name) or "(root)" for name in list(unseen)[:_NAMED]]
    more = f" and {len(unseen) - _NAMED} more" if len(unseen) > _NAMED else ""
    return f" ({', '.join(names)}{more})" if names else ""


def title(facts: dict[str, Any], steps: str, sites: int, records: int) -> Text:
    """Return the first line: path, state, size."""
    ranks = len(facts["ranks"])
    parts = [
        Text(printable(facts["path"]), style="bold"),
        Text(_state(facts), style=_STATES.get(facts["state"], "") or ("ended_by" in facts and formats.WARN) or ""),
        Text(printable(facts["model"])),
        Text(steps),
        Text(_many(sites, "site")),
        Text(_many(records, "record")),
        Text(_many(ranks, "rank") if ranks > 1 else ""),
    ]
    return Text(" · ").join(part for part in parts if part)


def _state(facts: dict[str, Any]) -> str:
    return f"ended by {facts['ended_by']}" if facts["state"] == "finished" and "ended_by" in facts else facts["state"]


def _alarm(view: Overview, first: NonFiniteEvent) -> str:
    sites = sum(row.first_bad is not None for row in view.rows)
    records, where = _many(view.bad_records, "record"), _many(sites, "site")
    return f"NaN or Inf in {records} of {where}, first at step {first.step} in {printable(first.site)}"


def _columns(view: Overview, rows: Sequence[SiteRow]) -> Iterator[Column[SiteRow]]:
    """Return the columns from left to right; those with the lowest `keep` are left out first."""
    yield Column("site", _site, 99, _row_style, left=True)
    yield Column(
        "nan/inf",
        lambda r: formats.nonfinite_text(r.record.summary),
        10,
        lambda r: formats.nonfinite_style(r.record.summary),
    )
    if any(row.first_bad is not None for row in rows):
        yield Column("since", lambda r: "" if r.first_bad is None else f"step {r.first_bad.step}", 9, _row_style)
    yield _stat("mean", 5)
    yield _stat("std", 9)
    yield _stat("min", 4)
    yield _stat("max", 6)
    yield Column(
        "zeros", lambda r: formats.zeros_text(r.record.summary), 7, lambda r: formats.zeros_style(r.record.summary)
    )
    yield Column("histogram", lambda r: r.record.summary.bars(_BARS), 8, left=True)
    if len(view.steps) > 1:
        yield Column(f"{view.trend_of} over steps", lambda r: text.spark(r.trend, TREND), 4.5, _row_style, left=True)
    yield Column("shape", lambda r: text.shape(r.record.summary.shape), 3, left=True)
    yield Column("dtype", lambda r: formats.SHORT_DTYPES.get(r.record["dtype"], r.record["dtype"]), 2, left=True)
    if any(row.record.step != view.steps[-1] for row in rows):
        yield Column("step", lambda r: str(r.record.step), 9.5)


def _stat(name: str, keep: float) -> Column[SiteRow]:
    return Column(name, lambda r: formats.stat_text(r.record.summary, name), keep)


def _site(row: SiteRow) -> str:
    return printable(row.name) + (f" ×{row.of}" if row.of > 1 else "")


def _row_style(row: SiteRow) -> str:
    if nonfinite(row.record.summary):
        return formats.ALARM
    return "red" if row.first_bad else formats.zeros_style(row.record.summary)


def _range(steps: Sequence[int]) -> str:
    return f" ({steps[0]}–{steps[-1]})" if len(steps) > 1 else f" ({steps[0]})"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
