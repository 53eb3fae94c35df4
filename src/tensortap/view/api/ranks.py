"""Show ranks apart: one of them, how far they spread, and which of them differs from the others."""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.store.snapshot import Snapshot
from tensortap.view.api.bins import StepBins, bins_for, edges
from tensortap.view.api.grid import Grid, Ints
from tensortap.view.api.query import Query, RequestError
from tensortap.view.api.stats import Stat, stat_named
from tensortap.view.api.tiles import TiledGrids
from tensortap.view.api.wire import ColumnAnswer

SPREAD: Final = "spread"
MOST: Final = 256  # ranks that are compared
_SITES: Final = 400  # of very many sites, evenly chosen ones are compared
_QUANTILE: Final = 0.9  # of the sites' distances: one that is far away alone is no other rank


def of_rank(snapshot: Snapshot, query: Query) -> Snapshot:
    """Return the run restricted to the rank that `rank=` names; as it is for none, or for their spread."""
    named = query.text("rank")
    if not named or named == SPREAD:
        return snapshot
    rank = query.number("rank")
    if rank not in snapshot.ranks:
        raise RequestError(f"rank must be one of {_few(snapshot.ranks)}, got {named[:40]!r}", "leave rank out for all")
    return restricted(snapshot, rank)


def restricted(snapshot: Snapshot, rank: int) -> Snapshot:
    """Return the same files of one rank alone; places and steps keep their numbers."""
    if len(snapshot.ranks) < 2:
        return snapshot
    _ = snapshot.rows, snapshot.steps
    alone = copy.copy(snapshot)
    alone.records = [files for files in snapshot.records if files.rank == rank]
    for name in ("tails", "outlines", "record_count"):
        alone.__dict__.pop(name, None)
    return alone


def spread_grid(history: TiledGrids, snapshot: Snapshot, stat: Stat, bins: StepBins, rows: Ints) -> Grid:
    """Return the difference of the highest and the lowest rank, relative to their middle."""
    means, bad = _by_rank(history, snapshot, stat, bins, rows)
    with np.errstate(all="ignore"):
        low, high = np.fmin.reduce(means), np.fmax.reduce(means)
        spread = (high - low) / np.maximum(np.abs(high + low) / 2, np.finfo(np.float32).tiny)
    return Grid(spread.astype(np.float32), bad=np.asarray(bad.any(axis=0)) if bad.any() else None)


def _by_rank(
    history: TiledGrids, snapshot: Snapshot, stat: Stat, bins: StepBins, rows: Ints
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return ranks × bins × rows: means, and whether anything was not finite."""
    means, bad = [], []
    for rank in snapshot.ranks[:MOST]:
        grid = history.grid(restricted(snapshot, rank), stat, bins, rows)
        means.append(grid.mean.astype(np.float64))
        bad.append(np.zeros(grid.mean.shape, bool) if grid.bad is None else grid.bad)
    return np.stack(means), np.stack(bad)


def ranks(history: TiledGrids, snapshot: Snapshot, query: Query) -> ColumnAnswer:
    """Return how far each rank is from the median of all, by bins. Takes `stat`, `port`, `from`, `to`, `width`.

    The distance of a site is relative to the median; nine of ten sites of the rank are nearer than the number given.
    """
    stat = stat_named(query.text("stat", "std"))
    port = query.text("port")
    rows = np.array([r for triple, r in snapshot.rows.items() if port in ("", triple[1])], np.int64)
    rows = rows[:: max(1, -(-len(rows) // _SITES))]
    bins = bins_for(*query.span(snapshot.steps), min(query.width, 400))
    means, bad = _by_rank(history, snapshot, stat, bins, rows)
    value = _distances(means).astype(np.float32)
    value[np.isnan(value) & bad.any(axis=2)] = np.inf
    header = {"ranks": list(snapshot.ranks[:MOST]), "outlier": outlier(value), "version": snapshot.version}
    columns: dict[str, npt.NDArray[Any]] = {
        "step": edges(bins, snapshot.steps), "value": value, "bad": np.asarray(bad.any(axis=2), np.uint8),
    }  # fmt: skip
    return ColumnAnswer(header, columns)


def _distances(means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks × bins: the distance from the middle that nine of ten sites are within."""
    with np.errstate(all="ignore"):
        present = np.isfinite(means).sum(axis=0)
        ordered = np.sort(means, axis=0)  # NaN comes last
        middle = np.take_along_axis(ordered, np.maximum(present - 1, 0)[None] // 2, axis=0)[0]
        apart = np.abs(means - middle) / np.maximum(np.abs(middle), np.finfo(np.float32).tiny)
        known = np.sort(np.where(np.isfinite(apart), apart, np.nan), axis=2)
        count = np.isfinite(known).sum(axis=2)
        at = np.clip(np.ceil(_QUANTILE * count).astype(int) - 1, 0, None)
        found = np.take_along_axis(known, at[..., None], axis=2)[..., 0]
    return np.where(count > 0, found, np.nan)


def outlier(value: npt.NDArray[np.float32], times: float = 3.0) -> int | None:
    """Return the one rank that is `times` as far from the middle as any other, by its usual distance; None if none is.

    >>> outlier(np.array([[0.1], [0.12], [0.9], [0.1]], np.float32))
    2
    """
    finite = np.where(np.isfinite(value), value, np.nan)
    if len(value) < 3 or not np.isfinite(finite).any(axis=1).all():
        return None
    usual = np.nanmedian(finite, axis=1)
    order = np.argsort(usual)
    return int(order[-1]) if usual[order[-1]] > max(times * usual[order[-2]], 1e-6) else None


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
