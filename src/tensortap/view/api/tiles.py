"""Read every place's history of one statistic in bins, file by file, and remember it in tiles.

Level 0 is what the files hold, one grid a file. Above it, whenever bins have become eight times as large, tiles of some
hundred bins are kept, so that a long run is read once and a zoom puts together a few tiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa

from tensortap.store.arrays import array_of
from tensortap.store.blocks import ahead
from tensortap.store.catalog import Outline
from tensortap.store.snapshot import Snapshot
from tensortap.view.api.bins import StepBins
from tensortap.view.api.cache import SizedCache
from tensortap.view.api.file_grid import FileCells, FileGrid, joined, segment_cells, segment_grid, tail_grid
from tensortap.view.api.grid import Canvas, Grid, Ints
from tensortap.view.api.stats import Stat

ANCHOR: Final = 3  # tiles are kept at levels 3, 6, 9, …
_TILE_CELLS: Final = 1 << 20
_TILE_BINS: Final = (16, 256)
THREADS: Final = max(2, min(4, os.cpu_count() or 2))
_CELL_BYTES: Final = 4
LOOKED_AT: Final = 4  # statistics whose grids, a number for each record, may lie in memory beside the tiles
T = TypeVar("T")
P = ParamSpec("P")


class GridSource(NamedTuple):
    """A file that holds records: a segment by name and outline, or a tail by path and table.

    `cells` tells where its rows lie, which is remembered for all statistics; None where there is nothing to remember.
    """

    key: tuple[Any, ...]
    first: int
    last: int
    cells: Callable[[], FileCells | None]
    read: Callable[[FileCells | None, Stat], FileGrid | None]


class TiledGrids:
    """The histories of one run's places.

    Memory is bounded: by the cache, plus what is being put together, which is at most a tile and a few files a thread.
    """

    def __init__(self, cache: SizedCache, pool: ThreadPoolExecutor, statistics: int = LOOKED_AT) -> None:
        self._cache = cache
        self._pool = pool
        self._statistics = statistics
        self._listed: tuple[Snapshot | None, list[GridSource]] = None, []

    def kept(self, snapshot: Snapshot, key: tuple[Any, ...], make: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """Return something computed from this run, remembered beside its grids."""
        return self._cache.get(_cache_key(snapshot, key), make, nbytes)

    def grid(self, snapshot: Snapshot, stat: Stat, bins: StepBins, rows: Ints | None = None) -> Grid:
        """Return the grid of bins × the chosen rows, or all rows: the page asks for as many as it shows."""
        canvas = Canvas(bins.size, len(snapshot.rows), rows)
        if bins.size:
            self._fill(canvas, snapshot, stat, bins)
        return canvas.grid

    def _fill(self, canvas: Canvas, snapshot: Snapshot, stat: Stat, bins: StepBins) -> None:
        """Put onto a canvas what lies below: tiles of the next kept level, or files."""
        below = (bins.level // ANCHOR) * ANCHOR
        if below == 0:
            self._from_files(canvas, snapshot, stat, bins)
            return
        size = _tile_bins(len(snapshot.rows))
        low, high = bins.first << (bins.level - below), bins.last << (bins.level - below)
        high = min(high, ((len(snapshot.steps) - 1) >> below) + 1)
        for number in range(low // size, (high - 1) // size + 1):
            tile = StepBins(below, max(number * size, low), min((number + 1) * size, high))
            grid = self._tile(snapshot, stat, below, number, size)
            inside = slice(tile.first - number * size, tile.last - number * size)
            at = np.arange(tile.first, tile.last) >> (bins.level - below)
            canvas.put(grid.each(itemgetter(inside)), at - bins.first, np.arange(len(snapshot.rows)))

    def _tile(self, snapshot: Snapshot, stat: Stat, level: int, number: int, size: int) -> Grid:
        last = min((number + 1) * size, ((len(snapshot.steps) - 1) >> level) + 1)
        bins = StepBins(level, number * size, last)
        low, high = bins.steps(len(snapshot.steps))
        sources = [source.key for source in self._overlapping(snapshot, low, high)]
        key = ("tile", stat.name, bins, low, high, hash(tuple(snapshot.rows)), tuple(sources))
        return self.kept(snapshot, key, lambda: self._make_tile(snapshot, stat, bins), lambda grid: grid.nbytes)

    def _make_tile(self, snapshot: Snapshot, stat: Stat, bins: StepBins) -> Grid:
        canvas = Canvas(bins.size, len(snapshot.rows))
        if bins.level == ANCHOR:
            self._from_files(canvas, snapshot, stat, bins)
        else:
            self._from_finer(canvas, snapshot, stat, bins)
        return canvas.grid

    def _from_finer(self, canvas: Canvas, snapshot: Snapshot, stat: Stat, bins: StepBins) -> None:
        finer = StepBins(
            bins.level - 1, bins.first << 1, min(bins.last << 1, ((len(snapshot.steps) - 1) >> (bins.level - 1)) + 1)
        )
        at = (np.arange(finer.first, finer.last) >> 1) - bins.first
        canvas.put(self.grid(snapshot, stat, finer), at, np.arange(len(snapshot.rows)))

    def _from_files(self, canvas: Canvas, snapshot: Snapshot, stat: Stat, bins: StepBins) -> None:
        low, high = bins.steps(len(snapshot.steps))
        found = self._overlapping(snapshot, low, high)
        for grid in joined(self._file_grids(snapshot, found, stat)):
            _place(canvas, grid, snapshot, bins)

    def _overlapping(self, snapshot: Snapshot, low: int, high: int) -> list[GridSource]:
        """Return the files that may have records of the steps from the `low`-th to before the `high`-th."""
        known, listed = self._listed
        if known is not snapshot:
            listed = list(_sources(snapshot))
            self._listed = snapshot, listed
        first, last = snapshot.steps[low], snapshot.steps[high - 1]
        return [source for source in listed if source.first <= last and source.last >= first]

    def _file_grids(self, snapshot: Snapshot, found: list[GridSource], stat: Stat) -> Iterable[FileGrid | None]:
        """Return the grids of files in order, read by several threads unless all are known: a zoom waits for none."""
        read = lambda source: self._file_grid(snapshot, source, stat)  # noqa: E731
        if all(self._cache.has(_cache_key(snapshot, _file_key(stat, source))) for source in found):
            return map(read, found)
        return ahead(self._pool, read, found, 2 * THREADS)

    def _file_grid(self, snapshot: Snapshot, source: GridSource, stat: Stat) -> FileGrid | None:
        def read() -> FileGrid | None:
            cells = self.kept(snapshot, ("cells", *source.key), source.cells, _size)
            return source.read(cells, stat)

        if snapshot.record_count * _CELL_BYTES > self._cache.limit // self._statistics:
            return read()  # kept, the grids of some statistics would push the tiles out that are made of them
        return self.kept(snapshot, _file_key(stat, source), read, _size)


def _cache_key(snapshot: Snapshot, key: tuple[Any, ...]) -> tuple[Any, ...]:
    return (str(snapshot.files), snapshot.phase, *key)


def _file_key(stat: Stat, source: GridSource) -> tuple[Any, ...]:
    return ("file", stat.name, *source.key)


def _sources(snapshot: Snapshot) -> Iterator[GridSource]:
    for files in snapshot.records:
        for name, outline in files.segments.items():
            if outline.steps:
                yield _segment_source(snapshot, name, outline)
    for path, table in snapshot.tails.items():
        yield _tail_source(path, table)


def _steps(snapshot: Snapshot, name: str, outline: Outline) -> Ints:
    """Return the steps of the snapshot's phase that a segment holds."""
    return snapshot.catalog.steps_by_phase(name, outline).get(snapshot.phase, np.zeros(0, np.int64))


