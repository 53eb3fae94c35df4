"""Read one file of a run as a grid of one statistic: only the columns it takes.

A column that is "all zero" by the footer (no NaN, nothing recomputed) is known without reading it, and in a folded
segment, which is sorted by place, the footer tells which rows are whose.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tensortap.reduce.statistics import NONFINITE, STATISTICS
from tensortap.store.arrays import array_of
from tensortap.store.blocks import places_in
from tensortap.store.catalog import Outline, expanded
from tensortap.store.files import Files
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.view.api.grid import Grid, Ints, as_floats, scattered
from tensortap.view.api.stats import Stat

_WORDS: Final = ("site", "port", "slot")
_TOGETHER: Final = 256  # steps of short files that are put into bins at once


class ColumnPlaces:
    """The places of a grid's columns. Compared by identity, so that what is worked out for one is kept for it."""

    def __init__(self, triples: Sequence[Triple]) -> None:
        self.triples = tuple(triples)
        self._rows: weakref.WeakKeyDictionary[Snapshot, Ints] = weakref.WeakKeyDictionary()

    def rows_in(self, snapshot: Snapshot) -> Ints:
        """Return the row of each column in a run's grid; −1 where the run has no such place."""
        if snapshot not in self._rows:
            self._rows[snapshot] = np.array([snapshot.rows.get(triple, -1) for triple in self.triples], np.int64)
        return self._rows[snapshot]


class FileGrid(NamedTuple):
    """A statistic of one file: its steps × its places."""

    places: ColumnPlaces
    steps: Ints
    grid: Grid

    @property
    def nbytes(self) -> int:
        """How much room it takes."""
        return self.grid.nbytes + self.steps.nbytes + 64 * len(self.places.triples)


def joined(grids: Iterable[FileGrid | None]) -> Iterator[FileGrid]:
    """Yield grids, and those of short files that follow each other as one: fewer bins lie in two of them."""
    waiting: list[FileGrid] = []
    for grid in grids:
        if grid is None:
            continue
        if waiting and not (_follows(grid, waiting[-1]) and sum(len(one.steps) for one in waiting) < _TOGETHER):
            yield _concatenated(waiting)
            waiting = []
        waiting.append(grid)
    if waiting:
        yield _concatenated(waiting)


def _follows(grid: FileGrid, before: FileGrid) -> bool:
    plain = all(one.grid.number is None and one.grid.bad is None for one in (grid, before))
    return plain and grid.places is before.places and bool(grid.steps[0] > before.steps[-1])


def _concatenated(grids: list[FileGrid]) -> FileGrid:
    if len(grids) == 1:
        return grids[0]
    mean = np.concatenate([one.grid.mean for one in grids])
    return FileGrid(grids[0].places, np.concatenate([one.steps for one in grids]), Grid(mean))


