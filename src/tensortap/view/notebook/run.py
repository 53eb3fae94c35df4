"""A run in a notebook: its header, its alarms and a line for each of the worst sites."""

from __future__ import annotations

from typing import Final

from tensortap import markup, text
from tensortap.sinks.line import nonfinite
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot
from tensortap.view.terminal import formats
from tensortap.view.terminal.ordering import worst_first
from tensortap.view.terminal.overview import Overview, SiteRow, calls_note, earlier_steps_note, recent_overview
from tensortap.view.terminal.screen import head

_ROWS: Final = 20
_HEADS: Final = ("site", "nan/inf", "mean", "std", "min", "max", "zeros", "histogram", "std over steps", "shape")


def run_html(run: Run) -> str:
    """Return the run as HTML: at most twenty sites, the worst first."""
    return run.snapshots.read(_html, whole=True)


def _html(snapshot: Snapshot) -> str:
    view = recent_overview(snapshot)
    if view is None:
        path = str(snapshot.files.url)
        return markup.page(markup.line(markup.element("b", path), f" {snapshot.state}: no records yet"))
    rows = worst_first(view.rows)
    hidden = len(rows) - _ROWS
    notes = [f"… {hidden} more sites"] if hidden > 0 else []
    notes += [said for said in (calls_note(view, rows[:_ROWS]), earlier_steps_note(view)) if said]
    return markup.page(*_head(view), markup.table(_HEADS, map(_row, rows[:_ROWS])), *map(_note, notes))


def _head(view: Overview) -> list[str]:
    """Return the same header as on the terminal."""
    first, *rest = head(view)
    colours = [markup.ALARM if view.first_bad and not i else markup.WARN for i in range(len(rest))]
    return [markup.line(first.plain), *(markup.line(t.plain, colour=c) for t, c in zip(rest, colours, strict=True))]


def _row(row: SiteRow) -> list[str]:
    summary = row.record.summary
    bad = markup.ALARM if nonfinite(summary) else ""
    name = row.name + (f" ×{row.of}" if row.of > 1 else "")
    return [
        markup.coloured(name, bad),
        markup.coloured(formats.nonfinite_text(summary), bad),
        *(formats.stat_text(summary, stat) for stat in ("mean", "std", "min", "max")),
        markup.coloured(formats.zeros_text(summary), markup.WARN if formats.zeros_style(summary) else ""),
        markup.bars(summary.heights(24), title="histogram"),
        markup.spark(row.trend, title="over steps") if len(row.trend) > 1 else "",
        f"{text.shape(summary.shape)} {formats.SHORT_DTYPES.get(summary.dtype, summary.dtype)}",
    ]


def _note(said: str) -> str:
    return markup.element("div", said, style="opacity:.65")
