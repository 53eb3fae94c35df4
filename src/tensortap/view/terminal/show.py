"""What `show` was asked for: all sites in a table, or one of them closely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

from tensortap.errors import RunError
from tensortap.store.run import Run
from tensortap.view.terminal.detail import Detail, detail, draw_detail
from tensortap.view.terminal.ordering import SORTS
from tensortap.view.terminal.overview import TREND_OF, Overview, SiteRow, overview
from tensortap.view.terminal.screen import Screen, draw_overview


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What there is to draw: the overview, the rows within the limit, and the one site asked for, if it is one."""

    view: Overview
    shown: list[SiteRow]
    closely: Detail | None

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return self.closely.as_json(self.view) if self.closely else self.view.as_json(self.shown)


def look(run: Run, sites: list[str] | None = None, steps: Any = None, sort: str = "worst", limit: int = 0) -> Seen:
    """Read what was asked for. One pattern that is one site is looked at closely."""
    view = overview(run, sites, steps, sort if sort in TREND_OF else "std")
    if view is None:
        raise RunError(f"{run.path} ({run.state}) holds no records {'yet' if not run.steps else 'of these sites then'}")
    rows = SORTS[sort](view.rows)
    shown = rows[:limit] if limit else rows
    closely = detail(view, sites, limit) if sites and len(sites) == len(rows) == 1 else None
    return Seen(view, shown, closely)


def draw(seen: Seen, stream: IO[str] | None = None) -> None:
    """Draw it on the terminal."""
    screen = Screen(stream)
    if seen.closely:
        draw_detail(seen.view, seen.closely, screen)
    else:
        draw_overview(seen.view, seen.shown, screen)
