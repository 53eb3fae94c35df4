"""The kernel against float64 NumPy, its levels against each other, and NumPy against all of them."""

from __future__ import annotations

import ctypes
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.reduce import histogram as buckets
from tensortap.reduce import kernel as kernels
from tensortap.reduce import merge, numpy_memory
from tensortap.reduce import numpy_kernel as fallback
from tensortap.reduce.statistics import EMPTY_ROW, ROW, STATISTICS
from tensortap.types import DTYPE_CODE, DTYPES

_kernel = pytest.importorskip("tensortap.reduce._kernel")

settings.register_profile("exact", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("exact")

NUMPY = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPE_CODE}
SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 9000, 131071, 131072, 131073)
COUNTS = ("numel", "nan", "posinf", "neginf", "zeros")


@pytest.fixture(autouse=True)
def _restore():
    level, threads = _kernel.level(), _kernel.threads()
    yield
    _kernel.set_level(level)
    _kernel.set_threads(threads)


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


@pytest.mark.parametrize("name", DTYPE_CODE)
@pytest.mark.parametrize("n", SIZES)
def test_all_ways_agree_in_every_bit(name, n):
    """Every level, every number of threads and NumPy give the same bits."""
    array = random_bits(name, n, seed=n)
    expected = run(array, fallback, name)
    for level, threads in ways():
        _kernel.set_level(level)
        _kernel.set_threads(threads)
        assert same(run(array, name=name), expected), (level, threads)


def drifting(n: int, seed: int) -> np.ndarray:
    """Blocks of every kind, in any order: near zero, around means of their own, equal ones, zeros, non-finite ones."""
    rng = np.random.default_rng(seed)
    kinds = (
        lambda m: rng.standard_normal(m),
        lambda m: rng.standard_normal(m) + rng.choice([-1e6, 1.0, 2.0, 1e3]),
        lambda m: rng.uniform(0, 1, m),
        lambda m: np.full(m, rng.choice([0.0, -0.0, 0.1, -7.0])),
        lambda m: np.where(
            rng.uniform(size=m) < 0.1, rng.choice([np.nan, np.inf, -np.inf], m), 3 + rng.uniform(size=m)
        ),
    )
    pieces = [kinds[rng.integers(len(kinds))](min(4096, n - at)) for at in range(0, n, 4096)]
    return np.concatenate(pieces)


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n", [63, 64, 65, 5000, 40_000, 150_001])
def test_all_ways_agree_whatever_the_pivots(name, n):
    """Blocks that share a pivot and blocks that are read again around their own mean give the same bits everywhere."""
    for seed in range(4):
        with np.errstate(over="ignore"):
            array = drifting(n, seed).astype(NUMPY[name])
        expected = run(array, fallback, name)
        for level in _kernel.LEVELS:
            _kernel.set_level(level)
            assert same(run(array, name=name), expected), (level, seed)


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "uint8", "complex64"])
def test_threads_agree_on_large_tensors(name):
    """Results of a tensor large enough for the pool do not depend on the number of threads."""
    array = (np.random.default_rng(1).standard_normal(1_500_007) * 50).astype(NUMPY[name])
    expected = run(array, fallback, name)
    for level, threads in ways():
        _kernel.set_level(level)
        _kernel.set_threads(threads)
        assert same(run(array, name=name), expected), (level, threads)


@pytest.mark.parametrize("name", DTYPE_CODE)
def test_histogram_is_the_naive_one(name):
    """The histogram is the one a loop over the elements gives, whatever the type."""
    array = random_bits(name, 3000, seed=5)
    _, offset, counts = run(array, name=name)
    values = wide(array) if array.dtype.kind != "c" else magnitudes(array)
    assert {offset + i: int(c) for i, c in enumerate(counts) if c} == naive_histogram(values)
    assert not counts.size or (counts[0] and counts[-1])


def magnitudes(array: np.ndarray) -> np.ndarray:
    """Magnitudes as the kernel rounds them."""
    with np.errstate(all="ignore"):
        return (numpy_memory._magnitude64 if array.dtype == np.complex64 else numpy_memory._magnitude128)(array)