def _segment_source(snapshot: Snapshot, name: str, outline: Outline) -> GridSource:
    spans = [step for found in outline.steps for step in found[:2]]

    def cells() -> FileCells | None:
        steps = _steps(snapshot, name, outline) if snapshot.phase else None
        return segment_cells(snapshot.files, name, outline, steps, snapshot.phase)

    def grid(known: FileCells | None, stat: Stat) -> FileGrid | None:
        return None if known is None else segment_grid(snapshot.files, name, outline, known, stat)

    return GridSource(
        (name,), min(spans), max(spans), _or_marked(snapshot, name, cells), _or_marked(snapshot, name, grid)
    )


def _or_marked(snapshot: Snapshot, name: str, read: Callable[P, T | None]) -> Callable[P, T | None]:
    """Return the same function, which marks a damaged file and gives None then."""

    def careful(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return read(*args, **kwargs)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:  # its footer may say what is not so
            snapshot.catalog.mark_damaged(name, error)
            return None

    return careful


def _tail_source(path: Path, table: Any) -> GridSource:
    steps = array_of(table["step"])
    read = lambda _, stat: tail_grid(table, stat)  # noqa: E731
    return GridSource((str(path), len(table)), int(steps.min()), int(steps.max()), lambda: None, read)


def _size(made: FileGrid | FileCells | None) -> int:
    return 64 if made is None else made.nbytes


def _place(canvas: Canvas, grid: FileGrid, snapshot: Snapshot, bins: StepBins) -> None:
    """Bin a file's grid, and put it where it belongs."""
    at = np.searchsorted(snapshot.steps, grid.steps) >> bins.level
    low, high = np.searchsorted(at, [bins.first, bins.last])
    if low < high:
        part = grid.grid.each(itemgetter(slice(low, high)))
        canvas.put(part, at[low:high] - bins.first, grid.places.rows_in(snapshot))


def _tile_bins(rows: int) -> int:
    """Return how many bins a tile has: fewer when there are very many places, so that a tile stays of a size."""
    least, most = _TILE_BINS
    return max(least, min(most, 1 << (_TILE_CELLS // max(rows, 1)).bit_length() >> 1))
