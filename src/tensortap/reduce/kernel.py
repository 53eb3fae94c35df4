"""The kernel in use: the C extension where it was built, otherwise NumPy, which gives the same results.

`TENSORTAP_KERNEL` = `avx512`, `avx2`, `plain` or `numpy` forces one; `ACTIVE` says which was chosen.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensortap.reduce import numpy_kernel
from tensortap.reduce.statistics import CONDITIONS, FIELDS, REGISTRY, ROW

try:
    from tensortap.reduce import _kernel
except ImportError:
    _kernel = None  # type: ignore[assignment]
if _kernel is not None and (getattr(_kernel, "STATISTICS", None) != FIELDS or not hasattr(_kernel, "RecorderState")):
    _kernel = None  # type: ignore[assignment]  # built from other sources: its rows have another layout

# A step table's header: these counters, room for more, then the address of each column in this order.
HEADER: Final = (
    "rows", "row_capacity", "hist_used", "hist_capacity", "dims_used", "dims_capacity", "nonfinite", "fixed_time",
    "key_capacity", "hash_probes",
)  # fmt: skip
FIRST_POINTER: Final = 16
COLUMNS: Final = (
    ("key", np.int32), ("call", np.int32), ("seq", np.int32), ("dtype", np.int8), ("recomputed", np.uint8),
    ("probes", np.uint64), ("time", np.int64),
    *((statistic.name, statistic.dtype) for statistic in REGISTRY),
    *((condition, np.uint8) for condition in CONDITIONS),
    ("hist_offset", np.int32), ("hist_valid", np.uint8), ("hist_ends", np.int32), ("hist_counts", np.uint32),
    ("dims_ends", np.int32), ("dims", np.int64), ("calls", np.int32), ("cost", np.int64),
)  # fmt: skip
HEADER_LENGTH: Final = FIRST_POINTER + len(COLUMNS)

_MISSING = (
    "tensortap's C kernel is not built, or from other sources, so NumPy reduces the tensors: the same results, but "
    "slower. Install a C compiler and run `pip install --force-reinstall --no-binary tensortap tensortap`."
)


def _choose(forced: str) -> str:
    """Return the name of the kernel to use; the C extension is set to its level."""
    available = (*(_kernel.LEVELS if _kernel is not None else ()), "numpy")
    if forced and forced not in available:
        raise ValueError(f"TENSORTAP_KERNEL={forced!r} is not available here; choose one of {', '.join(available)}")
    chosen = forced or available[0]
    if chosen == "numpy":
        return chosen
    _kernel.set_level(chosen)
    return f"c:{chosen}"


_FORCED: Final = os.environ.get("TENSORTAP_KERNEL", "")
ACTIVE: Final[str] = _choose(_FORCED)
_warned = ACTIVE != "numpy" or bool(_FORCED)


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(_MISSING, RuntimeWarning, stacklevel=3)


def _numpy_reduce(*args: Any) -> tuple[int, int]:
    _warn_once()
    return numpy_kernel.reduce(*args)


def _numpy_record(*args: Any) -> int:
    _warn_once()
    return numpy_kernel.record(*args)


reduce = _numpy_reduce if ACTIVE == "numpy" else _kernel.reduce
"""`reduce(row_address, hist_address, address, dtype, shape, strides, hash=False) -> (hist_offset, hist_length)`.

Writes a `ROW` and, unless `hist_address` is 0, up to `buckets.BUCKETS` uint32 counts; a length of -1 says that no
histogram was taken. `strides` are in bytes; None means one dense run.
"""

record = _numpy_record if ACTIVE == "numpy" else _kernel.record
"""`record(bound, key, probes, want, recomputed, dtype, address, shape, strides) -> row`.

Reduces and appends a row to the step table that `bind` was given; -1, with nothing written, says that the table has
to grow first. Bit 1 of `want` asks for the histogram; the table's header says which probes ask for the hash.
"""

record_tensor = numpy_kernel.record_tensor if ACTIVE == "numpy" else _kernel.record_tensor
"""`record_tensor(bound, key, probes, want, recomputed, tensor) -> row`: as `record`, for a framework's tensor.

