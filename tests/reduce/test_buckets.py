"""What is derived from histograms, against the elements they were taken of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.reduce import histogram as buckets
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import ROW
from tensortap.types import DTYPE_CODE

exact = settings(derandomize=True, deadline=None, max_examples=examples(150), database=None)


def run(array: np.ndarray):
    """The row, offset and counts of an array."""
    row, hist = np.zeros(1, ROW), np.zeros(buckets.BUCKETS, np.uint32)
    code = DTYPE_CODE[str(array.dtype)]
    offset, length = kernels.reduce(
        row.ctypes.data, hist.ctypes.data, array.ctypes.data, code, array.shape, array.strides
    )
    return row[0], offset, hist[:length].copy()


def test_edges_cover_all_values_once():
    """Buckets of one sign follow each other without gap or overlap, and mirror those of the other."""
    low, high = buckets.edges(np.arange(0, buckets.BUCKETS, 2))
    assert low[0] == 0 and math.isinf(high[-1])
    assert np.array_equal(low[1:], high[:-1])
    negative_low, negative_high = buckets.edges(np.arange(1, buckets.BUCKETS, 2))
    assert np.array_equal(negative_low, -high) and np.array_equal(negative_high, -low)


@exact
@given(st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool), st.sampled_from(["float32", "float64"]))
def test_a_value_lies_between_the_edges_of_its_bucket(value, name):
    """The bucket the kernel counts a value in is the one whose edges enclose it."""
    _, offset, counts = run(np.array([value], name))
    (low,), (high,) = buckets.edges([offset])
    assert counts.tolist() == [1]
    assert low <= value < high if value > 0 else low < value <= high


def test_a_bucket_is_an_eighth_as_wide_as_its_values():
    """The stated error follows from the widths of the buckets."""
    low, high = buckets.edges(np.arange(16, buckets.BUCKETS - 2, 2))
    assert np.all((high - low) / low <= buckets.RELATIVE_ERROR)
    low, high = buckets.edges(np.arange(0, 16, 2))
    assert np.all(high - low == buckets.ABSOLUTE_ERROR)


@exact
@given(
    hnp.arrays(np.float32, st.integers(1, 400), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_quantiles_keep_their_bound(array, shares):
    """Every quantile is within the stated error of the element it stands for."""
    row, offset, counts = run(array)
    ends = {"minimum": float(row["min"]), "maximum": float(row["max"])}
    got = buckets.quantile(shares, offset, counts, int(row["zeros"]), **ends)
    ranks = np.maximum(np.ceil(np.array(shares) * array.size), 1).astype(int) - 1
    true = np.sort(array.astype(np.float64))[ranks]
    assert np.all(np.abs(got - true) <= buckets.RELATIVE_ERROR * np.abs(true) + buckets.ABSOLUTE_ERROR)
    assert np.all(got[true == 0] == 0)
    assert np.all((got >= row["min"]) & (got <= row["max"]))


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_quantiles_of_a_bell_curve(name):
    """On smooth data the quantiles are far closer than the bound."""
    array = np.random.default_rng(0).standard_normal(100_000).astype(name)
    row, offset, counts = run(array)
    shares = np.array([0.001, 0.01, 0.1, 0.25, 0.75, 0.9, 0.99])
    got = buckets.quantile(shares, offset, counts, 0, minimum=float(row["min"]), maximum=float(row["max"]))
    true = np.quantile(array.astype(np.float64), shares, method="inverted_cdf")
    assert np.all(np.abs(got - true) <= 0.02 * np.abs(true))


def test_quantiles_are_exact_at_the_ends():
    """The smallest and the largest element are known exactly."""
    array = np.array([-3.3, 0.7, 123.456], np.float32)
    row, offset, counts = run(array)
    ends = {"minimum": float(row["min"]), "maximum": float(row["max"])}
    assert buckets.quantile(0.0, offset, counts, **ends) == array.min()
    assert buckets.quantile(1.0, offset, counts, **ends) == array.max()


def test_quantiles_of_nothing():
    """Without finite elements a quantile is NaN, and shares outside 0 to 1 raise."""
    assert math.isnan(buckets.quantile(0.5, 0, [], 0, minimum=math.nan, maximum=math.nan))
    with pytest.raises(ValueError, match="between 0 and 1"):
        buckets.quantile(1.5, 0, [], minimum=0.0, maximum=1.0)


@exact
@given(
    hnp.arrays(np.float64, st.integers(1, 200), elements=st.floats(allow_nan=False, allow_infinity=False)),
    st.integers(1, 40),
)
def test_rebinning_loses_no_element(array, bins):
    """Bins on a linear axis hold all finite elements, whatever their range."""
    row, offset, counts = run(array)
    got = buckets.rebin(offset, counts, int(row["zeros"]), float(row["min"]), float(row["max"]), bins)
    assert got.shape == (bins,) and np.all(got >= 0)
    assert got.sum() == pytest.approx(array.size)


def test_rebinning_resembles_the_elements():
    """On smooth data the bins are close to a histogram of the elements."""
    array = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    row, offset, counts = run(array)
    got = buckets.rebin(offset, counts, 0, float(row["min"]), float(row["max"]), 20)
    true, _ = np.histogram(array, 20, (float(row["min"]), float(row["max"])))
    assert np.abs(got - true).sum() < 0.03 * array.size


def test_zeros_fall_into_the_bin_of_zero():
    """Zeros have no bucket but do have a place on the axis."""
    got = buckets.rebin(0, [], 7, 0.0, 0.0, 3)
    assert got.tolist() == [7, 0, 0]
    _, offset, counts = run(np.array([-1, 1, 0, 0, 0, 0], np.float32))
    assert buckets.rebin(offset, counts, 4, -1.0, 1.0, 3).tolist() == [1, 4, 1]


@exact
@given(st.lists(hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32)), max_size=4))
def test_merging_is_counting_together(parts):
    """Merged histograms are the histogram of the elements together."""
    offset, counts = buckets.merge(run(p)[1:] for p in parts)
    _, whole_offset, whole = run(np.concatenate([*parts, np.zeros(0, np.float32)]))
    assert offset == whole_offset and np.array_equal(counts, whole)


def test_shares_of_magnitudes():
    """Limits that are powers of two split the elements exactly."""
    array = np.array([0.25, -0.25, 0.5, 1.0, -4.0, 70000.0, 1e-9, -1.5], np.float32)
    _, offset, counts = run(array)
    assert buckets.magnitude_share(offset, counts, 0.0, 2.0**-14) == 1 / 8
    assert buckets.magnitude_share(offset, counts, 2.0**16, math.inf) == 1 / 8
    assert buckets.magnitude_share(offset, counts, 0.5, 2.0) == 3 / 8
    assert buckets.magnitude_share(0, [], 0.0, 1.0) == 0.0
