"""The kernel against float64 NumPy, its levels against each other, and NumPy against all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reduce.kernel_checks import (
    COUNTS,
    NUMPY,
    SIZES,
    _kernel,
    check,
    exact_moments,
    naive_histogram,
    random_bits,
    run,
    same,
    ways,
    wide,
)

from tensortap.reduce import histogram as buckets
from tensortap.reduce import merge, numpy_memory
from tensortap.reduce import numpy_kernel as fallback
from tensortap.reduce.statistics import ROW
from tensortap.types import DTYPE_CODE

settings.register_profile("exact", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("exact")


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
