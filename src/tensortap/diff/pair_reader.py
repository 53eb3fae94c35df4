"""Read the records of chosen pairs, and the lists that are not read for all."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.diff.columns import Bools, Floats, histograms_that_differ, rows_that_differ
from tensortap.diff.elements import KeptElements, call_of, common_elements
from tensortap.diff.metrics import COMPARED
from tensortap.diff.pair import Pair
from tensortap.diff.records import compare_records, to_the_last_bit
from tensortap.diff.row_pairs import RowPairs, RunPair, SideRows
from tensortap.diff.tolerance import Tolerance
from tensortap.record.step import Record
from tensortap.reduce.statistics import NONFINITE
from tensortap.store.arrays import Ints, array_of, arrow_of
from tensortap.store.blocks import AT_ONCE, BlockSource, ahead, left_out, read_or_mark
from tensortap.store.queries import record_of
from tensortap.store.row_window import RowWindow
from tensortap.types import Place

T = TypeVar("T")
PairRows = npt.NDArray[np.void]
"""Where the records of pairs lie, what is known of the pairs, and the numbers that were read of both records."""
_FIELDS: Final = ("source_a", "row_a", "source_b", "row_b", "position", "rank", "site")
_STATISTICS: Final = tuple(name for name, _ in COMPARED)
_COUNTS: Final = ("call", "seq", "numel", *NONFINITE, "hash")
_HELD_TYPES: Final = dict.fromkeys(_COUNTS, np.int64) | {"hashed": np.bool_} | dict.fromkeys(_STATISTICS, np.float64)
_HELD: Final = np.dtype(list(_HELD_TYPES.items()))
_ROW: Final = np.dtype([*((name, np.int64) for name in _FIELDS), ("rtol", np.float64), ("a", _HELD), ("b", _HELD)])
_READERS: Final = 2
HISTOGRAM: Final = ("hist_offset", "hist_counts")
_WORDS: Final = ("phase", "dtype", "shape")  # columns that the row of a pair does not hold
_WITH_HISTOGRAM: Final = (*_WORDS, "step", *Place._fields, *_COUNTS, "zeros", *_STATISTICS, *HISTOGRAM)


def no_rows(count: int) -> PairRows:
    """Return room for as many rows."""
    return np.zeros(count, _ROW)


def rows_of(pairs: RowPairs, rtol: Floats, at: Any = slice(None)) -> PairRows:
    """Return where the records of pairs lie and the numbers that were read of them: of all, or of some."""
    a, b = pairs.a, pairs.b
    columns = (a.source, a.row, b.source, b.row, pairs.position, a.site, rtol)
    rows = no_rows(len(a.source[at]))
    rows["rank"] = pairs.rank
    for name, column in zip((*(name for name in _FIELDS if name != "rank"), "rtol"), columns, strict=True):
        rows[name] = column[at]
    for held, side in ((rows["a"], a), (rows["b"], b)):
        for name in _HELD_TYPES:
            held[name] = (side.columns[name] if name in side.columns else getattr(side, name))[at]
    return rows


class PairReader:
    """Read pairs of records from their files."""

    def __init__(self, runs: RunPair, kept: tuple[KeptElements, KeptElements], *, bitwise: bool) -> None:
        self._runs = runs
        self._kept = kept
        self._bitwise = bitwise
        self._elements = _kept_in_both(runs, *kept)

    def pairs(self, rows: PairRows, atol: float, *, histograms: bool = True) -> list[Pair]:
        """Return the pairs of some rows; without histograms their distances are not known."""
        records = self._read_records if histograms else self._held_records
        found = [records(side, rows) for side in (0, 1)]
        made = [
            self._compared(a, b, Tolerance(rtol, atol))
            for a, b, rtol in zip(*found, rows["rtol"].tolist(), strict=True)
        ]
        return [to_the_last_bit(pair) for pair in made] if self._bitwise else made

    def _compared(self, a: Record, b: Record, tolerance: Tolerance) -> Pair:
        shapes = a.summary.shape, b.summary.shape
        return compare_records(a, b, tolerance, common_elements(*self._kept, call_of(a), call_of(b), *shapes))

    def with_elements(self, pairs: RowPairs) -> list[int]:
        """Return which pairs have elements that both runs kept."""
        known = self._elements.get(pairs.rank, [])
        first, last = (bisect_left(known, (int(n),)) for n in (pairs.a.index.min(), pairs.a.index.max() + 1))
        if first == last:
            return []
        wanted = set(known[first:last])
        at = np.flatnonzero(np.isin(pairs.a.index, [index for index, _, _ in wanted]))
        keys = zip(*(part[at].tolist() for part in (pairs.a.index, pairs.a.site, pairs.a.call)), strict=True)
        return [i for i, key in zip(at.tolist(), keys, strict=True) if key in wanted]

    def rows_in_files(self, rows: PairRows) -> int:
        """Return how many rows the files hold in which some rows lie."""
        numbers = [np.unique(rows[f"source_{name}"]).tolist() for name in "ab"]
        return sum(self._runs.sources[side][number].rows for side in (0, 1) for number in numbers[side])

    def _read(self, side: int, source: BlockSource, read: Callable[[], Any]) -> Any:
        return read_or_mark(self._runs.snapshots[side], source, read)

    def _read_records(self, side: int, rows: PairRows) -> list[Record]:
        """Return the records of one side with their histograms."""
        return self._taken(side, rows, _WITH_HISTOGRAM, record_of)

    def _held_records(self, side: int, rows: PairRows) -> list[Record]:
        """Return the records of one side from the numbers that the rows hold; only words are read from the files."""
        words, held = self._taken(side, rows, _WORDS, dict), rows["ab"[side]]
        numbers = zip(*(held[name].tolist() for name in _HELD_TYPES), strict=True)
        known = [cells | dict(zip(_HELD_TYPES, row, strict=True)) for cells, row in zip(words, numbers, strict=True)]
        for cells, index, site in zip(known, (rows["position"] >> 32).tolist(), rows["site"].tolist(), strict=True):
            cells |= self._runs.places[site][side]._asdict()
            cells |= {"step": self._runs.both[index][side].step, "hash": cells["hash"] if cells["hashed"] else None}
        return [record_of(cells) for cells in known]

    def _taken(self, side: int, rows: PairRows, columns: Sequence[str], make: Callable[[dict[str, Any]], T]) -> list[T]:
        """Return the results of `make` for columns of the rows of one side; each file is read once."""
        source, row = rows[f"source_{'ab'[side]}"], rows[f"row_{'ab'[side]}"]
        known = np.unique(source).tolist()
        wanted = [np.unique(row[source == number]) for number in known]
        files = [self._runs.sources[side][number] for number in known]
        with ThreadPoolExecutor(_READERS, "tensortap-diff") as pool:
            read = lambda file, at: self._read(side, file, lambda: file.take(at, columns))  # noqa: E731
            tables = list(pool.map(read, files, wanted))
        _raise_if_missing(tables, files)
        made = {
            (number, at): make(cells)
            for number, numbers, table in zip(known, wanted, tables, strict=True)
            for at, cells in zip(numbers.tolist(), _rows_in(table), strict=True)
        }
        return [made[key] for key in zip(source.tolist(), row.tolist(), strict=True)]


def _rows_in(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, with few Python objects in memory at once."""
    return (row for batch in table.to_batches(max_chunksize=AT_ONCE) for row in batch.to_pylist())


