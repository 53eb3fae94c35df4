"""Read the records of chosen pairs, and the lists that are not read for all."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.diff.columns import Bools, Floats, histograms_that_differ, rows_that_differ
from tensortap.diff.elements import KeptElements, call_of, common_elements
from tensortap.diff.pair import Pair
from tensortap.diff.records import compare_records, to_the_last_bit
from tensortap.diff.row_pairs import RowPairs, RunPair, SideRows
from tensortap.diff.tolerance import Tolerance
from tensortap.record.step import Record
from tensortap.store.blocks import AT_ONCE, BlockSource, Ints, ahead, array_of, arrow_of, left_out, read_or_mark
from tensortap.store.catalog import PLAIN_RECORDS
from tensortap.store.queries import records_in
from tensortap.store.row_window import RowWindow

PairRows = npt.NDArray[np.void]
"""Where the records of pairs lie, and what is known of the pairs: the fields below."""
_FIELDS: Final = ("source_a", "row_a", "source_b", "row_b", "position", "rank", "site")
_ROW: Final = np.dtype([*((name, np.int64) for name in _FIELDS), ("rtol", np.float64)])
_READERS: Final = 2
HISTOGRAM: Final = ("hist_offset", "hist_counts")


def no_rows(count: int) -> PairRows:
    """Return room for as many rows."""
    return np.zeros(count, _ROW)


def rows_of(pairs: RowPairs, rtol: Floats, at: Any = slice(None)) -> PairRows:
    """Return where the records of pairs lie: of all, or of some."""
    a, b = pairs.a, pairs.b
    columns = (a.source, a.row, b.source, b.row, pairs.position, np.full(len(pairs), pairs.rank), a.site, rtol)
    chosen = [column[at] for column in columns]
    rows = no_rows(len(chosen[0]))
    for name, column in zip((*_FIELDS, "rtol"), chosen, strict=True):
        rows[name] = column
    return rows


class PairReader:
    """Makes pairs of records from where they lie."""

    def __init__(self, runs: RunPair, kept: tuple[KeptElements, KeptElements], *, bitwise: bool) -> None:
        self._runs = runs
        self._kept = kept
        self._bitwise = bitwise
        self._elements = _kept_in_both(runs, *kept)

    def pairs(self, rows: PairRows, atol: float, *, histograms: bool = True) -> list[Pair]:
        """Return the pairs of some rows; without histograms their distances are not known."""
        columns = [name for name in PLAIN_RECORDS.names if histograms or name not in HISTOGRAM]
        found = [
            self._records(side, rows[f"source_{name}"], rows[f"row_{name}"], columns) for side, name in enumerate("ab")
        ]
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

    def _records(self, side: int, source: Ints, row: Ints, columns: Sequence[str]) -> list[Record]:
        """Return records from their files, each file read once."""
        known = np.unique(source).tolist()
        rows = [np.unique(row[source == number]) for number in known]
        files = [self._runs.sources[side][number] for number in known]
        with ThreadPoolExecutor(_READERS, "tensortap-diff") as pool:
            read = lambda file, wanted: self._read(side, file, lambda: file.take(wanted, columns))  # noqa: E731
            tables = list(pool.map(read, files, rows))
        _raise_if_missing(tables, files)
        made = {
            (number, at): record
            for number, wanted, table in zip(known, rows, tables, strict=True)
            for at, record in zip(wanted.tolist(), records_in(table), strict=True)
        }
        return [made[key] for key in zip(source.tolist(), row.tolist(), strict=True)]


def _kept_in_both(runs: RunPair, a: KeptElements, b: KeptElements) -> dict[int, list[tuple[int, ...]]]:
    """Return the pairs of which both runs kept elements: by rank, step, site and call as numbers, in order."""
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
    """Compares the lists of rows, histograms and shapes, some thousand rows of both runs at a time."""

    def __init__(self, runs: RunPair) -> None:
        self._runs = runs
        names = {source.name: i for i, source in enumerate(runs.sources[0])} if runs.same_folder else {}
        self._number_in_a = np.array([names.get(source.name, -1) for source in runs.sources[1]], np.int64)
        self._windows: list[tuple[Any, RowWindow | None]] = [(None, None), (None, None)]  # the last file of each side

    def same_rows(self, pairs: RowPairs) -> Bools:
        """Return which pairs are one row of one file."""
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
