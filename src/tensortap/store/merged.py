"""Merge a run's records over ranks, steps or calls, file by file: histograms are never all in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tensortap.distributed.replicas import ReplicaGroups
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.merge import add_slices
from tensortap.reduce.statistics import NUMBERS
from tensortap.store.arrays import Ints, array_of, arrow_of, encoded
from tensortap.store.blocks import BlockSource, RowBlock, ahead, blocks, left_out, read_or_mark
from tensortap.store.filters import SiteSelection, StepSelection, places_matching
from tensortap.store.merging import Over, fold
from tensortap.store.snapshot import Snapshot

_WORDS: Final = ("phase", "site", "port", "slot", "op", "dtype")
_WORD: Final = pa.dictionary(pa.int32(), pa.string())
_PLAIN: Final = ("step", "call", "seq", "recomputed")
_GROUPS_AT_ONCE: Final = 1 << 13  # of 32 KiB each at most
_READERS: Final = 2
_MARGIN: Final = 64  # buckets
_TYPES: Final = {"step": np.int64, "call": np.int32, "seq": np.int32, "recomputed": np.bool_}


def merged(
    snapshot: Snapshot, over: Over | Sequence[Over], sites: SiteSelection, steps: StepSelection,
    copies: ReplicaGroups, *, by_phase: bool,
) -> Any:  # fmt: skip
    """Return what `fold` gives of a run's records."""
    chosen = None if sites is None else set(places_matching(sites, snapshot.places))
    wanted = (*_PLAIN, "phase", "dtype", "shape", *NUMBERS)
    found = list(blocks(snapshot, wanted, chosen=lambda place: chosen is None or place in chosen, steps=steps))
    rows = _table(found)
    merge = _HistogramMerge(snapshot, [block.source for block in found])
    return fold(rows, over, copies, by_phase=by_phase, histograms=merge, order_by=("step", "rank", "seq"))


def _table(found: Sequence[RowBlock]) -> Any:
    """Return the rows of all files, and for each where it lies."""
    tables = [_rows(number, block) for number, block in enumerate(found)]
    return pa.concat_tables(tables).unify_dictionaries() if tables else _nothing()


def _rows(number: int, block: RowBlock) -> Any:
    columns: dict[str, Any] = {name: arrow_of(block.number(name).astype(kind)) for name, kind in _TYPES.items()}
    columns |= {name: encoded(block.columns[name]).cast(_WORD) for name in _WORDS}  # quicker to take than text
    columns |= {name: arrow_of(block.number(name)) for name in NUMBERS}
    columns |= {"rank": arrow_of(np.full(len(block), block.source.rank, np.int32)), "shape": block.columns["shape"]}
    columns["source"] = arrow_of(np.full(len(block), number))
    columns["row"] = arrow_of(np.arange(len(block)) if block.rows is None else block.rows)
    return pa.table(columns)


class _HistogramMerge:
    """Add the histograms of groups of rows, each file being read when its rows are added."""

    def __init__(self, snapshot: Snapshot, files: Sequence[BlockSource]) -> None:
        self._snapshot = snapshot
        self._files = files

    def __call__(self, rows: Any, starts: Ints) -> dict[str, Any]:
        """Return the columns of merged histograms; null where a row of the group has none."""
        source, row = (array_of(rows[name]) for name in ("source", "row"))
        group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(rows))))
        offsets, lengths, counts = [], [], []
        whole = np.ones(len(starts), bool)
        for low in range(0, len(starts), _GROUPS_AT_ONCE):
            high = min(low + _GROUPS_AT_ONCE, len(starts))
            at = slice(*np.searchsorted(group, (low, high)))
            dense = _DenseHistograms(high - low)
            self._add(dense, source[at], row[at], group[at] - low, whole[low:high])
            for first, total in dense.trimmed():
                offsets.append(first)
                lengths.append(len(total))
                counts.append(total)
        return _as_columns(np.array(offsets, np.int32), np.array(lengths, np.int64), counts, whole)

    def _add(self, dense: _DenseHistograms, source: Ints, row: Ints, group: Ints, whole: Any) -> None:
        """Add the rows to their groups; `whole` becomes false for groups with a row that has no histogram."""
        numbers, damaged = np.unique(source).tolist(), list[BlockSource]()
        with ThreadPoolExecutor(_READERS, "tensortap-read") as pool:
            for number, table in zip(numbers, ahead(pool, self._read, numbers, _READERS + 1), strict=True):
                at = np.flatnonzero(source == number)
                if table is None:
                    damaged.append(self._files[number])
                elif "hist_counts" not in table.column_names:
                    whole[group[at]] = False
                else:
                    dense.add(table, row[at], group[at], whole)
        if damaged:
            raise left_out(damaged[0])

    def _read(self, number: int) -> Any:
        source = self._files[number]
        return read_or_mark(self._snapshot, source, lambda: source.read(("hist_offset", "hist_counts")))


