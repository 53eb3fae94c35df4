"""The step table: one step's rows, laid out in memory as the Arrow columns they will be written as.

The kernel appends rows through raw pointers; nothing here is an object per row. A table grows by doubling and is
used again for later steps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.distributed.shards import Shard
from tensortap.record.pending import CopiedRows, HostCopy, PendingRows
from tensortap.reduce import kernel as kernels
from tensortap.reduce.histogram import BUCKETS
from tensortap.types import PHASES, Place

Array = npt.NDArray[Any]

# How long each of the kernel's columns is; those not named have one entry a row.
_LENGTHS: Final = {
    **dict.fromkeys(("recomputed", "defined", "hist_valid"), "bits"),
    **dict.fromkeys(("hist_ends", "dims_ends"), "ends"),
    "hist_counts": "hist",
    "dims": "dims",
    "calls": "keys",
}
# What closing the step fills in: the step's own number, and numbers of words.
_WORDS: Final = ("site", "port", "slot", "op", "reason")
_CLOSING: Final = (("step", np.int64), ("phase", np.int8), *((word, np.int32) for word in _WORDS))
_COLUMNS: Final = tuple((name, dtype, _LENGTHS.get(name, "rows")) for name, dtype in (*kernels.COLUMNS, *_CLOSING))
_KIND: Final = {name: kind for name, _, kind in _COLUMNS}
_MOST_PHASES: Final = 127  # their numbers take one byte
_MOST_ENTRIES: Final = 2**31 - 1  # Arrow counts list elements in 32 bits
_ROWS, _ROW_CAP, _HIST, _HIST_CAP, _DIMS, _DIMS_CAP, _NONFINITE, _TIME, _KEY_CAP = range(len(kernels.HEADER))


class Kept(NamedTuple):
    """Elements kept of one row's tensor: by which reducer, for which probe."""

    row: int
    kind: str
    array: Array
    probe: int


class Value(NamedTuple):
    """A named number kept of one row's tensor."""

    row: int
    name: str
    number: float | HostCopy  # a HostCopy while the row is pending
    probe: int