@pytest.mark.parametrize("name", DTYPE_CODE)
@pytest.mark.parametrize("n", [1, 2, 100, 4097, 20000])
def test_statistics_of_every_type(name, n):
    """Counts are exact and moments are right for every type, with whatever non-finite values it has."""
    rng = np.random.default_rng(n)
    array = random_bits(name, n) if name in ("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2") else None
    if array is None:
        array = (rng.standard_normal(n) * 30 + 40).clip(0, 200).astype(NUMPY[name])
    if array.dtype.kind in "fc" and n > 50:
        array[[3, 40]] = np.nan
        array[[7, 8, 9]] = np.inf
        array[11] = -np.inf
    check(array, name, tolerance=1e-12 if name in ("float64", "complex128", "int32", "int64") else 1e-6)


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(width=32)))
def test_any_float32(array):
    """Any float32 values, non-finite ones and subnormals among them."""
    check(array)


@given(hnp.arrays(np.float64, st.integers(1, 300), elements=st.floats(width=64)))
def test_any_float64(array):
    """Any float64 values, up to the ends of the range."""
    check(array, tolerance=1e-12)


@given(hnp.arrays(np.float16, st.integers(1, 600), elements=st.floats(width=16)))
def test_any_float16(array):
    """Any float16 values."""
    check(array)


def merged_row(*rows):
    """Several rows folded into one."""
    table = np.array(list(rows), ROW)
    folded = merge.merge_groups({name: table[name] for name in ROW.names}, np.array([0]))
    return {name: column[0] for name, column in folded.items()}


@given(st.sampled_from(["float32", "float64", "float16"]), st.integers(1, 9000), st.integers(0, 2**32), st.data())
def test_merged_parts_are_the_whole(name, n, seed, data):
    """Rows and histograms of two parts merge to those of the whole: counts exactly, moments to rounding."""
    rng = np.random.default_rng(seed)
    array = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3)).astype(name)
    array[rng.random(n) < 0.02] = rng.choice([np.nan, np.inf, -np.inf, 0.0])
    cut = data.draw(st.integers(0, n))
    whole, *whole_hist = run(array)
    parts = [run(array[:cut]), run(array[cut:])]
    merged = merged_row(*(p[0] for p in parts))
    for column in COUNTS:
        assert merged[column] == whole[column]
    for column in ("min", "max", "mean", "std", "l1", "l2"):
        scale = max(abs(whole["std"]), abs(whole["mean"])) if column == "mean" else 0
        assert merged[column] == pytest.approx(whole[column], rel=1e-6, abs=1e-7 * scale, nan_ok=True)
    offset, counts = buckets.merge(p[1:] for p in parts)
    assert offset == whole_hist[0] and np.array_equal(counts, whole_hist[1])


def test_merging_rows_at_the_ends_of_the_range():
    """Rows whose squares would overflow merge without doing so."""
    array = np.array([1.7e308, -1.7e308, 1.5e308, 1e-300])
    merged = merged_row(run(array[:2])[0], run(array[2:])[0])
    mean, std, _, _ = exact_moments(array)
    assert merged["mean"] == pytest.approx(mean, rel=1e-12)
    assert merged["std"] == pytest.approx(std, rel=1e-12)


def test_merging_nothing():
    """Rows without finite elements add their counts and nothing else."""
    empty = run(np.array([], np.float32))[0]
    bad = run(np.array([np.nan, np.inf], np.float32))[0]
    merged = merged_row(empty, bad)
    assert (merged["numel"], merged["nan"], merged["posinf"], merged["l1"]) == (2, 1, 1, 0.0)
    assert math.isnan(merged["mean"])


def test_large_mean_small_spread_in_double():
    """A mean of 1e8 with a deviation of 1e-2 in float64 keeps the deviation."""
    array = 1e8 + 1e-2 * np.random.default_rng(2).standard_normal(300_000)
    row = run(array)[0]
    mean, std, _, _ = exact_moments(array)
    assert abs(row["mean"] - mean) <= np.spacing(1e8)
    assert row["std"] == pytest.approx(std, rel=1e-7)


