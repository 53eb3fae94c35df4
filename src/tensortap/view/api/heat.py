"""The heat map: places in order of execution × bins of steps, one statistic."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.errors import PatternError, suggest
from tensortap.select.sites import Candidate, Pattern
from tensortap.store.filters import places_matching
from tensortap.types import Place
from tensortap.view.api.about import module_types
from tensortap.view.api.bins import bins_for, edges
from tensortap.view.api.block import Triple
from tensortap.view.api.grid import Grid, Ints
from tensortap.view.api.history import History
from tensortap.view.api.query import Query
from tensortap.view.api.seen import Seen
from tensortap.view.api.stats import Stat, stat_named
from tensortap.view.api.wire import Columns

CELLS: Final = 6_000_000  # at most so many in one answer, whatever is asked for
LONG: Final = 30_000_000  # records from which on a run is not read whole for its range
_SAMPLED: Final = 200_000


def heat(history: History, asked: Query) -> Columns:
    """`stat`, `port`, `sites`, `rows`, `from`, `to`, `width`. Where nothing was finite the value is +Inf."""
    seen, stat = history.watched.look(), stat_named(asked.text("stat", "std"))
    found = chosen_rows(history, seen, asked, stat)
    rows = found[slice(*asked.window("rows", len(found)))]
    bins = bins_for(*asked.span(seen.steps), min(asked.width, max(16, CELLS // max(len(rows), 1))))
    columns = _columns(history.grid(seen, stat, bins, rows), stat)
    header = {
        "stat": stat.name, "unit": stat.unit, "scale": stat.scale, "range": _range(history, seen, stat, asked, columns),
        "total": len(found), "version": seen.version, "level": bins.level,
    }  # fmt: skip
    return Columns(header, {"step": edges(bins, seen.steps), "row": rows.astype(np.int32), **columns})


def chosen_rows(history: History, seen: Seen, asked: Query, stat: Stat) -> Ints:
    """The rows a request means, in order of execution."""
    port, sites = asked.text("port"), asked.text("sites")
    chosen = _matching(history, seen, sites) if sites else None
    found = [
        row
        for triple, row in seen.row.items()
        if port in ("", triple[1])
        if not stat.ports or triple[1] in stat.ports
        if chosen is None or triple in chosen
    ]
    return np.array(found, np.int64)


def _matching(history: History, seen: Seen, sites: str) -> set[Triple]:
    """The places that a pattern means; their modules' classes are in the run's description, not in its records."""
    pattern = Pattern.parse(sites)
    if pattern.kind != "type":
        return {place[:3] for place in places_matching(pattern, seen.places)}
    types = module_types(history.watched.run.info)
    found = {
        triple
        for triple in seen.row
        if pattern.matches(Candidate(triple[0], (types.get(triple[0], ""),), (triple[1],)), triple[1])
    }
    if not found:
        known = sorted(set(types.values()))
        raise PatternError(f"{sites} matches nothing in this run.{suggest(sites.removeprefix('type:'), known)}")
    return found


def _range(
    history: History, seen: Seen, stat: Stat, asked: Query, columns: dict[str, npt.NDArray[Any]]
) -> list[float] | None:  # fmt: skip
    """Where colours begin and end: the same for every zoom into a run; of a very long run, what was asked for."""
    if seen.records > LONG:
        return value_range(columns["value"], stat.scale)
    port = asked.text("port")

    def look() -> list[float] | None:
        rows = chosen_rows(history, seen, Query({"port": port}), stat)
        grid = history.grid(seen, stat, bins_for(0, len(seen.steps), 256), rows)
        return value_range(_columns(grid, stat)["value"], stat.scale)

    return history.kept(("range", stat.name, port, seen.version), look, lambda found: 64)


def _columns(grid: Grid, stat: Stat) -> dict[str, npt.NDArray[Any]]:
    value = {"mean": grid.mean, "sum": _sum(grid), "min": grid.low, "max": grid.high}[stat.fold]
    columns = {"value": grid.mean if value is None else value}
    if grid.low is not None and grid.high is not None and stat.fold == "mean":
        columns |= {"low": grid.low, "high": grid.high}
    turned: dict[str, npt.NDArray[Any]] = {name: _turned(part) for name, part in columns.items()}
    if grid.bad is not None:
        turned["bad"] = _turned(grid.bad).astype(np.uint8)
        turned["value"][np.isnan(turned["value"]) & turned["bad"].astype(bool)] = np.inf
    return turned


def _sum(grid: Grid) -> npt.NDArray[np.float32]:
    return grid.mean if grid.number is None else np.asarray(grid.mean * grid.number, np.float32)


def _turned(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Places × bins."""
    return np.ascontiguousarray(part.T)


def value_range(values: npt.NDArray[Any], scale: str) -> list[float] | None:
    """All but the outermost hundredths, on a logarithmic scale of what is above zero; None when there is nothing."""
    flat = values.reshape(-1)
    flat = flat[:: max(1, flat.size // _SAMPLED)]
    flat = flat[np.isfinite(flat) & ((flat > 0) | (scale != "log"))]
    return [float(edge) for edge in np.percentile(flat, [1, 99])] if flat.size else None


def site_name(triple: tuple[str, str, str]) -> str:
    """How the page calls a place."""
    return str(Place(*triple))