The tensor is read by DLPack's C exchange API (`use_exchange`). −2, with nothing written, says that it is no dense
tensor on the host, or that there is no such API: then Python has to ask for its address, shape and strides.
"""

use_exchange = numpy_kernel.use_exchange if ACTIVE == "numpy" else _kernel.use_exchange
"""`use_exchange(capsule) -> bool`: read tensors by the exchange API of a framework, if its version is known."""

record_many = None if ACTIVE == "numpy" else _kernel.record_many
"""`record_many(bound, entries_address, tensors, first) -> next`: record PyTorch tensors in one call.

Each of the entries is four int64: key (negative: leave it to the caller), probes, whether a histogram is wanted, and
the row, which is written. It stops at the first tensor that it cannot read or has no room for.
"""

copy_tensors = None if ACTIVE == "numpy" else getattr(_kernel, "copy_tensors", None)
"""`copy_tensors(copies_address, buffer_address, buffer_size, tensors) -> size`: copy small dense PyTorch tensors.

Each of the copies is four int64: the offset in the buffer (−1: left to the caller, as every None is), the number of
elements, the dtype, and whether `record_changes` has subtracted. The buffer must have the returned size.
"""

record_changes = None if ACTIVE == "numpy" else getattr(_kernel, "record_changes", None)
"""`record_changes(bound, entries_address, copies_address, buffer_address, norms_address, tensors, first) -> next`.

Records what tensors have changed by since `copy_tensors`, as `record_many` records tensors, and writes the L2 norms of
the copies. The differences take the place of the copies.
"""

norms = None if ACTIVE == "numpy" else getattr(_kernel, "norms", None)
"""`norms(tensors) -> list`: the L2 norm of each of several PyTorch tensors; None for one that only Python can read."""

if TYPE_CHECKING:
    RecorderState = _kernel.RecorderState
    StepState = _kernel.StepState
    NativeHook = _kernel.NativeHook
    Reader = _kernel.Reader
    ModuleCall = _kernel.ModuleCall
    RunningCalls = _kernel.RunningCalls
    ScopeHook = _kernel.ScopeHook
    ModeCall = _kernel.ModeCall
else:
    _hooks = numpy_kernel if ACTIVE == "numpy" else _kernel
    RecorderState, StepState = _hooks.RecorderState, _hooks.StepState
    NativeHook, Reader = _hooks.NativeHook, _hooks.Reader
    ModuleCall, RunningCalls, ScopeHook, ModeCall = (
        _hooks.ModuleCall, _hooks.RunningCalls, _hooks.ScopeHook, _hooks.ModeCall
    )  # fmt: skip
"""The base class of hooks that C answers as far as it can. See csrc/hook.h.

`connect(reader, python, position)` says what to ask, what to call where C gives up, and where among a call's arguments
the tensor is; `use_point(key, probes, keeping)` says how it is recorded, `keep_whole(probes)` for which of the probes
that keep elements C copies the whole tensor.
`await_gradients(hook, probes)` has it put a copy of another hook on the node of each output (csrc/await.h).
`Reader(compiler, tracing, …)` is what they ask; without C None. `RecorderState` and `StepState` are the
base classes of the recorder and of its open steps, which they ask without a Python call.

`ModuleCall` and `RunningCalls` are the modules that run, `ScopeHook` is the base class of the hooks that begin and end
their calls, and `ModeCall` the `__torch_function__` of a mode, without C None. See csrc/ops.h.
"""

show_call = None if ACTIVE == "numpy" else _kernel.show_call
"""`show_call(type, function) -> bool`: show a function as `__call__` of a class of hooks, called by C alone."""

reduce_columns = None if ACTIVE == "numpy" else getattr(_kernel, "reduce_columns", None)
"""`reduce_columns(out_address, address, dtype, rows, width)`; None without C. See reduce/columns.py."""

round_bfloat16 = None if ACTIVE == "numpy" else getattr(_kernel, "round_bfloat16", None)
"""`round_bfloat16(out_address, address, count)`: float32 to the nearest bfloat16, without the GIL; None without C."""

hash_bytes = numpy_kernel.hash_bytes if ACTIVE == "numpy" else getattr(_kernel, "hash_bytes", numpy_kernel.hash_bytes)
"""`hash_bytes(address, count) -> int`: the content hash of bytes, in C without the GIL."""

add_histograms = None if ACTIVE == "numpy" else getattr(_kernel, "add_histograms", None)
"""`add_histograms(dense, groups, buckets, group, first, ends, rows, counts, size)`: by addresses; None without C."""
gather_rows = None if ACTIVE == "numpy" else getattr(_kernel, "gather_rows", None)
"""`gather_rows(out_address, addresses_address, count, size)`: copy rows from anywhere in memory; None without C."""

borrow = numpy_kernel.borrow if ACTIVE == "numpy" else _kernel.borrow
"""`borrow(address, threads)`: let a framework's threads help with large tensors.

