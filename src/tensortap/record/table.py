"""The step table: one step's rows. The kernel appends them through raw pointers; nothing here is an object per row.

A table is used again for later steps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.distributed.shards import Shard
from tensortap.record.columns import HASH_PROBES, ROW_CAPACITY, Columns
from tensortap.record.pending import HostCopy, PendingRows
from tensortap.reduce import kernel as kernels
from tensortap.reduce.buffers import NUMPY_DTYPES
from tensortap.reduce.histogram import BUCKETS
from tensortap.types import PHASES, Place

Array = npt.NDArray[Any]

_MOST_PHASES: Final = 127  # their numbers take one byte


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


class StepTable(Columns):
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

    record_if_room: Callable[..., int]
    """As `record`, without making room: −1 says that there is none, or that the table is closed."""

    record_tensor: Callable[..., int]
    """As `record_if_room`, for a framework's tensor: −2 says that it has no dense memory that C can find."""

    def __init__(self, rows: int = 256, hist: int = 0, dims: int = 1024, keys: int = 256) -> None:
        self.tensors: list[Kept] = []
        self.whole: list[tuple[int, int, bytearray, int, tuple[int, ...]]] = []  # kept by C, as csrc/hook.h has it
        self.values: list[Value] = []
        self.pending: list[PendingRows] = []
        self.when_copied: list[Callable[[], None]] = []
        self.epoch = 0
        self.filled: tuple[Any, ...] = ()  # what the columns of strings were filled in by
        self.same = False  # its rows are those of the last step that used it, but for their values
        self.derived: dict[Any, Any] = {}  # what writers have made over its memory, by writer
        self._closed = False
        self._lock = threading.RLock()  # a signal handler may find its own thread holding it: then `_busy` is set
        self._busy = False
        super().__init__(rows, hist or rows, dims, keys)
        self.header[ROW_CAPACITY] = rows

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory, used or not, and those of kept tensors and pending rows."""
        return self.allocated + self.tensor_bytes + sum(rows.nbytes for rows in self.pending)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of kept tensors."""
        return sum(kept.array.nbytes for kept in self.tensors)

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
        """Reduce the memory at `address` and append its row; the row's index, or −1 when the table is closed."""
        given = (key, probes, want, recomputed, dtype, address, shape, strides)
        return self._with_room(lambda: self.record_if_room(*given), key, len(shape), BUCKETS if want & 1 else 0)

    def record_many(self, entries: Array, tensors: tuple[Any, ...], first: int) -> int:
        """Record PyTorch tensors in one call; return the first that the kernel left. See `kernels.record_many`."""
        if kernels.record_many is None:
            return first
        return kernels.record_many(self.bound, kernels.address(entries), tensors, first)

    def record_changes(
        self, entries: Array, copies: Array, buffer: Array, norms: Array, tensors: tuple[Any, ...], first: int
    ) -> int:
        """Record what tensors have changed by; return the first that the kernel left. See `kernels.record_changes`."""
        if kernels.record_changes is None:
            return first
        at = kernels.address
        left: int = kernels.record_changes(self.bound, at(entries), at(copies), at(buffer), at(norms), tensors, first)
        return left

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

        `row` has the fields of `statistics.ROW`, in their order. −1 when the table is closed.
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
            copied = rows.wait()
            with self._alone():
                self.fill(copied)
        if pending:
            self.values = [value._replace(number=float(value.number)) for value in self.values]
        finishing, self.when_copied = self.when_copied, []
        for finish in finishing:
            finish()

    def close(self) -> None:
        """Take no more rows: a thread that is still reducing a tensor comes too late."""
        with self._lock:  # a step closes often: without `_alone`, whose context manager costs more than this
            self._closed = True
            self._counts[ROW_CAPACITY] = 0
            if self.whole:
                self._take_whole()

    def reset(self, time: int = 0, hash_probes: int | None = None) -> None:
        """Forget all rows and take new ones; keep the memory. `hash_probes` ask for the content hash, or as before."""
        with self._lock:
            self._counts[ROW_CAPACITY] = 0
            self.epoch += 1
            self.tensors, self.values, self.whole = [], [], []
            self.pending, self.when_copied = [], []
            self._closed = False
            self.reopen(time, self._counts[HASH_PROBES] if hash_probes is None else hash_probes)

    def take(self, rows: npt.NDArray[np.intp]) -> StepTable:
        """A table of its own with the chosen rows and what was kept of them."""
        other = StepTable(max(len(rows), 1), hist=1, dims=1, keys=1)
        self.copy_rows(rows, other)
        place = {int(old): new for new, old in enumerate(rows)}
        other.tensors = [kept._replace(row=place[kept.row]) for kept in self.tensors if kept.row in place]
        other.values = [value._replace(row=place[value.row]) for value in self.values if value.row in place]
        other.pending = [pending.subset(place) for pending in self.pending]
        return other

    def allocate(self, rows: int, hist: int, dims: int, keys: int) -> None:
        """Replace the memory, and what writes rows into it."""
        super().allocate(rows, hist, dims, keys)
        self.record_if_room = self._one_by_one(kernels.record)
        self.record_tensor = functools.partial(kernels.record_tensor, self.bound)
        self._commit = self._one_by_one(kernels.commit)

    def _take_whole(self) -> None:
        """Put the tensors that C has copied among the others, in the order of their rows."""
        kept = [
            Kept(row, "full", np.ndarray(shape, NUMPY_DTYPES[dtype], data), probe)
            for row, probe, data, dtype, shape in self.whole
        ]
        self.whole = []
        self.tensors = sorted([*self.tensors, *kept], key=itemgetter(0)) if self.tensors else kept

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While this lasts, no other thread writes a row."""
        with self._lock:
            self._busy = True
            self.header[ROW_CAPACITY] = 0
            try:
                yield
            finally:
                self._busy = False
                self.header[ROW_CAPACITY] = 0 if self._closed else self.capacity

    def _with_room(self, write: Callable[[], int], key: int, dims: int, hist: int) -> int:
        """The number of a row that is written, once there is room for it; −1 when the table is closed."""
        row = write()
        while row < 0:
            with self._lock:
                if self._busy:  # by the call that this signal handler interrupts
                    return -1
            with self._alone():
                if self._closed:
                    return -1
                self.grow(key, dims, hist)
            row = write()
        return row

    def _one_by_one(self, write: Callable[..., int]) -> Callable[..., int]:
        """What writes rows to this table."""
        bound = functools.partial(write, self.bound)
        if kernels.ACTIVE != "numpy":
            return bound

        def locked(*args: Any) -> int:  # in Python, a row is not written in one go
            with self._lock:
                if self._busy:
                    return -1
                self._busy = True
                try:
                    return bound(*args)
                finally:
                    self._busy = False

        return locked


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
        self.size = sum(len(words) for words in self.words.values())  # grows with every new word
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
        new = len(words)
        known = words.setdefault(text, new)
        self.size += known == new
        return known