@pytest.mark.parametrize(("mean", "std"), [(1e6, 1.0), (1e7, 3.0), (1e8, 30.0), (-1e8, 8.0), (1e3, 1e-2), (1.0, 1e-6)])
def test_large_mean_small_spread_in_single(mean, std):
    """In float32 mean and deviation are those of the rounded values, as float64 NumPy finds them."""
    array = (mean + std * np.random.default_rng(3).standard_normal(200_000)).astype(np.float32)
    row, values = run(array)[0], array.astype(np.float64)
    assert row["std"] == pytest.approx(values.std(), rel=1e-6)
    assert abs(row["mean"] - values.mean()) <= 1e-6 * values.std() + 1e-15 * abs(mean)


@pytest.mark.parametrize("value", [3.3, -1e30, 1e-40, 0.1])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_constant_has_no_spread(value, name):
    """Equal elements have exactly their value as mean and no deviation."""
    array = np.full(200_001, value, name)
    row = run(array)[0]
    assert row["std"] == 0.0 and row["mean"] == array[0] == row["min"]


@pytest.mark.parametrize("scale", [1e300, 1e-300, 1e155, 1e-160, 5e-324])
def test_near_the_limits_of_double(scale):
    """Magnitudes whose squares leave the range of float64 still have mean, deviation and norm."""
    array = np.random.default_rng(4).integers(-7, 9, 10_000) * scale
    check(array, tolerance=1e-12 if scale > 1e-320 else 1e-6)


def test_l1_overflows_only_when_it_must():
    """The sum of magnitudes is infinite only where the true sum is beyond float64."""
    assert run(np.array([1e308, 7e307]))[0]["l1"] == pytest.approx(1.7e308, rel=1e-12)
    assert run(np.array([1e308, 1e308]))[0]["l1"] == math.inf
    assert run(np.array([1e308, 1e308]))[0]["l2"] == pytest.approx(math.sqrt(2) * 1e308)


def test_negative_zero_is_zero():
    """A negative zero counts as zero, is in no bucket and is reported without its sign."""
    row, _, counts = run(np.full(100, -0.0, np.float32))
    assert row["zeros"] == 100 and not counts.size
    assert [math.copysign(1, row[s]) for s in ("min", "max", "mean")] == [1, 1, 1]


def test_subnormals_and_zeros_are_told_apart():
    """The smallest subnormals share no bucket with zeros, whichever sign either has."""
    array = np.array([0.0, -0.0, 1e-45, 1e-45, -1e-45, 2.0] * 500, np.float32)
    row, offset, counts = run(array)
    assert row["zeros"] == 1000
    assert (offset, counts[0], counts[1], counts[-1]) == (0, 1000, 500, 500)


def test_flushing_of_subnormals_is_undone():
    """A caller's flush-to-zero mode changes neither the result nor itself."""
    torch = pytest.importorskip("torch")
    array = np.array([1e-40, 2e-40, 0.0], np.float32)
    expected = run(array)
    if not torch.set_flush_denormal(True):
        pytest.skip("no such mode here")
    try:
        assert same(run(array), expected)
        assert float(torch.tensor([1e-40]) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)


# --- strides ---


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))))
def test_dense_tensors_in_any_order(axes):
    """A dense tensor has one result whatever the order of its dimensions."""
    array = np.random.default_rng(6).standard_normal((5, 7, 1, 300)).astype(np.float32)
    assert same(run(array.transpose(axes)), run(array.reshape(-1)))


