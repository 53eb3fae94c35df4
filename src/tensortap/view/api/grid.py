"""Steps × places as dense arrays: what several records of a cell come to, and how steps are put together into bins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
_LARGEST = float(np.finfo(np.float32).max)


class Grid(NamedTuple):
    """One cell for each step (or bin of steps) and place. NaN: no value there.

    `count` is how many records have a value; without it each cell has at most one, and `low` and `high` are `mean`.
    `bad` marks cells in which something was not finite.
    """

    mean: Floats
    low: Floats | None = None
    high: Floats | None = None
    count: Floats | None = None
    bad: npt.NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        """How much room it takes."""
        return sum(part.nbytes for part in self if part is not None)


def as_floats(values: npt.NDArray[Any]) -> Floats:
    """Values as a screen needs them; beyond the range of float32 they stay finite."""
    return np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)


def scattered(cell: Ints, values: npt.NDArray[Any], bad: npt.NDArray[np.bool_] | None, shape: tuple[int, int]) -> Grid:
    """Records into cells; `cell` is step × places + place. Several records of one cell are put together."""
    size = shape[0] * shape[1]
    marks = None if bad is None or not bad.any() else np.bincount(cell[bad], minlength=size).astype(bool).reshape(shape)
    defined = ~np.isnan(values)
    if not defined.all():
        cell, values = cell[defined], values[defined]
    count = np.bincount(cell, minlength=size)
    if not size or count.max() <= 1:
        mean = np.full(size, np.nan, np.float32)
        mean[cell] = as_floats(values)
        return Grid(mean.reshape(shape), bad=marks)
    order = np.argsort(cell, kind="stable")
    return _folded(cell[order], values[order], count, shape)._replace(bad=marks)


def _folded(cell: Ints, values: npt.NDArray[Any], count: Ints, shape: tuple[int, int]) -> Grid:
    """Records sorted by cell, several in some."""
    starts = np.flatnonzero(np.diff(cell, prepend=-1))
    parts = []
    for fold in (np.add, np.fmin, np.fmax):
        part = np.full(count.size, np.nan)
        part[cell[starts]] = fold.reduceat(values, starts)
        parts.append(part)
    mean = parts[0] / np.maximum(count, 1)
    mean, low, high = (as_floats(part).reshape(shape) for part in (mean, *parts[1:]))
    return Grid(mean, low, high, count.astype(np.float32).reshape(shape))


def binned(grid: Grid, starts: Ints) -> Grid:
    """Rows put together from each start to the next: values by their counts, extremes as extremes."""
    if len(starts) == len(grid.mean):
        return grid
    ends = np.append(starts[1:], len(grid.mean))

    def each(fold: Callable[..., Any], part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # A loop over bins, whose inner one runs along the places: ten times as fast as reduceat.
        return np.stack([fold(part[a:b], axis=0) for a, b in zip(starts, ends, strict=True)])

    count = (~np.isnan(grid.mean)).astype(np.float32) if grid.count is None else grid.count
    weighed = np.nan_to_num(grid.mean) if grid.count is None else np.nan_to_num(grid.mean) * count
    total, number = each(np.add.reduce, weighed.astype(np.float64)), each(np.add.reduce, count)
    with np.errstate(invalid="ignore"):
        mean = np.where(number > 0, total / np.maximum(number, 1), np.nan).astype(np.float32)
    low, high = (grid.mean if part is None else part for part in (grid.low, grid.high))
    bad = None if grid.bad is None else each(np.logical_or.reduce, grid.bad)
    return Grid(mean, each(np.fmin.reduce, low), each(np.fmax.reduce, high), number, bad)


class Canvas:
    """Bins × rows, onto which the grids of several files are put, also where they overlap (ranks, resumed steps)."""

    def __init__(self, bins: int, rows: int) -> None:
        self.grid = Grid(np.full((bins, rows), np.nan, np.float32))

    def add(self, grid: Grid, bins: Ints, rows: Ints) -> None:
        """Put a grid's rows into `bins` and its places into `rows`; places with a negative row are left out."""
        keep = np.flatnonzero(rows >= 0)
        if len(keep) < len(rows):
            rows, grid = rows[keep], Grid(*(None if part is None else part[:, keep] for part in grid))
        at = np.ix_(bins, rows)
        if grid.count is None and self.grid.count is None and np.isnan(self.grid.mean[at]).all():
            self.grid.mean[at] = grid.mean
        else:
            self._merge(grid, at)
        if grid.bad is not None:
            marks = np.zeros(self.grid.mean.shape, bool) if self.grid.bad is None else self.grid.bad
            marks[at] |= grid.bad
            self.grid = self.grid._replace(bad=marks)

    def _merge(self, grid: Grid, at: Any) -> None:
        self._spread()
        mine, (mean, low, high, count, _) = self.grid, _spread(grid)
        assert mine.count is not None and mine.low is not None and mine.high is not None
        before = mine.count[at]
        whole = before + count
        with np.errstate(invalid="ignore"):
            total = np.nan_to_num(mine.mean[at]).astype(np.float64) * before + np.nan_to_num(mean) * count
            mine.mean[at] = np.where(whole > 0, total / np.maximum(whole, 1), np.nan)
        mine.low[at] = np.fmin(mine.low[at], low)
        mine.high[at] = np.fmax(mine.high[at], high)
        mine.count[at] = whole

    def _spread(self) -> None:
        if self.grid.count is None:
            mean, low, high, count, bad = _spread(self.grid)
            self.grid = Grid(mean, low.copy(), high.copy(), count, bad)


def _spread(grid: Grid) -> tuple[Floats, Floats, Floats, Floats, npt.NDArray[np.bool_] | None]:
    """A grid with all its parts."""
    if grid.count is not None and grid.low is not None and grid.high is not None:
        return grid.mean, grid.low, grid.high, grid.count, grid.bad
    return grid.mean, grid.mean, grid.mean, (~np.isnan(grid.mean)).astype(np.float32), grid.bad
