"""Make the heat map: places in order of execution × bins of steps, one statistic."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.errors import PatternError, suggest
from tensortap.select.sites import Candidate, Pattern
from tensortap.store import facts
from tensortap.store.filters import places_matching
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.view.api.bins import StepBins, bins_for, edges
from tensortap.view.api.fold import row_groups
from tensortap.view.api.grid import Grid, Ints
from tensortap.view.api.query import Query
from tensortap.view.api.ranks import SPREAD, of_rank, spread_grid
from tensortap.view.api.stats import Stat, stat_named
from tensortap.view.api.tiles import TiledGrids
from tensortap.view.api.wire import ColumnAnswer

CELLS: Final = 6_000_000  # at most so many in one answer, whatever is asked for
LONG: Final = 30_000_000  # records from which on a run is not read whole for its range
_SAMPLED: Final = 200_000
_SPREAD_STAT: Final = Stat(
    "spread", "relative spread over ranks", (), lambda columns: np.zeros(0), fold="max", scale="log"
)


def heat(history: TiledGrids, snapshot: Snapshot, query: Query) -> ColumnAnswer:
    """Answer with a heat map. Takes `stat`, `port`, `sites`, `fold`, `rows`, `rank`, `from`, `to`, `width`.

    Where nothing was finite the value is +Inf.
    """
    stat, spread = stat_named(query.text("stat", "std")), query.text("rank") == SPREAD
    found = row_groups(chosen_rows(snapshot, query, stat), list(snapshot.rows), query)
    groups = found.window(*query.window("rows", found.size))
    bins = bins_for(*query.span(snapshot.steps), min(query.width, max(16, CELLS // max(len(groups.rows), 1))))
    shown = of_rank(snapshot, query)
    grid = (spread_grid if spread else _grid)(history, shown, stat, bins, groups.rows)
    columns = _columns(groups.merged(grid), _SPREAD_STAT if spread else stat)
    scale = "log" if spread else stat.scale
    header = {
        "stat": stat.name, "unit": "relative spread" if spread else stat.unit, "scale": scale,
        "range": value_range(columns["value"], scale) if spread else _range(history, shown, stat, query, columns),
        "total": found.size, "version": snapshot.version, "level": bins.level,
    }  # fmt: skip
    row = groups.firsts.astype(np.int32)
    return ColumnAnswer(header, {"step": edges(bins, snapshot.steps), "row": row, **columns})


def _grid(history: TiledGrids, snapshot: Snapshot, stat: Stat, bins: StepBins, rows: Ints) -> Grid:
    return history.grid(snapshot, stat, bins, rows)


def chosen_rows(snapshot: Snapshot, query: Query, stat: Stat) -> Ints:
    """Return the rows a request means, in order of execution."""
    port, sites = query.text("port"), query.text("sites")
    chosen = _matching(snapshot, sites) if sites else None
    found = [
        row
        for triple, row in snapshot.rows.items()
        if port in ("", triple[1])
        if not stat.ports or triple[1] in stat.ports
        if chosen is None or triple in chosen
    ]
    return np.array(found, np.int64)


def _matching(snapshot: Snapshot, sites: str) -> set[Triple]:
    """Return the places that a pattern matches; classes of modules are in `run.json`, not in the records."""
    pattern = Pattern.parse(sites)
    if pattern.kind != "type":
        return {place[:3] for place in places_matching(pattern, snapshot.places)}
    types = facts.module_types(snapshot.run_json)
    found = {
        triple
        for triple in snapshot.rows
        if pattern.matches(Candidate(triple[0], (types.get(triple[0], ""),), (triple[1],)), triple[1])
    }
    if not found:
        known = sorted(set(types.values()))
        raise PatternError(f"{sites} matches nothing in this run.{suggest(sites.removeprefix('type:'), known)}")
    return found


def _range(
    history: TiledGrids, snapshot: Snapshot, stat: Stat, query: Query, columns: dict[str, npt.NDArray[Any]]
) -> list[float] | None:  # fmt: skip
    """Return where colours begin and end: the same for every zoom, except in a very long run."""
    if snapshot.record_count > LONG:
        return value_range(columns["value"], stat.scale)
    port = query.text("port")

    def read() -> list[float] | None:
        rows = chosen_rows(snapshot, Query({"port": port}), stat)
        grid = history.grid(snapshot, stat, bins_for(0, len(snapshot.steps), 256), rows)
        return value_range(_columns(grid, stat)["value"], stat.scale)

    return history.kept(
        snapshot, ("range", stat.name, port, query.text("rank"), snapshot.version), read, lambda found: 64
    )


def _columns(grid: Grid, stat: Stat) -> dict[str, npt.NDArray[Any]]:
    value = _sum(grid) if stat.fold == "sum" else {"mean": grid.mean, "min": grid.low, "max": grid.high}[stat.fold]
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
    """Return the grid with places as rows and bins as columns."""
    return np.ascontiguousarray(part.T)


def value_range(values: npt.NDArray[Any], scale: str) -> list[float] | None:
    """Return the 1st and the 99th percentile, on a logarithmic scale of positive values; None when there is none."""
    flat = values.reshape(-1)
    flat = flat[:: max(1, flat.size // _SAMPLED)]
    flat = flat[np.isfinite(flat) & ((flat > 0) | (scale != "log"))]
    return [float(edge) for edge in np.percentile(flat, [1, 99])] if flat.size else None
