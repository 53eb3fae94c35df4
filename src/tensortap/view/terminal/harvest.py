"""A harvest on the terminal: a line for every site; or one dimension, and the rows in which it is largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import IO, Any

from rich.text import Text

from tensortap import text
from tensortap.harvest.drift import Drift, SiteDrift
from tensortap.harvest.reader import Harvest, open_harvest
from tensortap.harvest.summary import Activation, SiteSummary, summarize_sites, top
from tensortap.text import printable
from tensortap.view.terminal import formats
from tensortap.view.terminal.columns import Column, grid
from tensortap.view.terminal.screen import Screen

Decode = Callable[[list[int]], str]


def show_harvest(path: str, sites: Sequence[str], dimension: int | None, decode: Decode | None) -> None:
    """Draw a harvest; with a dimension, the samples that activate it most."""
    harvest, screen = open_harvest(path), Screen(None)
    if dimension is not None:
        site = harvest.site(sites[0]).site if sites else harvest.sites[0]
        draw_top(screen, site, dimension, top(harvest, site, dimension, decode=decode))
        return
    chosen = [harvest.site(site).site for site in sites]
    draw_harvest(screen, harvest, [site for site in summarize_sites(harvest) if not chosen or site.site in chosen])


def harvest_json(path: str) -> dict[str, Any]:
    """Return what `show` draws as plain data."""
    harvest = open_harvest(path)
    return {
        "path": harvest.path, "complete": harvest.complete, "rows": harvest.rows, "samples": harvest.samples,
        "set_aside": harvest.set_aside, "sites": [site.to_dict() for site in summarize_sites(harvest)],
    }  # fmt: skip


def draw_harvest(screen: Screen, harvest: Harvest, sites: list[SiteSummary]) -> None:
    """Draw a line for every site."""
    state = "" if harvest.complete else ", not complete"
    head = f"{harvest.rows:,} rows of {harvest.samples:,} samples{state}"
    screen.draw(Text(printable(harvest.path), style="dim"), Text(head, style="bold"))
    if harvest.set_aside:
        screen.draw(Text(f"{text.counted(len(harvest.set_aside), 'sample')} set aside", style=formats.ALARM))
    screen.draw(Text(), grid(_columns(sites), sites, screen.width))
    for damage in dict.fromkeys(site.damage for site in sites if site.damage):
        screen.draw(Text(printable(damage), style=formats.ALARM))


def draw_top(screen: Screen, site: str, dimension: int, rows: list[Activation]) -> None:
    """Draw the rows in which a dimension is largest."""
    screen.draw(Text(f"{printable(site)}, dimension {dimension}", style="bold"))
    columns: list[Column[Activation]] = [
        Column("value", lambda r: text.number(r.value), 9),
        Column("sample", lambda r: str(r.sample), 8),
        Column("position", lambda r: "" if r.position < 0 else str(r.position), 7),
        Column("token", lambda r: "" if r.token < 0 else str(r.token), 6),
        Column("text", lambda r: printable(r.text), 5, left=True),
    ]
    screen.draw(grid(columns if any(row.text for row in rows) else columns[:-1], rows, screen.width))


def draw_drift(found: Drift, stream: IO[str] | None = None) -> None:
    """Draw what has drifted, site by site."""
    screen = Screen(stream)
    for name, path in (("baseline", found.a), ("now", found.b)):
        screen.draw(Text(f"{name:<8}  {printable(path)}", style="dim"))
    screen.draw(Text(found.headline, style="bold green" if found else formats.ALARM))
    for name, only in (("the baseline", found.only_in_a), ("now", found.only_in_b)):
        if only:
            screen.draw(Text(f"  only in {name}: {printable(', '.join(only))}"))
    columns: list[Column[SiteDrift]] = [
        Column("site", lambda s: printable(s.site), 99, left=True),
        Column("drifted", lambda s: f"{len(s.drifted)} of {len(s.psi)}", 9),
        Column("largest PSI", lambda s: f"{s.psi.max():.3f}", 8),
        Column("smallest q", lambda s: text.number(float(s.q.min())), 7),
        Column("dimensions", lambda s: ", ".join(map(str, s.drifted[:6])), 6, left=True),
        Column("samples", lambda s: f"{s.samples[0]} and {s.samples[1]}", 5),
    ]
    screen.draw(grid(columns, list(found.sites), screen.width))


def _columns(sites: list[SiteSummary]) -> list[Column[SiteSummary]]:
    """Return the columns; that of values that are not finite only where there are some, for it takes others' room."""
    columns: list[Column[SiteSummary]] = [
        Column("site", lambda s: printable(s.site), 99, left=True),
        Column("rows", lambda s: f"{s.rows:,}", 9),
        Column("width", lambda s: str(s.width), 8.5),
        Column("dtype", lambda s: s.dtype, 3),
        Column("mean", lambda s: _number(s, "mean"), 6),
        Column("std", lambda s: _number(s, "std"), 7),
        Column("min", lambda s: _number(s, "min"), 5),
        Column("max", lambda s: _number(s, "max"), 5.5),
        Column("not finite", lambda s: str(s.totals["nonfinite"] or ""), 8),
        Column("dead", lambda s: str(len(s.dead)), 6.5),
        Column("dense", lambda s: str(len(s.dense)), 4.7),
        Column("axes for 90 %", _axes, 4.5),
        Column("values", lambda s: s.bars, 2, left=True),
    ]
    bad = any(site.totals["nonfinite"] for site in sites)
    return [column for column in columns if bad or column.title != "not finite"]


def _number(site: SiteSummary, name: str) -> str:
    return text.number(site.totals[name]) if name in site.totals else ""


def _axes(site: SiteSummary) -> str:
    total = 0.0
    for count, share in enumerate(site.spectrum, 1):
        total += share
        if total >= 0.9:
            return str(count)
    return f">{len(site.spectrum)}" if site.spectrum else ""
