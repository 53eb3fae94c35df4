"""Hold steps × places as dense arrays: several records of a cell are merged, steps are put into bins."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
_LARGEST = float(np.finfo(np.float32).max)


class Grid(NamedTuple):
    """One cell for each step (or bin of steps) and place. NaN: no value there.

    `number` is how many records have a value; without it each cell has at most one, and `low` and `high` are `mean`.
    `bad` marks cells in which something was not finite.
    """

    mean: Floats
    low: Floats | None = None
    high: Floats | None = None
    number: Floats | None = None
    bad: npt.NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        """How much room it takes."""
        return sum(part.nbytes for part in self if part is not None)

    def each(self, take: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Grid:
        """Return something taken of every part that is there."""
        return Grid(*(None if part is None else take(part) for part in self))  # type: ignore[arg-type]


def as_floats(values: npt.NDArray[Any]) -> Floats:
    """Return values as float32 for a screen; what is beyond its range stays finite."""
    with np.errstate(over="ignore"):
        found: Floats = values.astype(np.float32)
    return np.clip(found, -_LARGEST, _LARGEST, out=found)


def scattered(cell: Ints, values: npt.NDArray[Any], bad: npt.NDArray[np.bool_] | None, shape: tuple[int, int]) -> Grid:
    """Put records into cells; `cell` is step × places + place. Several records of one cell are merged."""
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
    """Merge records that are sorted by cell, several in some."""
    starts = np.flatnonzero(np.diff(cell, prepend=-1))
    parts = []
    for fold in (np.add, np.fmin, np.fmax):
        part = np.full(count.size, np.nan)
        part[cell[starts]] = fold.reduceat(values, starts)
        parts.append(part)
    parts[0] /= np.maximum(count, 1)
    mean, low, high = (as_floats(part).reshape(shape) for part in parts)
    return Grid(mean, low, high, count.astype(np.float32).reshape(shape))


def binned(grid: Grid, starts: Ints) -> Grid:
    """Return rows put together from each start to the next: values by their counts, extremes as extremes."""
    if len(starts) == len(grid.mean):
        return grid
    ends = np.append(starts[1:], len(grid.mean))

    def each(fold: Callable[..., Any], part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # A loop over bins, whose inner one runs along the places: ten times as fast as reduceat.
        return np.stack([fold(part[a:b], axis=0) for a, b in zip(starts, ends, strict=True)])

    if grid.number is None and grid.bad is None and not np.isnan(grid.mean).any():
        number = (ends - starts).astype(np.float32)[:, None]
        with np.errstate(over="ignore"):
            total = each(np.add.reduce, grid.mean)
        if np.isfinite(total).all():
            low, high = (each(fold.reduce, grid.mean) for fold in (np.minimum, np.maximum))
            return Grid(
                np.asarray(total / number, np.float32), low, high, np.repeat(number, grid.mean.shape[1], axis=1)
            )
    count = (~np.isnan(grid.mean)).astype(np.float32) if grid.number is None else grid.number
    weighed = np.where(count > 0, grid.mean if grid.number is None else grid.mean * count, np.float32(0))
    number = each(np.add.reduce, count)
    with np.errstate(invalid="ignore", over="ignore"):
        total = each(np.add.reduce, weighed)
        if not np.isfinite(total).all():
            total = each(np.add.reduce, np.nan_to_num(grid.mean).astype(np.float64) * count)
        mean = np.where(number > 0, total / np.maximum(number, 1), np.nan).astype(np.float32)
    low, high = (grid.mean if part is None else part for part in (grid.low, grid.high))
    bad = None if grid.bad is None else each(np.logical_or.reduce, grid.bad)
    return Grid(mean, each(np.fmin.reduce, low), each(np.fmax.reduce, high), number, bad)


class Canvas:
    """Bins × rows, onto which the grids of several files are put, also where they overlap (ranks, resumed steps)."""

    def __init__(self, bins: int, total: int, rows: Ints | None = None) -> None:
        chosen = np.arange(total) if rows is None else rows
        self.grid = Grid(np.full((bins, len(chosen)), np.nan, np.float32))
        self._begun = np.zeros(bins, bool)
        self._where = np.full(total + 1, -1)  # and one more, for places that have no row
        self._where[chosen] = np.arange(len(chosen))

    def put(self, grid: Grid, at: Ints, rows: Ints) -> None:
        """Put steps together into the bins they are `at`, and what is of chosen `rows` where it belongs."""
        columns = self._where[rows]
        keep = np.flatnonzero(columns >= 0)
        if len(keep) < len(rows):
            columns, grid = columns[keep], grid.each(lambda part: part[:, keep])
        if len(keep):
            starts: Ints = np.flatnonzero(np.diff(at, prepend=-1))
            self._add(binned(grid, starts), at[starts], columns)

    def _add(self, grid: Grid, bins: Ints, rows: Ints) -> None:
        if grid.number is not None or self._begun[bins].any():
            self._spread()
            grid = _spread(grid) if grid.number is None else grid
        elif self.grid.number is not None:
            grid = _spread(grid)
        fresh = ~self._begun[bins]
        self._begun[bins] = True
        for these, put in ((fresh, self._set), (~fresh, self._merge)):
            if these.all():
                put(grid, _at(bins, rows))
            elif these.any():
                put(grid.each(itemgetter(these)), _at(bins[these], rows))

    def _set(self, grid: Grid, at: Any) -> None:
        """Set the cells of bins in which there is nothing yet."""
        for mine, part in zip(self.grid[:4], grid[:4], strict=True):
            if mine is not None:
                mine[at] = part
        self._mark(grid, at)

    def _merge(self, grid: Grid, at: Any) -> None:
        mine = self.grid
        assert mine.number is not None and grid.number is not None
        before = mine.number[at]
        whole = before + grid.number
        with np.errstate(invalid="ignore"):
            total = np.nan_to_num(mine.mean[at]).astype(np.float64) * before + np.nan_to_num(grid.mean) * grid.number
            mine.mean[at] = np.where(whole > 0, total / np.maximum(whole, 1), np.nan)
        for fold, part, other in ((np.fmin, mine.low, grid.low), (np.fmax, mine.high, grid.high)):
            assert part is not None and other is not None
            part[at] = fold(part[at], other)
        mine.number[at] = whole
        self._mark(grid, at)

    def _mark(self, grid: Grid, at: Any) -> None:
        if grid.bad is not None:
            marks = np.zeros(self.grid.mean.shape, bool) if self.grid.bad is None else self.grid.bad
            marks[at] |= grid.bad
            self.grid = self.grid._replace(bad=marks)

    def _spread(self) -> None:
        if self.grid.number is None:
            mean, low, high, count, bad = _spread(self.grid)
            assert low is not None and high is not None
            self.grid = Grid(mean, low.copy(), high.copy(), count, bad)


def _at(bins: Ints, rows: Ints) -> Any:
    """Return an index of bins × rows; slices where they lie side by side, which is much faster."""
    whole = [_slice(index) for index in (bins, rows)]
    if whole[0] is not None:
        return whole[0], rows if whole[1] is None else whole[1]
    return np.ix_(bins, rows) if whole[1] is None else (bins, whole[1])


def _slice(index: Ints) -> slice | None:
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return None


def _spread(grid: Grid) -> Grid:
    """Return a grid with all its parts."""
    return Grid(grid.mean, grid.mean, grid.mean, (~np.isnan(grid.mean)).astype(np.float32), grid.bad)
