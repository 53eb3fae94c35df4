"""The kernel on one array, and the same worked out exactly."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensortap.reduce import histogram as buckets
from tensortap.reduce.statistics import ROW
from tensortap.types import DTYPE_CODE

_kernel = pytest.importorskip("tensortap.reduce._kernel")

NUMPY = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPE_CODE}
SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 9000, 131071, 131072, 131073)
COUNTS = ("numel", "nan", "posinf", "neginf", "zeros")


def run(array: np.ndarray, module: Any = _kernel, name: str | None = None, histogram: bool = True):
    """The row, offset and counts of an array as it lies in memory."""
    row, hist = np.zeros(1, ROW), np.zeros(buckets.BUCKETS, np.uint32)
    code = DTYPE_CODE[name or str(array.dtype)]
    address = array.ctypes.data
    offset, length = module.reduce(
        row.ctypes.data, hist.ctypes.data if histogram else 0, address, code, array.shape, array.strides
    )
    return row[0], offset, hist[:length].copy() if length >= 0 else None


def same(a, b) -> bool:
    return a[0].tobytes() == b[0].tobytes() and a[1] == b[1] and np.array_equal(a[2], b[2])


def wide(array: np.ndarray) -> np.ndarray:
    """All elements as float64, complex ones by magnitude."""
    flat = np.asarray(array).reshape(-1)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if flat.dtype.kind == "c":
            z = flat.astype(np.complex128)
            return np.where(np.isinf(z.real) | np.isinf(z.imag), np.inf, np.abs(z))
        return flat.astype(np.float64)


def exact_moments(values: np.ndarray) -> tuple[float, float, float, float]:
    """Mean, std, l1 and l2 by exact summation of scaled values."""
    power = int(np.frexp(np.max(np.abs(values)))[1])
    scaled = np.ldexp(values, -power)
    n = len(values)
    mean = math.fsum(scaled) / n
    deviation = scaled - mean
    m2 = math.fsum(deviation * deviation) - math.fsum(deviation) ** 2 / n
    spread, norm = math.sqrt(max(m2, 0) / n), math.sqrt(math.fsum(scaled * scaled))
    with np.errstate(over="ignore"):
        return tuple(float(np.ldexp(v, power)) for v in (mean, spread, math.fsum(np.abs(scaled)), norm))


def check(array: np.ndarray, name: str | None = None, tolerance: float = 1e-6) -> None:
    """Counts, ends and moments of the active kernel against exact sums over the same elements."""
    row = run(array, name=name)[0]
    values = wide(array)
    finite = values[np.isfinite(values)]
    expected = (values.size, np.isnan(values).sum(), (values == np.inf).sum(), (values == -np.inf).sum())
    assert tuple(row[c] for c in COUNTS) == (*expected, (values == 0).sum())
    if not finite.size:
        assert all(math.isnan(row[s]) for s in ("min", "max", "mean", "std"))
        assert row["l1"] == row["l2"] == 0.0
        return
    mean, std, l1, l2 = exact_moments(finite)
    tiny = 4 * 2.0**-1074
    if name == "complex128" or array.dtype == np.complex128:
        assert row["min"] == pytest.approx(finite.min(), rel=1e-15) and row["max"] == pytest.approx(
            finite.max(), rel=1e-15
        )
    else:
        assert row["min"] == finite.min() and row["max"] == finite.max()
    assert abs(row["mean"] - mean) <= tolerance * std + 4e-16 * abs(mean) + tiny + (
        finite.min() == finite.max()
    ) * 1e-15 * abs(mean)
    assert row["std"] == pytest.approx(
        std, rel=tolerance, abs=max(2e-16 * abs(mean), tiny) if tolerance < 1e-9 else max(1e-12 * abs(mean), tiny)
    )
    assert row["l1"] == pytest.approx(l1, rel=tolerance, abs=tiny)
    assert row["l2"] == pytest.approx(l2, rel=tolerance, abs=tiny)


def naive_histogram(values: np.ndarray) -> dict[int, int]:
    """Buckets one by one: the largest float32 not above the magnitude, then its bits."""
    out: dict[int, int] = {}
    for value in values.tolist():
        if value == 0 or not math.isfinite(value):
            continue
        size = abs(value)
        with np.errstate(over="ignore"):
            near = np.float32(size)
        if not np.isfinite(near) or float(near) > size:
            near = np.nextafter(near, np.float32(0))
        j = 2 * (int(near.view(np.uint32)) >> 20) + (value < 0)
        out[j] = out.get(j, 0) + 1
    return out


def random_bits(name: str, n: int, seed: int = 0) -> np.ndarray:
    """Any bit pattern: every kind of value the type has."""
    dtype = NUMPY[name]
    raw = np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
    return (raw & 1).view(bool) if name == "bool" else raw.view(dtype)


def ways():
    return itertools.product(_kernel.LEVELS, (1, 2, 4))