VIEWS = {
    "columns": lambda a: a[:, ::2],
    "rows": lambda a: a[::3],
    "inner slice": lambda a: a[:, 5:90],
    "reversed": lambda a: a[::-1, ::-1],
    "reversed step": lambda a: a[:, ::-3].T,
    "broadcast": lambda a: np.broadcast_to(a[:, :1, None], (len(a), 9, 11)),
    "broadcast outside": lambda a: np.broadcast_to(a[3], (5, *a[3].shape)),
    "broadcast one": lambda a: np.broadcast_to(a[3, 3], (70, 100)),
    "three": lambda a: a.reshape(-1, 4, 25)[::2, 1:3, ::-2].transpose(2, 0, 1),
    "one": lambda a: a[3:4, 7:8],
    "none": lambda a: a[3:3],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int8", "complex128"])
def test_views_count_every_element_as_often_as_it_appears(view, name):
    """Slices, steps, reversals and broadcasts agree with a copy, and with NumPy in every bit."""
    base = (np.random.default_rng(7).standard_normal((300, 100)) * 20).astype(name)
    array = VIEWS[view](base)
    result = run(array)
    copy = run(np.ascontiguousarray(array))
    assert [result[0][c] for c in (*COUNTS, "min", "max")] == pytest.approx(
        [copy[0][c] for c in (*COUNTS, "min", "max")], nan_ok=True
    )
    assert result[0]["mean"] == pytest.approx(copy[0]["mean"], rel=1e-5, abs=1e-5, nan_ok=True)
    assert result[0]["std"] == pytest.approx(copy[0]["std"], rel=1e-6, nan_ok=True)
    assert result[1] == copy[1] and np.array_equal(result[2], copy[2])
    by_numpy = run(array, fallback)
    for level, threads in ways():
        _kernel.set_level(level)
        _kernel.set_threads(threads)
        assert same(run(array), by_numpy), (level, threads)


def test_large_views_in_threads():
    """A strided tensor over several chunks gives the same bits with and without threads."""
    array = np.random.default_rng(8).standard_normal((1100, 1300)).astype(np.float32)[:, ::-2]
    by_numpy = run(array, fallback)
    for level, threads in ways():
        _kernel.set_level(level)
        _kernel.set_threads(threads)
        assert same(run(array), by_numpy), (level, threads)


def test_misaligned_memory():
    """Elements at odd addresses are read as well."""
    values = np.random.default_rng(9).standard_normal(5000)
    raw = np.zeros(values.nbytes + 1, np.uint8)
    raw[1:] = values.view(np.uint8)
    assert same(run(np.ndarray(5000, np.float64, raw, 1)), run(values))
    assert same(run(np.ndarray(5000, np.float64, raw, 1), fallback), run(values))


# --- arguments ---


@pytest.mark.parametrize("module", [_kernel, fallback])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"dtype": 99}, ValueError, "dtype code 99"),
        ({"dtype": -1}, ValueError, "dtype code -1"),
        ({"shape": (2, -3)}, ValueError, "negative"),
        ({"shape": [4]}, TypeError, "tuple"),
        ({"strides": (4, 4)}, ValueError, "strides has 2"),
        ({"strides": 4}, TypeError, "strides"),
        ({"address": 0}, ValueError, "address is 0"),
        ({"shape": (1,) * 65}, ValueError, "65 dimensions"),
        ({"row": 0}, ValueError, "row_address"),
    ],
)
def test_bad_arguments_are_named(module, change, error, text):
    """A bad argument raises an error that names it."""
    x, row = np.zeros(4, np.float32), np.zeros(11)
    good = {"row": row.ctypes.data, "hist": 0, "address": x.ctypes.data, "dtype": 1, "shape": (4,), "strides": None}
    with pytest.raises(error, match=text):
        module.reduce(*(good | change).values())


def test_nothing_at_no_address():
    """No elements need no memory."""
    row = np.zeros(1, ROW)
    assert _kernel.reduce(row.ctypes.data, 0, 0, 1, (0, 5), (20, 4)) == (0, -1)
    assert row[0]["numel"] == 0 and math.isnan(row[0]["min"])


def test_levels_and_threads_are_checked():
    """Unknown levels and silly numbers of threads raise."""
    with pytest.raises(ValueError, match="LEVELS"):
        _kernel.set_level("mmx")
    with pytest.raises(ValueError, match="threads"):
        _kernel.set_threads(0)


def test_more_elements_than_a_count_can_hold():
    """Above 2^32 - 1 elements there is no histogram."""
    one = np.ones(1, np.int8)
    row, offset, counts = run(np.broadcast_to(one, (3, 4)))
    assert counts is not None
    huge = np.broadcast_to(one, (1 << 16, 1 << 16))
    row, offset, counts = run(huge)
    assert (row["numel"], row["mean"], offset, counts) == (1 << 32, 1.0, 0, None)


