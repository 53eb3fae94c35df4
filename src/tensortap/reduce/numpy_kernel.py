"""The reduction kernel in NumPy, for machines without the C extension: slower, and the same in every bit."""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.reduce.content_hash import ABSENT, hash_of_bytes
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.numpy_memory import chunks, logical_bytes, plan
from tensortap.reduce.numpy_moments import Moments, chunk_moments, finished, scale_power
from tensortap.reduce.statistics import CONDITIONS, FIELDS, NONFINITE, ROW, defined_rows
from tensortap.types import DTYPE_CODE, DTYPES

Array = npt.NDArray[Any]

LEVELS: Final = ("numpy",)
_MAX_DIMS: Final = 64
_BYTE: Final = DTYPE_CODE["uint8"]
_IN_PYTHON: Final = 5000  # nanoseconds that a row costs before this function is called, as in csrc/kernel.c

# --- one tensor ---------------------------------------------------------------------------------


def _moments(address: int, dtype: int, runs: list[tuple[int, int]], power: int, tables: Array | None) -> Moments:
    total = Moments()
    for chunk in chunks(address, dtype, runs):
        total.add(chunk_moments(np.ldexp(chunk, power) if power else chunk))
        if tables is not None:
            tables += _buckets(chunk)
    return total


# --- histogram ---------------------------------------------------------------------------------


def _cut(x: Array) -> Array:
    """Return the bits of doubles cut (never rounded) to floats; the smallest float for what is below it and no zero."""
    bits = x.view(np.uint64)
    size = bits & np.uint64(0x7FFF_FFFF_FFFF_FFFF)
    exponent = (size >> np.uint64(52)).astype(np.int64)
    mantissa = (size & np.uint64(0xF_FFFF_FFFF_FFFF)) | np.uint64(1 << 52)
    small = np.maximum(mantissa >> np.clip(29 + 897 - exponent, 0, 63).astype(np.uint64), np.uint64(1))
    out = np.where(exponent >= 897, (size >> np.uint64(29)) - np.uint64(896 << 23), small)
    out[exponent >= 1023 + 128] = 0x7F7F_FFFF
    out[exponent == 0x7FF] = 0x7F80_0000
    out[size == 0] = 0
    return np.asarray(out | ((bits >> np.uint64(63)) << np.uint64(31)), np.uint32)


def _buckets(x: Array) -> Array:
    bits = x.view(np.uint32) if x.dtype == np.float32 else _cut(x)
    bits = bits[(bits << np.uint32(1)) != 0]
    index = ((bits >> np.uint32(19)) & np.uint32(0xFFE)) | (bits >> np.uint32(31))
    return np.bincount(index, minlength=BUCKETS + 16)[:BUCKETS]


def trimmed(counts: Array) -> tuple[int, Array]:
    """Return the offset and the counts of the buckets in use, from the counts of all buckets."""
    used = np.flatnonzero(counts)
    if not used.size:
        return 0, counts[:0].astype(np.uint32)
    return int(used[0]), counts[used[0] : used[-1] + 1].astype(np.uint32)


# --- the kernel's functions ---------------------------------------------------------------------


def _check(address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    if not 0 <= dtype < len(DTYPES):
        raise ValueError(f"unknown dtype code {dtype}; types.DTYPES has 0 to {len(DTYPES) - 1}")
    if not isinstance(shape, tuple):
        raise TypeError("shape must be a tuple of ints")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"shape has {len(shape)} dimensions; at most {_MAX_DIMS} are supported")
    if any(length < 0 for length in shape):
        raise ValueError(f"shape has a negative entry: {shape}")
    if strides is not None and not isinstance(strides, tuple):
        raise TypeError("strides must be None or a tuple of ints (bytes)")
    if strides is not None and len(strides) != len(shape):
        raise ValueError(f"shape has {len(shape)} entries but strides has {len(strides)}")
    if math.prod(shape) and not address:
        raise ValueError("address is 0 but the shape has elements")