class StepTable:
    """Rows of one step. `record` is the hot path; everything else happens once a step.

    Threads may record at once: the kernel checks for room and writes a row in one go. Whoever replaces the memory or
    closes the table first takes the room away (a row capacity of zero), so that the others come to wait at the lock.

    >>> table = StepTable()
    >>> x = np.arange(6, dtype=np.float32)
    >>> table.record(0, 1, 0, 0, 1, x.ctypes.data, x.shape, None)
    0
    >>> float(table.column("max")[0]), table.rows
    (5.0, 1)
    """

    def __init__(self, rows: int = 256, hist: int = 0, dims: int = 1024, keys: int = 256) -> None:
        self.header = np.zeros(kernels.HEADER_LENGTH, np.int64)
        self.columns: dict[str, Array] = {}
        self.tensors: list[Kept] = []
        self.values: list[Value] = []
        self.pending: list[PendingRows] = []
        self.when_copied: list[Callable[[], None]] = []
        self.generation = 0
        self.epoch = 0
        self.filled: tuple[Any, ...] = ()  # what the columns of words were filled in by
        self._closed = False
        self._lock = threading.Lock()
        self._allocated = 0
        self._allocate(rows, hist or rows, dims, keys)
        self.header[_ROW_CAP] = rows

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self.header[_ROWS])

    @property
    def nonfinite(self) -> int:
        """How many rows saw a NaN or an infinity."""
        return int(self.header[_NONFINITE])

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory, used or not, and those of kept tensors and pending rows."""
        return self._allocated + self.tensor_bytes + sum(rows.nbytes for rows in self.pending)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of kept tensors."""
        return sum(kept.array.nbytes for kept in self.tensors)

    def __getattr__(self, name: str) -> Array:
        try:
            return self.__dict__["columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def column(self, name: str) -> Array:
        """The used part of a column (row-shaped columns and bitmaps as bools)."""
        array = self.columns[name]
        if _KIND[name] == "bits":
            return np.unpackbits(array, count=self.rows, bitorder="little").astype(bool)
        return array[: self.rows]

    def record(
        self,
        key: int,
        probes: int,
        want: int,
        recomputed: int,
        dtype: int,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
    ) -> int:
        """Reduce the memory at `address` and append its row; the row's index, or −1 when the table is closed.

        `_append` is the same without making room: −1 says that there is none, or that the table is closed.
        """
        given = (key, probes, want, recomputed, dtype, address, shape, strides)
        return self._with_room(lambda: self._append(*given), key, len(shape), BUCKETS if want else 0)

    def insert(
        self,
        key: int,
        probes: int,
        recomputed: bool,
        dtype: int,
        shape: tuple[int, ...],
        row: Sequence[float],
        hist_offset: int = 0,
        hist_counts: Array | None = None,
    ) -> int:
        """Append a row whose statistics were computed elsewhere: on a device, or inside a compiled graph.

        `row` has the fields of `kernels.ROW`, in their order. −1 when the table is closed.
        """
        given = (key, probes, recomputed, dtype, shape, row, hist_offset, hist_counts)
        counts = 0 if hist_counts is None else len(hist_counts)
        return self._with_room(lambda: self._commit(*given), key, len(shape), counts)

    def start_copies(self) -> None:
        """Start copying the values of pending rows to the host."""
        for rows in self.pending:
            rows.start_copy()

    def wait(self) -> None:
        """Wait for the values of pending rows and write them into their rows."""
        pending, self.pending = self.pending, []
        for rows in pending:
            rows.start_copy()
        for rows in pending:
            self._fill(rows.wait())
        if pending:
            self.values = [value._replace(number=float(value.number)) for value in self.values]
        finishing, self.when_copied = self.when_copied, []
        for finish in finishing:
            finish()

    def _fill(self, arrived: CopiedRows) -> None:
        """Write the values of rows that have places already."""
        rows, values = arrived.rows, arrived.values
        bad = values["nan"] + values["posinf"] + values["neginf"]
        with self._alone():
            for name in kernels.ROW.names or ():
                self.columns[name][rows] = values[name]
            np.bitwise_or.at(self.columns["defined"], rows >> 3, _bit(rows) * (values["numel"] > bad))
            self.header[_NONFINITE] += np.count_nonzero(bad)
            if arrived.histograms:
                self._put_histograms(arrived.histograms)

    def _put_histograms(self, histograms: Mapping[int, tuple[int, Array]]) -> None:
        """Lists lie in the order of the rows, so those behind one that is filled in move."""
        ends, old = self.columns["hist_ends"].copy(), self.columns["hist_counts"].copy()
        chosen = np.fromiter(histograms, np.intp)
        self._grow(0, 0, sum(len(counts) for _, counts in histograms.values()))
        lists = [
            histograms[row][1] if row in histograms else old[ends[row] : ends[row + 1]] for row in range(self.rows)
        ]
        columns, lengths = self.columns, [len(counts) for counts in lists]
        columns["hist_ends"][1 : len(lists) + 1] = np.cumsum(lengths)
        columns["hist_counts"][: sum(lengths)] = np.concatenate(lists)
        columns["hist_offset"][chosen] = [offset for offset, _ in histograms.values()]
        np.bitwise_or.at(columns["hist_valid"], chosen >> 3, _bit(chosen))
        self.header[_HIST] = sum(lengths)

    def close(self) -> None:
        """Take no more rows: a thread that is still reducing a tensor comes too late."""
        with self._alone():
            self._closed = True

    def reset(self, time: int = 0) -> None:
        """Forget all rows and take new ones; keep the memory."""
        with self._alone():
            self._closed = False
            self.epoch += 1
            self.header[_ROWS] = self.header[_HIST] = self.header[_DIMS] = self.header[_NONFINITE] = 0
            self.header[_TIME] = time
            self.columns["calls"][:] = 0
            self.tensors, self.values = [], []
            self.pending, self.when_copied = [], []

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

    def take(self, rows: npt.NDArray[np.intp]) -> StepTable:
        """A table of its own with the chosen rows and what was kept of them."""
        hist_take, hist_ends = _runs(self.columns["hist_ends"], rows)
        dims_take, dims_ends = _runs(self.columns["dims_ends"], rows)
        other = StepTable(max(len(rows), 1), max(len(hist_take), 1), max(len(dims_take), 1), 1)
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
        other.header[[_ROWS, _HIST, _DIMS]] = len(rows), len(hist_take), len(dims_take)
        other.header[_NONFINITE] = int(
            np.count_nonzero(sum(self.columns[c][rows] for c in ("nan", "posinf", "neginf")))
        )
        place = {int(old): new for new, old in enumerate(rows)}
        other.tensors = [kept._replace(row=place[kept.row]) for kept in self.tensors if kept.row in place]
        other.values = [value._replace(row=place[value.row]) for value in self.values if value.row in place]
        other.pending = [rows.subset(place) for rows in self.pending]
        return other

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While this lasts, no other thread writes a row."""
        with self._lock:
            self.header[_ROW_CAP] = 0
            try:
                yield
            finally:
                self.header[_ROW_CAP] = 0 if self._closed else len(self.columns["key"])

    def _with_room(self, write: Callable[[], int], key: int, dims: int, hist: int) -> int:
        """The number of a row that is written, once there is room for it; −1 when the table is closed."""
        row = write()
        while row < 0:
            with self._alone():
                if self._closed:
                    return -1
                self._grow(key, dims, hist)
            row = write()
        return row

    def _grow(self, key: int, dims: int, hist: int) -> None:
        """Make room for one more row with so many dimensions and buckets, where there is none."""
        head = self.header
        room = rows, hist_cap, dims_cap, keys = (
            len(self.columns["key"]), *(int(head[i]) for i in (_HIST_CAP, _DIMS_CAP, _KEY_CAP))
        )  # fmt: skip
        if head[_ROWS] >= rows:
            rows *= 2
        if head[_HIST] + hist > hist_cap:
            hist_cap = 2 * hist_cap + hist
        if head[_DIMS] + dims > dims_cap:
            dims_cap = 2 * dims_cap + dims
        if key >= keys:
            keys = max(2 * keys, key + 1)
        if max(hist_cap, dims_cap) > _MOST_ENTRIES:
            raise MemoryError(f"one step has more than {_MOST_ENTRIES} histogram buckets: observe fewer sites")
        if room != (rows, hist_cap, dims_cap, keys):
            self._allocate(rows, hist_cap, dims_cap, keys)

    def _allocate(self, rows: int, hist: int, dims: int, keys: int) -> None:
        lengths = {"rows": rows, "bits": -(-rows // 8), "ends": rows + 1, "hist": hist, "dims": dims, "keys": 2 * keys}
        old = self.columns
        self.columns = {name: np.zeros(lengths[kind], dtype) for name, dtype, kind in _COLUMNS}
        for name, array in old.items():
            self.columns[name][: len(array)] = array
        self._bound = kernels.bind(self)
        self._append, self._commit = self._one_by_one(kernels.record), self._one_by_one(kernels.commit)
        self._allocated = sum(array.nbytes for array in self.columns.values())
        self.generation += 1
        self.header[[_HIST_CAP, _DIMS_CAP, _KEY_CAP]] = hist, dims, keys

    def _one_by_one(self, write: Callable[..., int]) -> Callable[..., int]:
        """What writes rows to this table."""
        bound = functools.partial(write, self._bound)
        if kernels.ACTIVE != "numpy":
            return bound

        def locked(*args: Any) -> int:  # in Python, a row is not written in one go
            with self._lock:
                return bound(*args)

        return locked


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


class Names:
    """Places and reasons, numbered once and for all: rows carry the number, files a dictionary.

    >>> names = Names()
    >>> names.key(Place("fc")), names.key(Place("fc", "input")), names.key(Place("fc"))
    (0, 1, 0)
    """

    FIELDS = ("site", "port", "slot", "op")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.lines: dict[str, str] = {}  # for sites of operations: the line of the user's code
        self.parts: dict[Place, Shard] = {}  # which part of a tensor this rank holds, where that is known
        self.words: dict[str, dict[str, int]] = {field: {} for field in (*self.FIELDS, "reason", "phase")}
        self.words["phase"] = {phase: i for i, phase in enumerate(PHASES)}
        self._keys: dict[Place, int] = {}
        self._codes = np.zeros((len(self.FIELDS), 64), np.int32)

    def key(self, place: Place) -> int:
        """The number of a place; a new one for a new place."""
        known = self._keys.get(place)
        if known is not None:
            return known
        key = len(self.places)
        if key == self._codes.shape[1]:
            self._codes = np.concatenate([self._codes, np.zeros_like(self._codes)], axis=1)
        self._codes[:, key] = [self._word(field, getattr(place, field)) for field in self.FIELDS]
        self.places.append(place)
        self._keys[place] = key
        return key

    def reason(self, text: str) -> int:
        """The number of a reason."""
        return self._word("reason", text)

    def phase(self, text: str) -> int:
        """The number of a phase, of which there are few."""
        known = self.words["phase"]
        return self._word("phase", text) if text in known or len(known) < _MOST_PHASES else 0

    def fill(self, table: StepTable) -> None:
        """Write the numbers of site, port, slot and op for every row of a table."""
        keys = table.column("key")
        for field, codes in zip(self.FIELDS, self._codes, strict=True):
            table.columns[field][: len(keys)] = codes[keys]

    def _word(self, field: str, text: str) -> int:
        words = self.words[field]
        return words.setdefault(text, len(words))
