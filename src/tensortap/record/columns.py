"""The memory of a step table: its columns, laid out as the Arrow arrays they will be written as.

The kernels write rows through the addresses in `header`. Memory grows by doubling; nothing here knows of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.record.pending import CopiedRows
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import CONDITIONS, FIELDS, NONFINITE, defined_rows

Array = npt.NDArray[Any]

# How long each of the kernel's columns is; those not named have one entry a row.
_LENGTHS: Final = {
    **dict.fromkeys(("recomputed", "recomputed_before", "hist_valid", *CONDITIONS), "bits"),
    **dict.fromkeys(("hist_ends", "dims_ends"), "ends"),
    "hist_counts": "hist",
    "dims": "dims",
    "calls": "keys",
}
# What closing the step fills in: the step's number, and the numbers of strings.
_STRINGS: Final = ("site", "port", "slot", "op", "reason")
_CLOSING: Final = (("step", np.int64), ("phase", np.int8), *((name, np.int32) for name in _STRINGS))
# Of the last step that used this memory.
_BEFORE: Final = (("key_before", np.int32), ("probes_before", np.uint64), ("recomputed_before", np.uint8))
_ALL: Final = (*kernels.COLUMNS, *_CLOSING, *_BEFORE)
_COLUMNS: Final = tuple((name, dtype, _LENGTHS.get(name, "rows")) for name, dtype in _ALL)
_KIND: Final = {name: kind for name, _, kind in _COLUMNS}
_MOST_ENTRIES: Final = 2**31 - 1  # Arrow counts list elements in 32 bits
ROWS, ROW_CAPACITY, HIST, HIST_CAPACITY, DIMS, DIMS_CAPACITY, NONFINITE_ROWS, FIXED_TIME, KEY_CAPACITY, HASH_PROBES = (
    range(len(kernels.HEADER))
)
"""Where the header has its counters."""


class Columns:
    """Rows as columns of arrays, with room for `capacity` of them.

    >>> columns = Columns(rows=8, hist=8, dims=8, keys=8)
    >>> columns.rows, len(columns.columns["mean"])
    (0, 8)
    """

    settle: Callable[[int], bool]
    """Write the step's number into all rows; return whether the last step had the same, but for their values."""

    reopen: Callable[[int, int], None]
    """`reopen(time, hash_probes)`: forget all rows and take others. A time of 0 has the kernel read the clock."""

    def __init__(self, rows: int, hist: int, dims: int, keys: int) -> None:
        self.header = np.zeros(kernels.HEADER_LENGTH, np.int64)
        self._counts: memoryview[int] = (
            memoryview(self.header.data).cast("B").cast("q")
        )  # read and set sooner than by NumPy
        self.columns: dict[str, Array] = {}
        self.generation = 0
        self.allocated = 0
        self.capacity = 0
        self.allocate(rows, hist, dims, keys)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._counts[ROWS]

    @property
    def nonfinite(self) -> int:
        """How many rows saw a NaN or an infinity."""
        return self._counts[NONFINITE_ROWS]

    def __getattr__(self, name: str) -> Array:
        try:
            return self.__dict__["columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def _reopen(self, time: int, hash_probes: int) -> None:
        counts = self._counts
        counts[ROW_CAPACITY] = 0
        counts[ROWS] = counts[HIST] = counts[DIMS] = counts[NONFINITE_ROWS] = 0
        counts[FIXED_TIME], counts[HASH_PROBES] = time, hash_probes
        self.columns["calls"].fill(0)
        counts[ROW_CAPACITY] = self.capacity

    def _settle(self, step: int) -> bool:
        rows, columns = self.rows, self.columns
        columns["step"][:rows] = step
        names = ("key", "probes", "recomputed")
        same = all(np.array_equal(self.column(name), self.column(f"{name}_before")) for name in names)
        if same and self._settling[-1] == rows:
            return True
        for name in names:
            columns[f"{name}_before"][:] = columns[name]
        self._settling[-1] = rows
        return False

    def column(self, name: str) -> Array:
        """The used part of a column (row-shaped columns and bitmaps as bools)."""
        array = self.columns[name]
        if _KIND[name] == "bits":
            return np.unpackbits(array, count=self.rows, bitorder="little").astype(bool)
        return array[: self.rows]

    def shape(self, row: int) -> tuple[int, ...]:
        """The shape of a row's tensor."""
        ends = self.columns["dims_ends"]
        return tuple(self.columns["dims"][ends[row] : ends[row + 1]].tolist())

    def histogram(self, row: int) -> tuple[int, Array] | None:
        """A row's histogram as (offset, counts), if it was taken."""
        if not self.columns["hist_valid"][row >> 3] >> (row & 7) & 1:
            return None
        ends = self.columns["hist_ends"]
        return int(self.columns["hist_offset"][row]), self.columns["hist_counts"][ends[row] : ends[row + 1]].copy()

    def allocate(self, rows: int, hist: int, dims: int, keys: int) -> None:
        """Replace the arrays by larger ones with the same content, and tell the kernels where they are."""
        lengths = {"rows": rows, "bits": -(-rows // 8), "ends": rows + 1, "hist": hist, "dims": dims, "keys": 2 * keys}
        old = self.columns
        self.columns = {name: np.zeros(lengths[kind], dtype) for name, dtype, kind in _COLUMNS}
        for name, array in old.items():
            self.columns[name][: len(array)] = array
        self.bound = kernels.bind(self)
        columns = ("step", "key_before", "probes_before", "recomputed_before")
        self._settling = np.array([*(self.columns[name].ctypes.data for name in columns), -1], np.int64)
        self.capacity = rows
        if kernels.settle is None or kernels.reopen is None:
            self.settle, self.reopen = self._settle, self._reopen
        else:  # called in every step: what C is given is put together once
            self.settle = functools.partial(kernels.settle, self.bound, self._settling.ctypes.data)
            self.reopen = functools.partial(kernels.reopen, self.bound, rows)
        self.allocated = sum(array.nbytes for array in self.columns.values())
        self.generation += 1
        self.header[[HIST_CAPACITY, DIMS_CAPACITY, KEY_CAPACITY]] = hist, dims, keys

    def grow(self, key: int, dims: int, hist: int) -> None:
        """Make room for one more row with so many dimensions and buckets, where there is none."""
        head = self.header
        room = rows, hist_cap, dims_cap, keys = (
            len(self.columns["key"]), *(int(head[i]) for i in (HIST_CAPACITY, DIMS_CAPACITY, KEY_CAPACITY))
        )  # fmt: skip
        if head[ROWS] >= rows:
            rows *= 2
        if head[HIST] + hist > hist_cap:
            hist_cap = 2 * hist_cap + hist
        if head[DIMS] + dims > dims_cap:
            dims_cap = 2 * dims_cap + dims
        if key >= keys:
            keys = max(2 * keys, key + 1)
        if max(hist_cap, dims_cap) > _MOST_ENTRIES:
            raise MemoryError(f"one step has more than {_MOST_ENTRIES} histogram buckets: observe fewer sites")
        if room != (rows, hist_cap, dims_cap, keys):
            self.allocate(rows, hist_cap, dims_cap, keys)

    def fill(self, copied: CopiedRows) -> None:
        """Write the values of rows that were appended without them."""
        rows, values = copied.rows, copied.values
        for name in FIELDS:
            self.columns[name][rows] = values[name]
        for name in CONDITIONS:
            np.bitwise_or.at(self.columns[name], rows >> 3, _bit(rows) * defined_rows(name, values))
        self.header[NONFINITE_ROWS] += np.count_nonzero(sum(values[name] for name in NONFINITE))
        if copied.histograms:
            self._put_histograms(copied.histograms)

    def _put_histograms(self, histograms: Mapping[int, tuple[int, Array]]) -> None:
        """Lists lie in the order of the rows, so those behind it move."""
        ends, old = self.columns["hist_ends"].copy(), self.columns["hist_counts"].copy()
        chosen = np.fromiter(histograms, np.intp)
        self.grow(0, 0, sum(len(counts) for _, counts in histograms.values()))
        lists = [
            histograms[row][1] if row in histograms else old[ends[row] : ends[row + 1]] for row in range(self.rows)
        ]
        columns, lengths = self.columns, [len(counts) for counts in lists]
        columns["hist_ends"][1 : len(lists) + 1] = np.cumsum(lengths)
        columns["hist_counts"][: sum(lengths)] = np.concatenate(lists)
        columns["hist_offset"][chosen] = [offset for offset, _ in histograms.values()]
        np.bitwise_or.at(columns["hist_valid"], chosen >> 3, _bit(chosen))
        self.header[HIST] = sum(lengths)

    def copy_rows(self, rows: npt.NDArray[np.intp], other: Columns) -> None:
        """Copy the chosen rows into `other`, which has none, and room for their number."""
        hist_take, hist_ends = _runs(self.columns["hist_ends"], rows)
        dims_take, dims_ends = _runs(self.columns["dims_ends"], rows)
        other.allocate(len(other.columns["key"]), max(len(hist_take), 1), max(len(dims_take), 1), 1)
        for name, _, kind in _COLUMNS:
            if kind == "rows":
                other.columns[name][: len(rows)] = self.columns[name][rows]
            elif kind == "bits":
                packed = np.packbits(self.column(name)[rows], bitorder="little")
                other.columns[name][: len(packed)] = packed
        for ends, data, source, new in (
            ("hist_ends", "hist_counts", hist_take, hist_ends),
            ("dims_ends", "dims", dims_take, dims_ends),
        ):
            other.columns[ends][: len(new)] = new
            other.columns[data][: len(source)] = self.columns[data][source]
        other.header[[ROWS, HIST, DIMS]] = len(rows), len(hist_take), len(dims_take)
        other.header[NONFINITE_ROWS] = int(np.count_nonzero(sum(self.columns[name][rows] for name in NONFINITE)))


def _bit(rows: Array) -> Array:
    """Each row's bit in its byte of a bitmap."""
    bits: Array = np.left_shift(1, rows & 7).astype(np.uint8)
    return bits


def _runs(ends: Array, rows: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], Array]:
    """The positions of the chosen rows' list elements, and the new list ends."""
    starts, lengths = ends[rows], ends[rows + 1] - ends[rows]
    new_ends = np.concatenate([[0], np.cumsum(lengths)])
    shift = np.repeat(starts - new_ends[:-1], lengths)
    return np.arange(new_ends[-1]) + shift, new_ends
