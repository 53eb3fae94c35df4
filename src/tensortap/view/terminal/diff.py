"""A diff of two runs on the terminal: the headline, remarks, then a line for every site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Final

from rich.padding import Padding
from rich.text import Text

from tensortap import text
from tensortap.diff.pair import dtypes, times
from tensortap.diff.result import Diff, SiteDiff, many
from tensortap.text import printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.columns import Column, grid
from tensortap.view.terminal.screen import Screen

_INDENT: Final = (0, 0, 0, 2)


def draw_diff(found: Diff, limit: int = 0, stream: IO[str] | None = None) -> None:
    """Draw the headline, the remarks and the rows, the worst first."""
    screen = Screen(stream)
    screen.draw(Text(f"a  {printable(found.a)}", style="dim"), Text(f"b  {printable(found.b)}", style="dim"))
    screen.draw(Text(found.headline, style="bold green" if found else formats.ALARM))
    screen.draw(*(Padding(Text(remark), _INDENT, expand=False) for remark in found.remarks()))
    if found.first_unequal is None or found.explanation:
        return
    shown = _shown(found, limit)
    screen.draw(Text(), grid(list(_columns(found, shown)), shown, screen.width))
    if hidden := len(found) - len(shown):
        screen.draw(Text(f"… {many(hidden, 'more site')}; --limit 0 shows all", style="dim"))


def _shown(found: Diff, limit: int) -> list[SiteDiff]:
    """Return the worst rows; the site where the runs first diverge is always among them."""
    rows = list(found.rows[:limit] if limit else found.rows)
    if found.first and all(row.first is not found.first for row in rows):
        rows = [*(row for row in found.rows if row.first is found.first), *rows[:-1]]
    return rows


def _columns(found: Diff, rows: Sequence[SiteDiff]) -> Iterator[Column[SiteDiff]]:
    """Return the columns from left to right; those with the lowest `keep` are left out first."""
    yield Column("site", lambda r: _mark(found, r) + r.worst.name, 99, _style, left=True)
    yield Column("× tolerance", _excess, 10, _style)
    yield Column("error", lambda r: text.number(r.worst.error), 9)
    if any(row.worst.kept for row in rows):
        yield Column("norm. L2", lambda r: _number(r.worst.nl2), 7)
        yield Column("SQNR dB", lambda r: _number(r.worst.sqnr), 6)
        yield Column("cosine", lambda r: _number(r.worst.cosine, 4), 3)
        yield Column("bit-equal", _bits, 8)
    yield Column("Δmean", lambda r: _number(r.worst.mean), 4)
    yield Column("Δstd", lambda r: _number(r.worst.std), 5)
    yield Column("KS", lambda r: _number(r.worst.ks), 2)
    if len(found.steps) > 1 and not found:
        yield Column("steps", _steps, 8.5)
        yield Column("first", lambda r: "" if r.first is None else found.when(r.first).removeprefix("step "), 8.6)
    yield Column(
        "compared", lambda r: f"{r.worst.elements} {r.worst.kept}" if r.worst.kept else "statistics", 1, left=True
    )
    yield Column("dtype", lambda r: dtypes(r.worst), 2.5, left=True)


def _mark(found: Diff, row: SiteDiff) -> str:
    return "▶ " if found.first is not None and row.first is found.first else "  " if found.first else ""


def _style(row: SiteDiff) -> str:
    return "red" if row.differs else ""


def _excess(row: SiteDiff) -> str:
    if row.worst.of == "shape":
        return "shape"
    if row.worst.note:
        return "NaN/Inf"
    return times(row.worst.excess) if row.worst.excess else "0"


def _steps(row: SiteDiff) -> str:
    return f"{row.differing}/{row.pairs}"


def _bits(row: SiteDiff) -> str:
    return "–" if row.worst.bit_equal is None else text.percent(row.worst.bit_equal, 1)


def _number(value: float | None, digits: int = 0) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if digits else text.number(value)