# --- record ---


def make_table(rows=4, hist=9000, dims=16, keys=3) -> SimpleNamespace:
    lengths = dict.fromkeys(("recomputed", "finite", "hist_valid"), (rows + 7) // 8)
    lengths |= {"hist_ends": rows + 1, "dims_ends": rows + 1, "hist_counts": hist, "dims": dims, "calls": 2 * keys}
    table = SimpleNamespace(**{n: np.zeros(lengths.get(n, rows), t) for n, t in kernels.COLUMNS})
    table.header = np.zeros(kernels.HEADER_LENGTH, np.int64)
    table.header[:9] = 0, rows, 0, hist, 0, dims, 0, 1234, keys
    return table


def put(module, table, array, key=0, probes=1, want=1, recomputed=0):
    first = table if module is fallback else table.header.ctypes.data
    kernels.bind(table)
    return module.record(
        first,
        key,
        probes,
        want,
        recomputed,
        DTYPE_CODE[str(array.dtype)],
        array.ctypes.data,
        array.shape,
        array.strides,
    )


@pytest.mark.parametrize("module", [_kernel, fallback])
def test_record_fills_a_table(module):
    """Rows land in the columns, histograms and shapes in their arenas, and calls are numbered by key."""
    table = make_table()
    a = np.array([[1.0, -2.0], [0.0, np.nan]], np.float32)
    b = np.array(5.0)
    assert put(module, table, a, key=2, probes=2**63 + 5) == 0
    assert put(module, table, b, key=2, want=0, recomputed=1) == 1
    assert put(module, table, np.full(3, np.nan, np.float16), key=2) == 2
    assert table.header[:9].tolist() == [3, 4, table.hist_ends[1], 9000, 3, 16, 2, 1234, 3]
    assert table.key.tolist() == [2, 2, 2, 0] and table.call.tolist() == [0, 0, 1, 0]
    assert table.seq.tolist() == [0, 1, 2, 0] and table.dtype.tolist()[:3] == [1, 0, 2]
    assert table.probes.tolist()[:2] == [2**63 + 5, 1] and table.time.tolist()[:3] == [1234] * 3
    assert (table.recomputed[0], table.finite[0], table.hist_valid[0]) == (0b10, 0b011, 0b101)
    row, offset, counts = run(a)
    assert [getattr(table, name)[0] for name in ROW.names] == list(row.item())
    assert table.hist_offset[0] == offset
    assert np.array_equal(table.hist_counts[: table.hist_ends[1]], counts)
    assert table.hist_ends[:4].tolist() == [0] + [len(counts)] * 3
    assert table.dims[:3].tolist() == [2, 2, 3] and table.dims_ends[:4].tolist() == [0, 2, 2, 3]
    assert table.calls.tolist() == [0, 0, 0, 0, 2, 1]


@pytest.mark.parametrize("module", [_kernel, fallback])
@pytest.mark.parametrize("full", [{"rows": 0}, {"hist": 1}, {"dims": 1}, {"keys": 1}])
def test_a_full_table_says_so_and_stays_as_it_was(module, full):
    """Where a row would not fit, nothing is written and -1 is returned; after growing it fits."""
    array = np.array([[1.0, 2.0]], np.float32)
    table = make_table(**full)
    before = table.header[:9].tolist()
    assert put(module, table, array, key=1) == -1
    assert table.header[:9].tolist() == before and not table.calls.any()
    assert put(module, make_table(), array, key=1) == 0


@pytest.mark.parametrize("module", [_kernel, fallback])
def test_bits_are_cleared_when_a_table_is_used_again(module):
    """A reused table carries no bit over from its last use."""
    table = make_table()
    table.recomputed[:] = table.finite[:] = table.hist_valid[:] = 0xFF
    put(module, table, np.full(3, np.nan, np.float32), want=0)
    assert (table.recomputed[0] & 1, table.finite[0] & 1, table.hist_valid[0] & 1) == (0, 0, 0)


@pytest.mark.parametrize("commit", [kernels.commit, fallback.append])
def test_commit_writes_a_row_computed_elsewhere(commit):
    """A known row is appended as the kernel would have appended it."""
    array = np.array([1.0, 2.0, np.inf], np.float32)
    one, two = make_table(), make_table()
    put(_kernel, one, array, key=1, recomputed=1)
    row, offset, counts = run(array)
    bound = kernels.bind(two)
    assert commit(two if commit is fallback.append else bound, 1, 1, 1, 1, (3,), row, offset, counts) == 0
    assert one.cost[0] > 0 and two.cost[0] == 0  # what it cost us to compute: here nothing
    one.cost[0] = 0
    for name, _ in kernels.COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(two, name), equal_nan=getattr(one, name).dtype.kind == "f"), (
            name
        )


