"""The reduction kernel in NumPy: slower than the C twin, and the same in every bit.

It follows `_kernel.c` step by step, since equal results need equal roundings: blocks of 4096 elements, lanes that are
added in a fixed order, floats flushed into doubles after eight additions, Chan's formula between blocks and chunks.
Where the C code loops over elements, whole chunks are handled here by one NumPy call per step.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.reduce.histogram import BUCKETS
from tensortap.types import DTYPE_CODE, DTYPES

Array = npt.NDArray[Any]

LEVELS: Final = ("numpy",)
BLOCK: Final = 4096
CHUNK: Final = 1 << 17
_FOLDED: Final = 16
_MAX_DIMS: Final = 64
_ALMOST: Final = 1 - 2.0**-44  # one, but for what rounding may have added


class _Way(NamedTuple):
    """How one element type is added up: how many lanes, and how many additions before a flush into doubles."""

    lanes: int
    run: int


_WAYS: Final = {np.dtype(np.float32): _Way(32, 8), np.dtype(np.float64): _Way(16, BLOCK // 16)}


@dataclass(slots=True)
class Moments:
    """Counts and moments of some elements: `n` of them finite."""

    n: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    min: float = math.inf
    max: float = -math.inf
    mean: float = 0.0
    m2: float = 0.0
    l1: float = 0.0

    def add(self, other: Moments) -> None:
        """Chan's formula, in the same order of operations as `merge` in C."""
        self.nan += other.nan
        self.posinf += other.posinf
        self.neginf += other.neginf
        self.zeros += other.zeros
        if other.n == 0:
            return
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)
        self.l1 += other.l1
        if self.n == 0:
            self.n, self.mean, self.m2 = other.n, other.mean, other.m2
            return
        na, nb = float(self.n), float(other.n)
        n, delta = na + nb, other.mean - self.mean
        self.mean += delta * (nb / n)
        self.m2 += other.m2 + delta * delta * (na * (nb / n))
        self.n += other.n


# --- from memory to chunks of values ------------------------------------------------------------


def _fp8(mantissa_bits: int, bias: int, nan: tuple[int, ...], inf: int = -1) -> Array:
    code = np.arange(256)
    mantissa, exponent = code & ((1 << mantissa_bits) - 1), (code & 0x7F) >> mantissa_bits
    whole = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    size = np.ldexp(whole.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits)
    size[(code & 0x7F) == inf] = np.inf
    value: Array = np.where(code & 0x80, -size, size).astype(np.float32)
    value[list(nan)] = np.nan
    return value


FP8: Final = {
    DTYPE_CODE["float8_e4m3fn"]: _fp8(3, 7, (0x7F, 0xFF)),
    DTYPE_CODE["float8_e5m2"]: _fp8(2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), inf=0x7C),
    DTYPE_CODE["float8_e4m3fnuz"]: _fp8(3, 8, (0x80,)),
    DTYPE_CODE["float8_e5m2fnuz"]: _fp8(2, 16, (0x80,)),
}
_UNSIGNED: Final = {1: "u1", 2: "u2"}
_RAW: Final = tuple(
    np.dtype(_UNSIGNED[d.itemsize] if d.name.startswith(("bfloat", "float8", "bool")) else d.name) for d in DTYPES
)
_WIDE_RANGE: Final = (DTYPE_CODE["float64"], DTYPE_CODE["complex128"])