class _DenseHistograms:
    """The histograms of some groups, with all buckets between the first and the last that any of them uses."""

    def __init__(self, groups: int) -> None:
        self._start = 0  # the bucket of the first column
        self._counts = np.zeros((groups, 0), np.int64)

    def add(self, table: Any, row: Ints, group: Ints, whole: Any) -> None:
        """Add the histograms of some rows of a file to those of their groups."""
        lists = table["hist_counts"].combine_chunks()
        lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
        whole[group[~array_of(lists.is_valid())[row]]] = False
        ends = array_of(lists.offsets).astype(np.int64)
        first = array_of(table["hist_offset"]).astype(np.int64)
        of_row = np.full(len(lists), -1)
        of_row[row] = group
        of_row[(first < 0) | (first + np.diff(ends) > BUCKETS)] = -1  # a damaged file may say so
        used = of_row >= 0
        self._widen(int(first[used].min(initial=BUCKETS)), int((first + np.diff(ends))[used].max(initial=0)))
        counts = array_of(lists.values).astype(np.int64, copy=False)
        add_slices(self._counts, of_row, first - self._start, ends, counts)

    def _widen(self, low: int, high: int) -> None:
        """Add columns for the buckets from `low` to `high`, and some more, so that it is done seldom."""
        width = self._counts.shape[1]
        if low >= high or (self._start <= low and high <= self._start + width):
            return
        if width:
            low, high = min(low, self._start), max(high, self._start + width)
        low, high = max(low - _MARGIN, 0), min(high + _MARGIN, BUCKETS)
        wider = np.zeros((len(self._counts), high - low), np.int64)
        wider[:, self._start - low : self._start - low + width] = self._counts
        self._start, self._counts = low, wider

    def trimmed(self) -> Iterator[tuple[int, Ints]]:
        """Yield the first bucket of each group that is used, and the counts from there to the last."""
        for total in self._counts:
            used = np.flatnonzero(total)
            low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (-self._start, -self._start)
            yield self._start + low, total[max(low, 0) : max(high, 0)].copy()


def _as_columns(offsets: Any, lengths: Ints, counts: Sequence[Ints], whole: Any) -> dict[str, Any]:
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = np.concatenate(counts) if len(counts) else np.zeros(0, np.int64)
    lists = pa.ListArray.from_arrays(arrow_of(ends), arrow_of(values), mask=arrow_of(~whole))
    return {"hist_offset": arrow_of(offsets, ~whole), "hist_counts": lists}


def _nothing() -> Any:
    kinds = {**{name: pa.from_numpy_dtype(kind) for name, kind in _TYPES.items()}, "rank": pa.int32()}
    kinds |= dict.fromkeys(_WORDS, _WORD) | {"shape": pa.list_(pa.int64())}
    kinds |= {name: pa.float64() for name in NUMBERS} | {"source": pa.int64(), "row": pa.int64()}
    return pa.schema(list(kinds.items())).empty_table()