def _kept_in_both(runs: RunPair, a: KeptElements, b: KeptElements) -> dict[int, list[tuple[int, ...]]]:
    """Return the pairs with elements kept in both runs: by rank, step, site and call as numbers, in order."""
    steps = {(phase, at.step): i for i, (at, _) in enumerate(runs.both) for phase in ("", at.phase)}
    sites = {place: i for i, (place, _) in enumerate(runs.places)}
    found: dict[int, list[tuple[int, ...]]] = {}
    for step, rank, place, call, phase in a.calls():
        index, site = steps.get((phase, step)), sites.get(place)
        if index is None or site is None:
            continue
        other = runs.both[index][1]
        if b.best((other.step, rank, runs.places[site][1], call, other.phase)) is not None:
            found.setdefault(rank, []).append((index, site, call))
    return {rank: sorted(calls) for rank, calls in found.items()}


class ListReader:
    """Compare the lists of rows, histograms and shapes, some thousand rows of both runs at a time."""

    def __init__(self, runs: RunPair) -> None:
        self._runs = runs
        names = {source.name: i for i, source in enumerate(runs.sources[0])} if runs.same_folder else {}
        self._number_in_a = np.array([names.get(source.name, -1) for source in runs.sources[1]], np.int64)
        self._windows: list[tuple[Any, RowWindow | None]] = [(None, None), (None, None)]  # the last file of each side

    def same_rows(self, pairs: RowPairs) -> Bools:
        """Return which pairs are the same row of the same file."""
        same: Bools = (self._number_in_a[pairs.b.source] == pairs.a.source) & (pairs.a.row == pairs.b.row)
        return same

    def histograms_differ(self, pairs: RowPairs, at: Ints) -> Bools:
        """Return which of some pairs have other histograms."""
        return self._compared(pairs, at, HISTOGRAM, _other_histograms)

    def shapes_differ(self, pairs: RowPairs, at: Ints) -> Bools:
        """Return which of some pairs have other shapes."""
        return self._compared(pairs, at, ("shape",), _other_shapes)

    def _compared(
        self, pairs: RowPairs, at: Ints, columns: Sequence[str], differ: Callable[[Any, Any], Bools]
    ) -> Bools:
        """Return which of some pairs differ: each side is read by a thread of its own, ahead of the comparison."""
        differs, parts = np.zeros(len(at), bool), list(_parts(pairs, at))
        with ThreadPoolExecutor(1, "tensortap-diff") as of_a, ThreadPoolExecutor(1, "tensortap-diff") as of_b:
            tables = [
                ahead(pool, functools.partial(self._rows, side, rows, columns), [at[part] for part in parts], 2)
                for side, (pool, rows) in enumerate(((of_a, pairs.a), (of_b, pairs.b)))
            ]
            for part, a, b in zip(parts, *tables, strict=True):
                differs[part] = differ(a, b)
        return differs

    def _rows(self, side: int, rows: SideRows, columns: Sequence[str], at: Ints) -> Any:
        """Return columns of some rows of one file, in their order."""
        row, number = rows.row[at], int(rows.source[at[0]])
        source = self._runs.sources[side][number]
        key, window = self._windows[side]
        if window is None or key != (number, columns):
            window = RowWindow(self._runs.snapshots[side], source, columns)
            self._windows[side] = (number, columns), window
        low, high = int(row.min()), int(row.max()) + 1
        table = read_or_mark(self._runs.snapshots[side], source, functools.partial(window.rows, low, high))
        _raise_if_missing([table], [source])
        whole = len(row) == high - low and bool((np.diff(row) == 1).all())
        return table if whole else table.take(arrow_of(row - low))