class FileCells(NamedTuple):
    """Where the rows of one file lie in its grid, the same for every statistic: worked out once.

    `cell` is step × places + place, None where each row is the next cell, step by step or `by_place`; `counted` are the
    rows that count, None: all. `order` tells which place of a file that is sorted by place each column is, None: the
    same. Columns in order of execution are put onto a run's grid side by side, which is much faster than one by one.
    """

    places: ColumnPlaces
    steps: Ints
    cell: npt.NDArray[np.int32] | None
    counted: Ints | None
    total: int
    by_place: bool = False
    order: Ints | None = None

    @property
    def nbytes(self) -> int:
        """How much room it takes."""
        return self.steps.nbytes + sum(part.nbytes for part in (self.cell, self.counted) if part is not None) + 64

    @property
    def shape(self) -> tuple[int, int]:
        """How many steps and places there are."""
        return len(self.steps), len(self.places.triples)

    def numbers(self) -> Ints:
        """Return the cell of each row."""
        if self.cell is not None:
            return self.cell.astype(np.int64)
        cells = _every_cell(self.shape, self.by_place)
        return (cells if self.order is None else cells[np.argsort(self.order)]).reshape(-1)

    def grid(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values, which are in the order of cells, as steps × places."""
        steps, places = self.shape
        if not self.by_place:
            return values.reshape(self.shape)
        by_place = values.reshape(places, steps)
        return np.ascontiguousarray((by_place if self.order is None else by_place[self.order]).T)


def _every_cell(shape: tuple[int, int], by_place: bool) -> Ints:
    cells: Ints = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape)
    return cells.T if by_place else cells


class FileColumns(NamedTuple):
    """Columns as they were read; those that are missing are zero everywhere."""

    columns: Any
    total: int

    def number(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers."""
        if name not in self.columns.column_names:
            return np.full(self.total, np.nan) if name in STATISTICS else np.zeros(self.total, np.int64)
        return array_of(self.columns[name])


def segment_cells(
    files: Files, name: str, outline: Outline, steps: Ints | None = None, phase: str = ""
) -> FileCells | None:  # fmt: skip
    """Return where the rows of a sealed segment lie; None when it has none.

    With a phase only its rows count, and `steps` are the steps that it has in this segment.
    """
    steps = expanded(outline.steps) if steps is None else steps
    if not outline.rows or not len(steps):
        return None
    mixed = phase if len(outline.phases) > 1 else ""
    ordered = _ordered(outline)
    if ordered and not mixed and (known := _cells_from_outline(outline, ordered[0], steps)) is not None:
        return known
    with _opened(files, name) as file:
        wanted = ["step", "recomputed", *(() if ordered else _WORDS), *(["phase"] if mixed else ())]
        table = file.read([name for name in wanted if name not in outline.zero], use_threads=False)
    places, place = (ordered[0], ordered[1]()) if ordered else _places(table)
    keep = pc.equal(table["phase"], phase) if mixed else None
    return _cells(table, places, place, steps, None if keep is None else array_of(keep))


def segment_grid(files: Files, name: str, outline: Outline, cells: FileCells, stat: Stat) -> FileGrid | None:
    """Return one statistic of a sealed segment; None when it has no record that the statistic is about."""
    if not _any_port(outline, stat):
        return None
    with _opened(files, name) as file:
        bad = [name for name in NONFINITE if name not in outline.zero]
        wanted = [*stat.columns, *bad, *(["numbers"] if stat.number else [])]
        table = file.read(list(dict.fromkeys(wanted)), use_threads=False)
    return _grid(FileColumns(table, cells.total), cells, stat)


def tail_grid(table: Any, stat: Stat) -> FileGrid | None:
    """Return the rows of a tail, as `read_tail` gives them."""
    places, place = _places(table)
    cells = _cells(table, places, place, np.unique(array_of(table["step"])), None)
    return _grid(FileColumns(table, len(table)), cells, stat)


def _opened(files: Files, name: str) -> Any:
    return pq.ParquetFile(_source(files, name), read_dictionary=list(_WORDS), page_checksum_verification=True)


def _source(files: Files, name: str) -> Any:
    return files.path(name) if files.local is not None else files.open(name)


def _any_port(outline: Outline, stat: Stat) -> bool:
    return bool(outline.rows) and (not stat.ports or any(place[1] in stat.ports for place in outline.places))


def _ordered(outline: Outline) -> tuple[ColumnPlaces, Callable[[], Ints]] | None:
    """Return which rows are whose where the footer tells: every step has the same, or it is sorted by place."""
    if outline.order:
        places = _places_in_order(ByIdentity(outline.places), outline.order)
        if places is None:
            return None
        width, count = len(places.triples), outline.rows // len(outline.order)
        return places, lambda: np.tile(np.arange(width), count)
    if not outline.replaces:
        return None
    places, counts = _sorted_places(ByIdentity(outline.places))
    return (places, lambda: np.repeat(np.arange(len(counts)), counts)) if counts.sum() == outline.rows else None


def _cells_from_outline(outline: Outline, places: ColumnPlaces, steps: Ints) -> FileCells | None:
    """Return where the rows lie, where the footer tells even that: each row is the next cell, and all count."""
    told = (outline.order or outline.by_place) and "recomputed" in outline.zero
    if not told or len(steps) * len(places.triples) != outline.rows:
        return None
    if outline.order:
        return FileCells(places, steps, None, None, outline.rows)
    columns, order = _executed_places(ByIdentity(outline.places))
    return FileCells(columns, steps, None, None, outline.rows, by_place=True, order=order)


class ByIdentity(NamedTuple):
    """A list by identity: segments of one run mostly share theirs."""

    places: list[tuple[str, str, str, str, int, int]]

    def __hash__(self) -> int:
        return id(self.places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.places is other.places


@functools.lru_cache(maxsize=64)
def _places_in_order(same: ByIdentity, order: tuple[int, ...]) -> ColumnPlaces | None:
    """Return the places of a step's rows; None where two operations share one."""
    triples = [same.places[i][:3] for i in order]
    return ColumnPlaces(triples) if len(set(triples)) == len(triples) else None


@functools.lru_cache(maxsize=64)
def _sorted_places(same: ByIdentity) -> tuple[ColumnPlaces, Ints]:
    counts: dict[Triple, int] = {}
    for site, port, slot, _, _, count in same.places:
        counts[site, port, slot] = counts.get((site, port, slot), 0) + count
    triples = sorted(counts)
    return ColumnPlaces(triples), np.array([counts[triple] for triple in triples], np.int64)


@functools.lru_cache(maxsize=64)
def _executed_places(same: ByIdentity) -> tuple[ColumnPlaces, Ints]:
    """Return the places in order of execution, and which place each is of a file that is sorted by place."""
    by_seq = sorted(same.places, key=lambda place: (place[4], *place[:4]))
    triples = list(dict.fromkeys((site, port, slot) for site, port, slot, *_ in by_seq))
    at = {triple: i for i, triple in enumerate(_sorted_places(same)[0].triples)}
    return ColumnPlaces(triples), np.array([at[triple] for triple in triples], np.int64)


def _places(table: Any) -> tuple[ColumnPlaces, Ints]:
    """Return the places of rows, from their words."""
    places, place = places_in(table, _WORDS)
    return _columns_of(places), place


@functools.lru_cache(maxsize=64)
def _columns_of(places: tuple[tuple[str, ...], ...]) -> ColumnPlaces:
    """Return the places of a grid: the same object for files that hold the same places."""
    return ColumnPlaces([(site, port, slot) for site, port, slot in places])


def _cells(
    table: Any, places: ColumnPlaces, place: Ints, steps: Ints, keep: npt.NDArray[np.bool_] | None
) -> FileCells:  # fmt: skip
    step, width = array_of(table["step"]), len(places.triples)
    at = np.searchsorted(steps, step) if steps[-1] - steps[0] >= len(steps) else step - steps[0]
    cell = at * width + place
    if keep is None or keep.all():
        keep = None
    if "recomputed" in table.column_names:
        once = ~array_of(table["recomputed"]).astype(bool)
        keep = once if keep is None else keep & once
    counted = None if keep is None else np.flatnonzero(keep)
    cell = cell if counted is None else cell[counted]
    if len(cell) and not 0 <= cell.min() <= cell.max() < len(steps) * width:
        raise ValueError("it has rows of other steps than its footer says")
    for by_place in (False, True) if len(cell) == len(steps) * width else ():
        every = _every_cell((len(steps), width), by_place)
        if (cell.reshape(every.shape) == every).all():
            return FileCells(places, steps, None, counted, len(table), by_place)
    return FileCells(places, steps, cell.astype(np.int32), counted, len(table))


def _grid(rows: FileColumns, cells: FileCells, stat: Stat) -> FileGrid | None:
    values = stat.of({name: rows.number(name) for name in stat.columns} | _numbers(rows, stat))
    bad = _bad(rows)
    if cells.counted is not None:
        values, bad = values[cells.counted], None if bad is None else bad[cells.counted]
    if cells.cell is None and not stat.ports:
        return FileGrid(cells.places, cells.steps, _as_grid(values, bad, cells)) if len(values) else None
    cell = cells.numbers()
    if stat.ports:
        right = np.array([port in stat.ports for _, port, _ in cells.places.triples], bool)[cell % cells.shape[1]]
        cell, values, bad = cell[right], values[right], None if bad is None else bad[right]
    if not len(values):
        return None
    return FileGrid(cells.places, cells.steps, scattered(cell, values, bad, cells.shape))


def _as_grid(values: npt.NDArray[Any], bad: npt.NDArray[np.bool_] | None, cells: FileCells) -> Grid:
    """Return records that are in the order of cells."""
    marks = None if bad is None or not bad.any() else cells.grid(bad)
    return Grid(cells.grid(as_floats(values)), bad=marks)


def _bad(rows: FileColumns) -> npt.NDArray[np.bool_] | None:
    """Return which rows have something that is not finite; None: none has."""
    read = [rows.number(name) for name in NONFINITE if name in rows.columns.column_names]
    return np.any([count > 0 for count in read], axis=0) if read else None


def _numbers(rows: FileColumns, stat: Stat) -> dict[str, npt.NDArray[Any]]:
    """Return a number that a reducer gave under a name; NaN where it gave none."""
    if not stat.number:
        return {}
    found = pc.map_lookup(rows.columns["numbers"], pa.scalar(stat.number), "first")
    return {stat.number: array_of(found)}