def test_commit_without_histogram_or_elements():
    """A row may come without a histogram, or without values: then its statistics are undefined."""
    one, two = make_table(), make_table()
    for table, commit in ((one, kernels.commit), (two, fallback.append)):
        bound = kernels.bind(table)
        bound = table if commit is fallback.append else bound
        commit(bound, 0, 3, False, 1, (2, 2), (4, *EMPTY_ROW[1:]), 0, None)
        commit(bound, 0, 3, False, 1, (), (1, 0, 0, 0, 0, *(2.0,) * len(STATISTICS), 7), 0, np.zeros(0, np.uint32))
    for name, _ in kernels.COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(two, name), equal_nan=getattr(one, name).dtype.kind == "f"), (
            name
        )
    assert one.finite[0] == one.hashed[0] == 2 and one.hist_valid[0] == 2 and one.call[:2].tolist() == [0, 1]
    with pytest.raises(TypeError):
        kernels.commit("no address", 0, 3, False, 1, (), EMPTY_ROW, 0, None)


# --- threads and processes ---


def test_threads_may_call_at_the_same_time():
    """Calls from several threads, large and small, do not disturb each other."""
    rng = np.random.default_rng(10)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (900_000, 3000, 700_001, 50)]
    expected = [run(a) for a in arrays]
    _kernel.set_threads(2)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(15):
            if not same(run(arrays[i]), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 2, 3, 0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def _in_child(array: np.ndarray, expected: bytes, queue: Any) -> None:
    queue.put(run(array)[0].tobytes() == expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own():
    """After a fork the child reduces large tensors although its parent's threads are gone."""
    array = np.random.default_rng(11).standard_normal(1_500_000).astype(np.float32)
    _kernel.set_threads(2)
    expected = run(array)[0].tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(array, expected, queue))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and queue.get()


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with every warning shown."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60
    )


USE = """
import sys
{before}
import numpy as np
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import ROW
print(kernels.ACTIVE)
row, x = np.zeros(1, ROW), np.arange(5, dtype=np.float32)
for _ in range(3):
    kernels.reduce(row.ctypes.data, 0, x.ctypes.data, 1, (5,), None)
print(float(row["mean"][0]))
"""


@pytest.mark.parametrize("name", [*_kernel.LEVELS, "numpy"])
def test_the_environment_chooses_the_kernel(name):
    """TENSORTAP_KERNEL forces a level, without a warning."""
    done = python(USE.format(before=""), TENSORTAP_KERNEL=name)
    assert done.stdout.split() == [name if name == "numpy" else f"c:{name}", "2.0"]
    assert done.stderr == ""


def test_an_unknown_kernel_is_refused():
    """A name that is not available raises and lists those that are."""
    done = python("import tensortap.reduce.kernel", TENSORTAP_KERNEL="fast")
    assert "TENSORTAP_KERNEL='fast'" in done.stderr and "numpy" in done.stderr


def test_without_the_extension_one_warning_says_what_to_do():
    """Where the extension was not built, NumPy works, and the first use warns once."""
    done = python(USE.format(before="sys.modules['tensortap.reduce._kernel'] = None"))
    assert done.stdout.split() == ["numpy", "2.0"]
    assert done.stderr.count("RuntimeWarning") == 1 and "pip install" in done.stderr