def _parts(pairs: RowPairs, at: Ints) -> Iterator[Ints]:
    """Yield which of some pairs are compared at once: of one file on either side, and lying near each other in both.

    Where the files have their rows in another order, as one that was compacted has, all pairs of both are one part.
    """
    files = pairs.a.source[at] * (int(pairs.b.source.max(initial=0)) + 1) + pairs.b.source[at]
    for number in np.unique(files).tolist():
        own = np.flatnonzero(files == number)
        own = own[np.argsort(pairs.a.row[at[own]], kind="stable")]
        a, b = pairs.a.row[at[own]], pairs.b.row[at[own]]
        if (np.diff(b) < 0).any():
            yield own
        else:
            yield from np.split(own, np.flatnonzero(np.diff(a // AT_ONCE)) + 1)


def _other_histograms(a: Any, b: Any) -> Bools:
    offsets = [array_of(table["hist_offset"]) for table in (a, b)]
    counts = [_one_array(table["hist_counts"]) for table in (a, b)]
    return histograms_that_differ(offsets[0], counts[0], offsets[1], counts[1])


def _other_shapes(a: Any, b: Any) -> Bools:
    return rows_that_differ(*(_one_array(table["shape"]) for table in (a, b)))


def _raise_if_missing(tables: Sequence[Any], files: Sequence[BlockSource]) -> None:
    for table, source in zip(tables, files, strict=True):
        if table is None:
            raise left_out(source)


def _one_array(column: Any) -> Any:
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
