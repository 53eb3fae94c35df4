"""What `tensortap show` draws: all sites in a table, or one of them in detail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

from tensortap.errors import RunError
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot
from tensortap.view.terminal.detail import SiteDetail, draw_detail, read_detail
from tensortap.view.terminal.ordering import SORTS
from tensortap.view.terminal.overview import TREND_OF, Overview, SiteRow, overview
from tensortap.view.terminal.screen import Screen, draw_overview


@dataclass(frozen=True, slots=True, eq=False)
class ShowView:
    """The overview, the rows within the limit, and the detail when one site was asked for."""

    overview: Overview
    shown: list[SiteRow]
    detail: SiteDetail | None

    def as_json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return self.detail.as_json(self.overview) if self.detail else self.overview.as_json(self.shown)


def read_view(
    run: Run,
    sites: list[str] | None = None,
    steps: Any = None,
    sort: str = "worst",
    limit: int = 0,
    phase: str | None = None,
) -> ShowView:
    """Read the records that match, as of one moment. One pattern that matches one site gives its detail."""

    def read(snapshot: Snapshot) -> ShowView:
        view = overview(snapshot, sites, steps, sort if sort in TREND_OF else "std", phase)
        if view is None:
            when = "of these sites then" if len(snapshot.steps) else "yet"
            raise RunError(f"{run.path} ({snapshot.state}) holds no records {when}")
        rows = SORTS[sort](view.rows)
        shown = rows[:limit] if limit else rows
        detail = read_detail(view, sites, limit) if sites and len(sites) == len(rows) == 1 else None
        return ShowView(view, shown, detail)

    return run.snapshots.read(read, whole=True)


def draw(view: ShowView, stream: IO[str] | None = None, wide: bool = False) -> None:
    """Draw the view on the terminal; `wide`: all columns and whole names, however narrow it is."""
    screen = Screen(stream, wide)
    if view.detail:
        draw_detail(view.overview, view.detail, screen)
    else:
        draw_overview(view.overview, view.shown, screen)