def test_the_number_of_threads_comes_from_the_environment():
    """TENSORTAP_THREADS sets how many threads a reduction may use."""
    done = python("from tensortap.reduce import _kernel; print(_kernel.threads())", TENSORTAP_THREADS="3")
    assert done.stdout.split() == ["3"]


def test_memory_is_not_written():
    """Reducing leaves the elements as they were."""
    array = np.random.default_rng(12).standard_normal(10_000).astype(np.float16)
    before = array.tobytes()
    for module in (_kernel, fallback):
        run(array[::-2], module)
    assert array.tobytes() == before


def test_dtype_table_matches_the_kernel():
    """Every type's size is the one the kernel steps by."""
    for dtype in DTYPES:
        zero = (ctypes.c_char * (4 * dtype.itemsize))()
        row = np.zeros(1, ROW)
        _kernel.reduce(
            row.ctypes.data, 0, ctypes.addressof(zero), dtype.code, (2, 2), (2 * dtype.itemsize, dtype.itemsize)
        )
        assert row[0]["zeros"] == 4


def test_threads_are_taken_back_during_a_reduction() -> None:
    """A reduction that has begun with lent threads ends with them; what comes after has none."""
    calls = []
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def team(task: int, data: int, threads: int, flags: int) -> None:
        calls.append(threads)
        _kernel.borrow(0, 1)
        for _ in range(threads):
            work(task)(data)

    lent = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(team)
    large = np.full(1 << 19, 1e200)  # is reduced twice: as it is, and scaled
    row = np.zeros((), ROW)
    _kernel.borrow(ctypes.cast(lent, ctypes.c_void_p).value, 2)
    try:
        for _ in range(8):  # alone a few times, to see how fast that is
            _kernel.reduce(row.ctypes.data, 0, large.ctypes.data, DTYPE_CODE["float64"], large.shape, None)
    finally:
        _kernel.borrow(0, 1)
    assert calls == [2, 2] and row["mean"] == 1e200


def exact_mean(array: np.ndarray) -> float:
    """The mean without rounding on the way."""
    return math.fsum(array.ravel().tolist()) / array.size


def layer_norm(seed: int) -> np.ndarray:
    """What LayerNorm gives: rows in float32 whose true mean is next to nothing."""
    x = np.random.default_rng(seed).standard_normal((64, 256), dtype=np.float32)
    return ((x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)).astype(np.float32)


def with_outliers(seed: int) -> np.ndarray:
    """Normal numbers among which two outliers cancel."""
    x = np.random.default_rng(seed).standard_normal(4096, dtype=np.float32)
    x[[7, 1234]] = 1e7, -1e7
    return x


@pytest.mark.parametrize("make", [layer_norm, with_outliers])
@pytest.mark.parametrize("level", [*_kernel.LEVELS, "numpy"])
def test_float32_means_are_taken_in_double(make, level):
    """Elements that cancel leave a mean that is right to the rounding of doubles, at every level."""
    before = _kernel.level()
    if level != "numpy":
        _kernel.set_level(level)
    try:
        for seed in range(5):
            array = make(seed)
            row = run(array, fallback if level == "numpy" else _kernel)[0]
            size = math.fsum(np.abs(array).ravel().astype(np.float64).tolist()) / array.size
            assert abs(float(row["mean"]) - exact_mean(array)) <= 2.0**-50 * size
            assert float(row["std"]) == pytest.approx(np.std(array.astype(np.float64)), rel=1e-13)
            assert float(row["l1"]) == pytest.approx(size * array.size, rel=1e-14)
    finally:
        _kernel.set_level(before)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    st.sampled_from([np.float32, np.float64]),
)
def test_means_against_fsum(values, dtype):
    """Whatever the elements, the mean is off by at most the rounding of a sum in double."""
    array = np.array(values, dtype)
    size = math.fsum(abs(v) for v in array.tolist()) / array.size
    for module in (_kernel, fallback):
        assert abs(float(run(array, module)[0]["mean"]) - exact_mean(array)) <= 2.0**-48 * size