def _row(
    address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, histogram: bool, hashed: bool
) -> tuple[tuple[Any, ...], int, Array | None]:
    """Return the values of a row, and the histogram's offset and counts (None when it is absent)."""
    _check(address, dtype, shape, strides)
    numel = math.prod(shape)
    tables = np.zeros(BUCKETS, np.int64) if histogram and numel < 1 << 32 else None
    m = scaled = Moments()
    power = 0
    if numel:
        base, runs = plan(address, dtype, shape, strides)
        with np.errstate(all="ignore"):
            m = _moments(base, dtype, runs, 0, tables)
            power = scale_power(dtype, m)
            scaled = _moments(base, dtype, runs, power, None) if power else m
    offset, counts = trimmed(tables) if tables is not None else (0, None)
    content = hash_of_bytes(logical_bytes(address, dtype, shape, strides)) if hashed else ABSENT
    return (numel, m.nan, m.posinf, m.neginf, m.zeros, *finished(m, scaled, power), content), offset, counts


def hash_bytes(address: int, count: int) -> int:
    """Return the content hash of bytes."""
    return hash_of_bytes(logical_bytes(address, _BYTE, (count,), None))


def reduce(
    row_address: int,
    hist_address: int,
    address: int,
    dtype: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    hash: bool = False,
) -> tuple[int, int]:
    """Write the row at `row_address` and the buckets at `hist_address` (0: none); return their offset and number."""
    if not row_address:
        raise ValueError(f"row_address is 0; it must point to room for {len(FIELDS)} eight-byte values")
    row, offset, counts = _row(address, dtype, shape, strides, bool(hist_address), hash)
    values = np.array(row, ROW)
    ctypes.memmove(row_address, values.ctypes.data, values.nbytes)
    if counts is None:
        return 0, -1
    if counts.size:
        ctypes.memmove(hist_address, counts.ctypes.data, counts.nbytes)
    return offset, counts.size


_HEADER: Final = ("rows", "row_capacity", "hist", "hist_capacity", "dims", "dims_capacity", "nonfinite", "time", "keys",
                  "hash_probes")  # fmt: skip
_AT: Final = {name: i for i, name in enumerate(_HEADER)}


def _has_room(header: Array, key: int, ndim: int, counts: int) -> bool:
    hist, dims = header[_AT["hist"]] + counts, header[_AT["dims"]] + ndim
    return bool(
        header[_AT["rows"]] < header[_AT["row_capacity"]]
        and key < header[_AT["keys"]]
        and hist <= min(header[_AT["hist_capacity"]], 2**31 - 1)
        and dims <= min(header[_AT["dims_capacity"]], 2**31 - 1)
    )


def _put_bit(bitmap: Array, i: int, on: bool) -> None:
    byte, bit = int(bitmap[i >> 3]), 1 << (i & 7)
    bitmap[i >> 3] = byte | bit if on else byte & ~bit


def _extend(table: Any, ends: str, arena: str, used: str, i: int, values: Array | tuple[int, ...]) -> None:
    start = int(table.header[_AT[used]])
    end = start + len(values)
    getattr(table, arena)[start:end] = values
    getattr(table, ends)[i + 1] = end
    table.header[_AT[used]] = end


def append(
    table: Any,
    key: int,
    probes: int,
    recomputed: bool | int,
    dtype: int,
    shape: tuple[int, ...],
    row: Any,
    hist_offset: int,
    hist_counts: Array | None,
) -> int:
    """Append a row of known values (a `statistics.ROW`, or its numbers); its index, or -1 when the table is full."""
    if not _has_room(table.header, key, len(shape), 0 if hist_counts is None else len(hist_counts)):
        return -1
    values = dict(zip(FIELDS, row.item() if isinstance(row, np.void) else tuple(row), strict=True))
    header = table.header
    i, call, nonfinite = int(header[_AT["rows"]]), 2 * key + bool(recomputed), sum(values[name] for name in NONFINITE)
    table.key[i], table.call[i], table.seq[i] = key, table.calls[call], i
    table.calls[call] += 1
    table.dtype[i], table.probes[i] = dtype, probes
    table.time[i] = header[_AT["time"]] or time.time_ns() // 1000
    for name, value in values.items():
        getattr(table, name)[i] = value
    for condition in CONDITIONS:
        _put_bit(getattr(table, condition), i, bool(defined_rows(condition, values)))
    _put_bit(table.recomputed, i, bool(recomputed))
    _put_bit(table.hist_valid, i, hist_counts is not None)
    table.hist_offset[i] = hist_offset
    table.cost[i] = 0
    _extend(table, "hist_ends", "hist_counts", "hist", i, () if hist_counts is None else hist_counts)
    _extend(table, "dims_ends", "dims", "dims", i, shape)
    header[_AT["nonfinite"]] += nonfinite > 0
    header[_AT["rows"]] = i + 1
    return i