The address is that of a function like libgomp's `GOMP_parallel`; 0 means threads of our own. The results are the same.
"""
MOST_THREADS: Final = 64

threads = numpy_kernel.threads if ACTIVE == "numpy" else _kernel.threads
"""`threads() -> int`: how many threads a reduction uses at most."""

address = numpy_kernel.address if ACTIVE == "numpy" else _kernel.address
"""`address(array) -> int`: the address of an array's elements, faster than by NumPy; 0 when it is not known."""

memory = None if ACTIVE == "numpy" else getattr(_kernel, "memory", None)
"""`memory(address, size) -> memoryview`: read-only, and valid as long as its owner keeps it; None without C."""

append_rows = None if ACTIVE == "numpy" else getattr(_kernel, "append_rows", None)
"""`append_rows(bound, plan_address, metadata, into, file) -> size`: append a table to a file, as an Arrow message.

The message is made in `into`; where `file` is −1 nothing is written. See csrc/message.h and `store/messages.py`; None
where pyarrow has to write the batch.
"""

crc32: Callable[[Any], int] = zlib.crc32
"""`crc32(data) -> int`: zlib's checksum, by the extension's instructions where they are faster."""
if ACTIVE != "numpy" and getattr(_kernel, "crc32", zlib.crc32)(b"") is not None:
    crc32 = getattr(_kernel, "crc32", zlib.crc32)

settle = None if ACTIVE == "numpy" else getattr(_kernel, "settle", None)
"""`settle(bound, plan_address, step) -> bool`: number the rows of a table. See csrc/closing.h; None without C."""

charge = None if ACTIVE == "numpy" else getattr(_kernel, "charge", None)
"""`charge(bound, totals_address, length) -> seconds`: add up what rows cost by key; None without C."""

reopen = None if ACTIVE == "numpy" else getattr(_kernel, "reopen", None)
"""`reopen(bound, capacity, time, hash_probes)`: forget all rows of a table and take others; None without C."""

xla = None if ACTIVE == "numpy" else _kernel.xla
"""`xla() -> capsule`: the function that programs compiled by XLA call on the host; None without the C extension."""

library: Final[str | None] = None if ACTIVE == "numpy" else _kernel.__file__
"""The library of operators to register with sessions of ONNX Runtime; None without the C extension."""


def bind(table: Any) -> Any:
    """Return the first argument of `record` and `commit` for `table`, an object with `header` and the `COLUMNS` as
    arrays.

    Called again whenever the table has replaced an array: the addresses are written into its header here.
    """
    for i, (name, dtype) in enumerate(COLUMNS):
        array = getattr(table, name)
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"column {name!r} must be a contiguous array of {np.dtype(dtype)}, got {array.dtype}")
        table.header[FIRST_POINTER + i] = array.ctypes.data
    return table if ACTIVE == "numpy" else table.header.ctypes.data


def _c_commit(
    bound: int,
    key: int,
    probes: int,
    recomputed: bool | int,
    dtype: int,
    shape: tuple[int, ...],
    row: Any,
    hist_offset: int,
    hist_counts: Any,
) -> int:
    values = row if type(row) is np.void and row.dtype == ROW else np.array(tuple(row), ROW)
    if hist_counts is None:
        histogram = hist_offset, 0, -1
    else:
        hist_counts = np.ascontiguousarray(hist_counts, np.uint32)
        histogram = hist_offset, _kernel.address(hist_counts), len(hist_counts)
    return _kernel.commit(bound, key, probes, recomputed, dtype, shape, _kernel.address(values), *histogram)


commit = numpy_kernel.append if ACTIVE == "numpy" else _c_commit
"""`commit(bound, key, probes, recomputed, dtype, shape, row, hist_offset, hist_counts) -> row`.

Appends a row that was computed elsewhere; `hist_counts` None says it has no histogram. -1, with nothing written, says
that the table has to grow first, or is closed.
"""
