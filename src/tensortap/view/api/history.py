"""Every place's history of one statistic, binned: read file by file, put together, and remembered in tiles.

Level 0 is what the files hold, one grid a file. Above it, whenever bins have become eight times as large, tiles of some
hundred bins are kept, so that a long run is read once and a zoom puts together a few tiles.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from tensortap.store.catalog import Outline
from tensortap.view.api.arrays import array_of
from tensortap.view.api.bins import Bins
from tensortap.view.api.block import Block, segment_block, tail_block
from tensortap.view.api.cache import Cache
from tensortap.view.api.grid import Canvas, Grid, Ints
from tensortap.view.api.seen import Seen, Watched
from tensortap.view.api.stats import Stat

ANCHOR: Final = 3  # tiles are kept at levels 3, 6, 9, …
_TILE_CELLS: Final = 1 << 20
_TILE_BINS: Final = (16, 256)
THREADS: Final = max(2, min(4, os.cpu_count() or 2))
T = TypeVar("T")
S = TypeVar("S")


class Source(NamedTuple):
    """A file that holds records: a segment by name and outline, or a tail by path and table."""

    key: tuple[Any, ...]
    first: int
    last: int
    read: Callable[[Stat], Block | None]


class History:
    """The histories of one run's places.

    Memory is bounded: by the cache, plus what is being put together, which is at most a tile and a few files a thread.
    """

    def __init__(self, watched: Watched, cache: Cache, pool: ThreadPoolExecutor) -> None:
        self.watched = watched
        self._cache = cache
        self._pool = pool

    def kept(self, key: tuple[Any, ...], make: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """Something worked out of this run, remembered beside its grids."""
        return self._cache.get((self.watched.run.path, *key), make, nbytes)

    def grid(self, seen: Seen, stat: Stat, bins: Bins, rows: Ints | None = None) -> Grid:
        """Bins × the chosen rows, or all: the page asks for as many as it shows."""
        canvas = Canvas(bins.size, len(seen.row), rows)
        if bins.size:
            self._fill(canvas, seen, stat, bins)
        return canvas.grid

    def _fill(self, canvas: Canvas, seen: Seen, stat: Stat, bins: Bins) -> None:
        """Put onto a canvas what lies below: tiles of the next kept level, or files."""
        below = (bins.level // ANCHOR) * ANCHOR
        if below == 0:
            self._from_files(canvas, seen, stat, bins)
            return
        size = _tile_bins(len(seen.row))
        low, high = bins.first << (bins.level - below), bins.last << (bins.level - below)
        high = min(high, ((len(seen.steps) - 1) >> below) + 1)
        for number in range(low // size, (high - 1) // size + 1):
            tile = Bins(below, max(number * size, low), min((number + 1) * size, high))
            grid = self._tile(seen, stat, below, number, size)
            inside = slice(tile.first - number * size, tile.last - number * size)
            at = np.arange(tile.first, tile.last) >> (bins.level - below)
            canvas.put(grid.each(itemgetter(inside)), at - bins.first, np.arange(len(seen.row)))

    def _tile(self, seen: Seen, stat: Stat, level: int, number: int, size: int) -> Grid:
        last = min((number + 1) * size, ((len(seen.steps) - 1) >> level) + 1)
        bins = Bins(level, number * size, last)
        low, high = bins.steps(len(seen.steps))
        sources = [source.key for source in _overlapping(self._sources(seen), seen.steps[low], seen.steps[high - 1])]
        key = ("tile", stat.name, bins, low, high, seen.rows_key, tuple(sources))
        return self.kept(key, lambda: self._make_tile(seen, stat, bins), lambda grid: grid.nbytes)

    def _make_tile(self, seen: Seen, stat: Stat, bins: Bins) -> Grid:
        canvas = Canvas(bins.size, len(seen.row))
        if bins.level == ANCHOR:
            self._from_files(canvas, seen, stat, bins)
        else:
            self._from_finer(canvas, seen, stat, bins)
        return canvas.grid

    def _from_finer(self, canvas: Canvas, seen: Seen, stat: Stat, bins: Bins) -> None:
        finer = Bins(
            bins.level - 1, bins.first << 1, min(bins.last << 1, ((len(seen.steps) - 1) >> (bins.level - 1)) + 1)
        )
        at = (np.arange(finer.first, finer.last) >> 1) - bins.first
        canvas.put(self.grid(seen, stat, finer), at, np.arange(len(seen.row)))

    def _from_files(self, canvas: Canvas, seen: Seen, stat: Stat, bins: Bins) -> None:
        low, high = bins.steps(len(seen.steps))
        found = _overlapping(self._sources(seen), seen.steps[low], seen.steps[high - 1])
        for block in ahead(self._pool, lambda source: self._block(source, stat), found):
            if block is not None:
                _place(canvas, block, seen, bins)

    def _block(self, source: Source, stat: Stat) -> Block | None:
        key = ("block", stat.name, *source.key)
        return self.kept(key, lambda: source.read(stat), lambda block: block.nbytes if block else 64)

    def _sources(self, seen: Seen) -> Iterator[Source]:
        for sources in seen.sources:
            for name, outline in sources.segments.items():
                if outline.steps:
                    spans = [step for run in outline.steps for step in run[:2]]
                    yield Source((name,), min(spans), max(spans), self._segment(name, outline))
        for path, table in seen.tails.items():
            yield _tail_source(path, table)

    def _segment(self, name: str, outline: Outline) -> Callable[[Stat], Block | None]:
        def read(stat: Stat) -> Block | None:
            try:
                return segment_block(self.watched.run.files, name, outline, stat)
            except FileNotFoundError:
                raise
            except (OSError, pa.ArrowException):
                self.watched.spoil(name)
                return None

        return read


def _tail_source(path: Path, table: Any) -> Source:
    steps = array_of(table["step"])
    return Source((str(path), len(table)), int(steps.min()), int(steps.max()), lambda stat: tail_block(table, stat))


def _overlapping(sources: Iterable[Source], first: int, last: int) -> list[Source]:
    return [source for source in sources if source.first <= last and source.last >= first]


def _place(canvas: Canvas, block: Block, seen: Seen, bins: Bins) -> None:
    """Bin a file's grid, and put it where it belongs."""
    at = np.searchsorted(seen.steps, block.steps) >> bins.level
    low, high = np.searchsorted(at, [bins.first, bins.last])
    if low < high:
        part = block.grid.each(itemgetter(slice(low, high)))
        canvas.put(part, at[low:high] - bins.first, seen.rows_of(block.places))


def _tile_bins(rows: int) -> int:
    """How many bins a tile has: fewer when there are very many places, so that a tile stays of a size."""
    least, most = _TILE_BINS
    return max(least, min(most, 1 << (_TILE_CELLS // max(rows, 1)).bit_length() >> 1))


def ahead(pool: ThreadPoolExecutor, work: Callable[[S], T], items: Iterable[S], most: int = 2 * THREADS) -> Iterator[T]:
    """The results in order, a few being made while one is used: never more than that are in memory."""
    waiting: deque[Future[T]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