def record(
    table: Any,
    key: int,
    probes: int,
    want: int,
    recomputed: bool | int,
    dtype: int,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> int:
    """Append a row to `table` (an object with the columns as arrays) and return its index, or -1 when it is full."""
    begin = time.perf_counter_ns()
    if key < 0:
        raise ValueError(f"key is negative: {key}")
    hashed = bool(probes & int(table.header[_AT["hash_probes"]]))
    row, offset, counts = _row(address, dtype, shape, strides, bool(want & 1), hashed)
    if not _has_room(table.header, key, len(shape), 0 if counts is None else len(counts)):
        return -1
    i = append(table, key, probes, recomputed, dtype, shape, row=row, hist_offset=offset, hist_counts=counts)
    table.cost[i] = time.perf_counter_ns() - begin + _IN_PYTHON
    return i


def record_tensor(table: Any, key: int, probes: int, want: int, recomputed: bool | int, tensor: object) -> int:
    """Leave every tensor to `record`."""
    return -2


def use_exchange(capsule: object) -> bool:
    """Use no exchange API."""
    return False


class RecorderState:
    """The recorder's state that hooks read: its open step, and whether any thread has a step of its own."""

    current: Any
    per_thread = False


class StepState:
    """The state of a recorded step that hooks read."""

    __slots__ = ("armed", "closed", "hist")
    armed: int
    hist: int
    closed: bool


class NativeHook:
    """Stand for the C extension's class of hooks: the subclass's own `__call__` does everything."""

    __slots__ = ("call", "index", "place", "step")
    step: Any
    place: Any
    call: int
    index: int

    def connect(self, reader: object, python: object, position: int) -> None:
        """Do nothing."""

    def use_point(self, key: int, probes: int, keeping: int) -> None:
        """Do nothing."""

    def keep_whole(self, probes: int) -> None:
        """Do nothing."""

    def await_gradients(self, hook: NativeHook, probes: int) -> None:
        """Do nothing."""


Reader = ModeCall = None  # used by C only


class ModuleCall:
    """A running module: its path, its sites, and how many operations of each kind it has done."""

    __slots__ = ("counts", "owner", "path", "sites", "visible")

    def __init__(
        self, owner: object, path: str, sites: dict[str, list[Any]], visible: bool, counts: dict[str, int]
    ) -> None:
        self.owner = owner
        self.path = path
        self.sites = sites
        self.visible = visible
        self.counts = counts


class RunningCalls:
    """The modules that are running in a thread, innermost last, and whether its function mode is active."""

    __slots__ = ("calls", "is_on", "mode")

    def __init__(self, *stack: object) -> None:
        self.calls: list[ModuleCall] = []
        self.is_on = False
        self.mode: object = None


class ScopeHook:
    """Stand for the C extension's class of hooks around modules."""

    __slots__ = ()

    def connect(self, reader: object, python: object, running: object, visibility: object, owner: object) -> None:
        """Do nothing."""

    def use_call(self, call: ModuleCall, generation: int) -> None:
        """Do nothing."""


def level() -> str:
    """Return the only level there is here."""
    return LEVELS[0]


def set_level(name: str) -> None:
    """Accept `numpy` and nothing else."""
    if name not in LEVELS:
        raise ValueError(f"no kernel level {name!r} without the C extension; see LEVELS")


def threads() -> int:
    """Return how many threads a reduction uses: always one."""
    return 1


def set_threads(number: int) -> None:
    """Accept any number; NumPy uses one thread, and results do not depend on it."""
    if number < 1:
        raise ValueError(f"threads must be at least 1, not {number}")


def address(array: object) -> int:
    """Nothing sooner than NumPy."""
    return 0


def borrow(address: int, threads: int) -> None:
    """Accept a framework's threads, and do without them."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