def plan(
    address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[int, list[tuple[int, int]]]:
    """The first address and the (length, stride) runs, largest stride outermost, merged where they can be."""
    itemsize, numel = DTYPES[dtype].itemsize, math.prod(shape)
    if strides is None:
        return address, [(numel, itemsize)]
    runs: list[tuple[int, int]] = []
    for length, stride in zip(shape, strides, strict=True):
        if length != 1:
            address += (length - 1) * stride if stride < 0 else 0
            runs.append((length, abs(stride)))
    merged: list[tuple[int, int]] = []
    for length, stride in sorted(runs, key=lambda run: -run[1]):
        if merged and merged[-1][1] == length * stride:
            length *= merged.pop()[0]
        merged.append((length, stride))
    return address, merged or [(numel, itemsize)]


def _view(address: int, dtype: int, runs: list[tuple[int, int]]) -> Array:
    raw = _RAW[dtype]
    span = sum((length - 1) * stride for length, stride in runs) + raw.itemsize
    memory: Any = (ctypes.c_char * span).from_address(address)
    view: Array = np.ndarray([length for length, _ in runs], raw, memory, 0, [stride for _, stride in runs])
    view.flags.writeable = False
    return view


def _magnitude64(z: Array) -> Array:
    re, im = z.real.astype(np.float64), z.imag.astype(np.float64)
    size: Array = np.sqrt(re * re + im * im)
    size[np.isinf(re) | np.isinf(im)] = np.inf
    return size


def _magnitude128(z: Array) -> Array:
    re, im = np.abs(z.real), np.abs(z.imag)
    most = np.where(re > im, re, im)
    power = np.where(most > 2.0**500, -600, np.where(most < 2.0**-400, 600, 0))
    a, b = np.ldexp(re, power), np.ldexp(im, power)
    size: Array = np.ldexp(np.sqrt(a * a + b * b), -power)
    size[np.isinf(re) | np.isinf(im)] = np.inf
    return size


def _values(raw: Array, dtype: int) -> Array:
    """A chunk as float32 where that is exact, else as float64."""
    name = DTYPES[dtype].name
    if name in ("float32", "float64"):
        return raw
    if name == "bfloat16":
        return np.asarray(raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in FP8:
        return np.asarray(FP8[dtype][raw])
    if name == "bool":
        return np.asarray(raw != 0, np.float32)
    if name == "complex64":
        return _magnitude64(raw)
    if name == "complex128":
        return _magnitude128(raw)
    return np.asarray(raw, np.float32 if raw.dtype.itemsize <= 2 else np.float64)


def _chunks(address: int, dtype: int, runs: list[tuple[int, int]]) -> Iterator[Array]:
    view = _view(address, dtype, runs)
    for begin in range(0, view.size, CHUNK):
        piece = view[begin : begin + CHUNK] if view.ndim == 1 else view.flat[begin : begin + CHUNK]
        yield _values(np.ascontiguousarray(piece), dtype)


# --- moments ------------------------------------------------------------------------------------


def _fold(lanes: Array) -> Array:
    while (half := lanes.shape[-1] // 2) >= 1:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _padded(x: Array, step: int) -> Array:
    short = -x.shape[-1] % step
    return np.pad(x, ((0, 0), (0, short))) if short else x


def _sums(x: Array) -> Array:
    """Pass one's sum of each block: lanes added step by step, then folded."""
    lanes = _WAYS[x.dtype].lanes
    steps = _padded(x, lanes).reshape(len(x), -1, lanes)
    total = np.zeros((len(x), lanes), x.dtype)
    for i in range(steps.shape[1]):
        total += steps[:, i]
    return _fold(total)


def _flushed(x: Array) -> Array:
    """Sum of each block in double: runs of additions in x's own type, folded to 16 lanes and flushed."""
    way = _WAYS[x.dtype]
    runs = _padded(x, way.lanes * way.run).reshape(len(x), -1, way.run, way.lanes)
    short = np.zeros((len(x), runs.shape[1], way.lanes), x.dtype)
    for i in range(way.run):
        short += runs[:, :, i]
    if way.lanes > _FOLDED:
        short = short[..., :_FOLDED] + short[..., _FOLDED:]
    total = np.zeros((len(x), _FOLDED))
    for i in range(runs.shape[1]):
        total += short[:, i]
    return _fold(total)


def _centre(x: Array, sums: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """Mean, squared deviations and sum of magnitudes of each block, by one or two rounds around a shift."""
    n = x.shape[1]
    shift = np.clip(sums / x.dtype.type(n), low, high)
    mean, m2, l1, again = _round(x, shift)
    if again.any():
        x, shift = x[again], np.clip(mean[again].astype(x.dtype), low[again], high[again])
        mean[again], m2[again], l1[again], _ = _round(x, shift)
    return mean, np.where(m2 > 0, m2, 0.0), l1


def _round(x: Array, shift: Array) -> tuple[Array, Array, Array, Array]:
    deviation = x - shift[:, None]
    d, q, a = _flushed(deviation), _flushed(deviation * deviation), _flushed(np.abs(x))
    offset = d / x.shape[1]
    bias = d * offset
    return shift.astype(np.float64) + offset, q - bias, a, bias > 0.5 * q


def _finite_blocks(x: Array) -> list[Moments]:
    """Blocks (the rows of x) whose elements are all finite."""
    n = x.shape[1]
    low, high = x.min(axis=1), x.max(axis=1)
    zeros = n - np.count_nonzero(x, axis=1)
    mean, m2, l1 = low.astype(np.float64), np.zeros(len(x)), n * np.abs(low.astype(np.float64))
    most = np.maximum(np.abs(low), np.abs(high))
    varied = low != high
    wide = varied & ((most < 2.0**-38) | (most > 2.0**60)) if x.dtype == np.float32 else np.zeros(len(x), bool)
    for chosen, values in ((varied & ~wide, x), (wide, x.astype(np.float64) if wide.any() else x)):
        if chosen.any():
            block, ends = values[chosen], values.dtype.type
            mean[chosen], m2[chosen], l1[chosen] = _centre(
                block, _sums(block), low[chosen].astype(ends), high[chosen].astype(ends)
            )
    rows = zip(zeros, low, high, mean, m2, l1, strict=True)
    return [Moments(n, 0, 0, 0, int(z), *map(float, rest)) for z, *rest in rows]


def _any_block(x: Array) -> Moments:
    finite = x[np.isfinite(x)]
    moments = _finite_blocks(finite[None])[0] if finite.size else Moments()
    moments.nan = int(np.count_nonzero(np.isnan(x)))
    moments.posinf = int(np.count_nonzero(x == np.inf))
    moments.neginf = int(np.count_nonzero(x == -np.inf))
    return moments


def _blocks(x: Array) -> Iterator[Moments]:
    full = x[: x.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    clean: Array = np.asarray(np.isfinite(full).all(axis=1))
    done = iter(_finite_blocks(full[clean]) if clean.any() else ())
    for block, is_clean in zip(full, clean, strict=True):
        yield next(done) if is_clean else _any_block(block)
    if x.size > full.size:
        yield _any_block(x[full.size :])


def _moments(address: int, dtype: int, runs: list[tuple[int, int]], power: int, tables: Array | None) -> Moments:
    total = Moments()
    for chunk in _chunks(address, dtype, runs):
        part = Moments()
        for block in _blocks(np.ldexp(chunk, power) if power else chunk):
            part.add(block)
        total.add(part)
        if tables is not None:
            tables += _buckets(chunk)
    return total


def _scale(dtype: int, m: Moments) -> int:
    if dtype not in _WIDE_RANGE or m.n == 0:
        return 0
    most = max(abs(m.min), abs(m.max))
    return -600 if most > 2.0**480 else 600 if 0 < most < 2.0**-400 else 0


def finished(m: Moments, scaled: Moments, power: int) -> tuple[float, ...]:
    """The six statistics: ends from the elements as they are, moments from the scaled ones."""
    if m.n == 0:
        return math.nan, math.nan, math.nan, math.nan, 0.0, 0.0
    low, high, n, unscale = m.min + 0.0, m.max + 0.0, float(m.n), 2.0**-power
    mean = min(max(scaled.mean * unscale + 0.0, low), high)
    std, l1 = math.sqrt(scaled.m2 / n) * unscale, scaled.l1 * unscale
    l2 = math.sqrt(scaled.m2 + n * scaled.mean * scaled.mean)
    over = l2 * unscale == math.inf and l2 * _ALMOST * unscale < math.inf  # by rounding only
    return low, high, mean, std, l1, sys.float_info.max if over else l2 * unscale


# --- histogram ----------------------------------------------------------------------------------


def _cut(x: Array) -> Array:
    """The bits of doubles cut (never rounded) to floats; the smallest float for what is below it and no zero."""
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
    """The run of buckets in use, by its offset, of the counts of all."""
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
    address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, histogram: bool
) -> tuple[tuple[Any, ...], int, Array | None]:
    """The eleven values of a row, and the histogram's offset and counts (None when it is absent)."""
    _check(address, dtype, shape, strides)
    numel = math.prod(shape)
    tables = np.zeros(BUCKETS, np.int64) if histogram and numel < 1 << 32 else None
    m = scaled = Moments()
    power = 0
    if numel:
        base, runs = plan(address, dtype, shape, strides)
        with np.errstate(all="ignore"):
            m = _moments(base, dtype, runs, 0, tables)
            power = _scale(dtype, m)
            scaled = _moments(base, dtype, runs, power, None) if power else m
    offset, counts = trimmed(tables) if tables is not None else (0, None)
    return (numel, m.nan, m.posinf, m.neginf, m.zeros, *finished(m, scaled, power)), offset, counts


def reduce(
    row_address: int,
    hist_address: int,
    address: int,
    dtype: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> tuple[int, int]:
    """Write the row at `row_address` and the buckets at `hist_address` (0: none); return their offset and number."""
    if not row_address:
        raise ValueError("row_address is 0; it must point to room for 11 eight-byte values")
    row, offset, counts = _row(address, dtype, shape, strides, bool(hist_address))
    (ctypes.c_int64 * 5).from_address(row_address)[:] = list(row[:5])
    (ctypes.c_double * 6).from_address(row_address + 40)[:] = list(row[5:])
    if counts is None:
        return 0, -1
    if counts.size:
        ctypes.memmove(hist_address, counts.ctypes.data, counts.nbytes)
    return offset, counts.size


_HEADER: Final = ("rows", "row_capacity", "hist", "hist_capacity", "dims", "dims_capacity", "nonfinite", "time", "keys")
_AT: Final = {name: i for i, name in enumerate(_HEADER)}
_ROW: Final = ("numel", "nan", "posinf", "neginf", "zeros", "min", "max", "mean", "std", "l1", "l2")


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
    """Write a row of known values (a `kernels.ROW` or eleven numbers) to a table; its index, or -1 when it is full."""
    if not _has_room(table.header, key, len(shape), 0 if hist_counts is None else len(hist_counts)):
        return -1
    values = row.item() if isinstance(row, np.void) else tuple(row)
    header = table.header
    i, call, nonfinite = int(header[_AT["rows"]]), 2 * key + bool(recomputed), sum(values[1:4])
    table.key[i], table.call[i], table.seq[i] = key, table.calls[call], i
    table.calls[call] += 1
    table.dtype[i], table.probes[i] = dtype, probes
    table.time[i] = header[_AT["time"]] or time.time_ns() // 1000
    for name, value in zip(_ROW, values, strict=True):
        getattr(table, name)[i] = value
    _put_bit(table.recomputed, i, bool(recomputed))
    _put_bit(table.defined, i, values[0] > nonfinite and not math.isnan(values[5]))  # a meta tensor has none
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
    row, offset, counts = _row(address, dtype, shape, strides, bool(want & 1))
    if not _has_room(table.header, key, len(shape), 0 if counts is None else len(counts)):
        return -1
    i = append(table, key, probes, recomputed, dtype, shape, row, offset, counts)
    table.cost[i] = time.perf_counter_ns() - begin
    return i


def level() -> str:
    """The only level there is here."""
    return LEVELS[0]


def set_level(name: str) -> None:
    """Accept `numpy` and nothing else."""
    if name not in LEVELS:
        raise ValueError(f"no kernel level {name!r} without the C extension; see LEVELS")


def threads() -> int:
    """How many threads a reduction uses: always one."""
    return 1


def set_threads(number: int) -> None:
    """Accept any number; the NumPy twin uses one thread, and results do not depend on it."""
    if number < 1:
        raise ValueError(f"threads must be at least 1, not {number}")


def address(array: object) -> int:
    """Nothing sooner than NumPy."""
    return 0


def borrow(address: int, threads: int) -> None:
    """Accept a framework's threads, and do without them."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
