"""A run in a notebook: what it is, what is wrong with it, and a line for each of the worst sites."""

from __future__ import annotations

from typing import Final

from tensortap import markup, text
from tensortap.sinks.line import nonfinite
from tensortap.store.run import Run
from tensortap.view.terminal import cells
from tensortap.view.terminal.ordering import worst_first
from tensortap.view.terminal.overview import Overview, SiteRow
from tensortap.view.terminal.recent import left_out, recent
from tensortap.view.terminal.screen import head

_ROWS: Final = 20
_HEADS: Final = ("site", "nan/inf", "mean", "std", "min", "max", "zeros", "histogram", "std over steps", "shape")


def run_html(run: Run) -> str:
    """The run as HTML: at most twenty sites, the worst first."""
    view = recent(run)
    if view is None:
        return markup.page(markup.line(markup.element("b", str(run.path)), f" {run.state}: no records yet"))
    rows = worst_first(view.rows)
    hidden = len(rows) - _ROWS
    notes = [f"… {hidden} more sites"] if hidden > 0 else []
    notes += [said] if (said := left_out(run, view)) else []
    return markup.page(*_head(view), markup.table(_HEADS, map(_row, rows[:_ROWS])), *map(_note, notes))


def _head(view: Overview) -> list[str]:
    """What the terminal says at the top, too."""
    first, *rest = head(view)
    colours = [markup.ALARM if view.first_bad and not i else markup.WARN for i in range(len(rest))]
    return [markup.line(first.plain), *(markup.line(t.plain, colour=c) for t, c in zip(rest, colours, strict=True))]


def _row(row: SiteRow) -> list[str]:
    summary = row.record.summary
    bad = markup.ALARM if nonfinite(summary) else ""
    name = row.name + (f" ×{row.of}" if row.of > 1 else "")
    return [
        markup.coloured(name, bad),
        markup.coloured(cells.bad(summary), bad),
        *(cells.stat(summary, stat) for stat in ("mean", "std", "min", "max")),
        markup.coloured(cells.zeros(summary), markup.WARN if cells.zeros_style(summary) else ""),
        markup.bars(summary.heights(24), title="histogram"),
        markup.spark(row.trend, title="over steps") if len(row.trend) > 1 else "",
        f"{text.shape(summary.shape)} {cells.SHORT.get(summary.dtype, summary.dtype)}",
    ]


def _note(said: str) -> str:
    return markup.element("div", said, style="opacity:.65")


Run.drawn = staticmethod(run_html)
