"""Put the rows of a heat map together by module: a collapsed module is one row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.store.snapshot import Triple
from tensortap.view.api.grid import Grid, Ints
from tensortap.view.api.query import Query, RequestError

_MOST: Final = 5000  # collapsed modules in one request


class RowGroups(NamedTuple):
    """Rows in groups: `rows[starts[i]:starts[i + 1]]` are the i-th; a group stands where its first row stood."""

    rows: Ints
    starts: Ints

    @property
    def size(self) -> int:
        """How many groups there are."""
        return len(self.starts)

    @property
    def firsts(self) -> Ints:
        """The first row of each group."""
        return self.rows[self.starts]

    def window(self, low: int, high: int) -> RowGroups:
        """Return the groups from `low` to before `high`."""
        ends = np.append(self.starts, len(self.rows))
        chosen = self.starts[low:high]
        if not len(chosen):
            return RowGroups(self.rows[:0], chosen)
        return RowGroups(self.rows[ends[low] : ends[min(high, self.size)]], chosen - ends[low])

    def merged(self, grid: Grid) -> Grid:
        """Return a grid with one column for each group: means by their counts, extremes as extremes."""
        if len(self.rows) == self.size or not self.size:
            return grid
        count = (~np.isnan(grid.mean)).astype(np.float64) if grid.number is None else grid.number.astype(np.float64)
        total = self._each(np.add, np.where(count > 0, np.nan_to_num(grid.mean).astype(np.float64) * count, 0.0))
        number = self._each(np.add, count)
        with np.errstate(invalid="ignore"):
            mean = np.where(number > 0, total / np.maximum(number, 1), np.nan).astype(np.float32)
        low, high = (grid.mean if part is None else part for part in (grid.low, grid.high))
        bad = None if grid.bad is None else self._each(np.logical_or, grid.bad)
        return Grid(mean, self._each(np.fmin, low), self._each(np.fmax, high), number.astype(np.float32), bad)

    def _each(self, fold: np.ufunc, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(fold.reduceat(part, self.starts, axis=1))


def row_groups(rows: Ints, triples: Sequence[Triple], query: Query) -> RowGroups:
    """Return rows in groups: those at or below one of the modules in `fold` (a JSON list) are one group."""
    folded = _folded(query.text("fold"))
    if not folded:
        return RowGroups(rows, np.arange(len(rows)))
    groups: dict[Any, list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(_module(triples[row][0], folded) or row, []).append(row)
    sizes = np.array([len(group) for group in groups.values()], np.int64)
    flat = np.array([row for group in groups.values() for row in group], np.int64)
    return RowGroups(flat, np.cumsum(sizes) - sizes)


def _module(path: str, folded: frozenset[str]) -> str:
    """Return the outermost collapsed module that a path lies in; empty when none."""
    ends = [i for i, letter in enumerate(path) if letter in "./"]
    return next((path[:end] for end in (*ends, len(path)) if path[:end] in folded), "")


def _folded(text: str) -> frozenset[str]:
    if not text:
        return frozenset()
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, list) or len(said) > _MOST or not all(isinstance(name, str) for name in said):
        raise RequestError(
            f"fold must be a JSON list of at most {_MOST} modules, got {text[:40]!r}", 'write fold=["blocks.0"]'
        )
    return frozenset(said)
