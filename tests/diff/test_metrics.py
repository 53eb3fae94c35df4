"""The metrics, held against their definitions in NumPy."""

from __future__ import annotations

import math
import warnings
from importlib import import_module

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.diff.metrics import elements, histograms, rms_of, scaled_differences, statistics
from tensortap.diff.tolerance import Precision, Tolerance
from tensortap.errors import ProbeError
from tensortap.reduce.summary import summarize

LOOSE = Tolerance(1e-3, 0.0)
FEW = settings(max_examples=60, deadline=None)
SIZES = st.integers(1, 40)


def pairs(dtype: type, bound: float) -> st.SearchStrategy:
    """Two arrays of one size."""
    values = st.floats(-bound, bound, width=np.dtype(dtype).itemsize * 8).map(lambda v: v if abs(v) > 1e-30 else 0.0)
    return SIZES.flatmap(lambda n: st.tuples(*[hnp.arrays(dtype, n, elements=values)] * 2))


@FEW
@given(pairs(np.float32, 1e6) | pairs(np.float64, 1e100))
def test_elements(arrays):
    """Every metric is what its formula gives in NumPy."""
    x, y = (a.astype(np.float64) for a in arrays)
    found = elements(*arrays, LOOSE)
    apart = np.abs(x - y)
    assert found.max_abs == apart.max()
    size = np.maximum(np.abs(x), np.abs(y))
    assert found.max_rel == pytest.approx(np.max(apart[size > 0] / size[size > 0], initial=0.0))
    if x.any():
        assert found.nl2 == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-9)
        if found.nl2:
            assert found.sqnr == pytest.approx(-20 * math.log10(found.nl2))
        if y.any():
            cosine = (x / np.linalg.norm(x)) @ (y / np.linalg.norm(y))
            assert found.cosine == pytest.approx(cosine, abs=1e-9)
    bits = f"u{arrays[0].itemsize}"
    assert found.bit_equal == np.mean(arrays[0].view(bits) == arrays[1].view(bits))
    allowed = 1e-3 * (np.abs(x) + np.sqrt(np.mean(x**2)))
    with np.errstate(divide="ignore"):
        assert found.excess == pytest.approx(np.max(apart[apart > 0] / allowed[apart > 0], initial=0.0), rel=1e-6)


@FEW
@given(hnp.arrays(np.float32, SIZES, elements=st.floats(-100, 100, width=32)), st.data())
def test_statistics_never_complain_alone(x, data):
    """Tensors whose elements are all within the tolerance have statistics within it too."""
    rms = rms_of(summarize(x))
    shares = data.draw(hnp.arrays(np.float64, x.shape, elements=st.floats(-1, 1)))
    y = (x + shares * 0.01 * (np.abs(x) + rms)).astype(np.float64)
    tolerance = Tolerance(0.01, 0.0)
    if elements(x.astype(np.float64), y, tolerance).excess <= 1:
        a, b = summarize(x.astype(np.float64)), summarize(y)
        assert statistics(a, b, scaled_differences(a, b), tolerance).excess <= 1 + 1e-6


@FEW
@given(pairs(np.float32, 1e3))
def test_histograms(arrays):
    """Total variation and Kolmogorov–Smirnov lie between 0 and what the values themselves give, and 1."""
    x, y = arrays
    found = histograms(summarize(x), summarize(y))
    every = np.union1d(x, y)
    cdf = [np.searchsorted(np.sort(a), every, side="right") / a.size for a in arrays]
    assert 0 <= found.ks <= np.abs(cdf[0] - cdf[1]).max() + 1e-9
    assert found.ks <= found.tv + 1e-9 <= 1 + 2e-9
    assert histograms(summarize(x), summarize(x)) == (0, 0)


def test_histograms_apart():
    """What has no value in common is as far apart as can be, whatever the sign."""
    found = histograms(summarize([1.0, 2.0, 3.0]), summarize([-1.0, -2.0, 0.0]))
    assert found == pytest.approx((1, 1))
    assert histograms(summarize([1.0, np.nan]), summarize([1.0, 2.0])).tv == pytest.approx(0.5)


def test_nonfinite():
    """NaN and Inf at the same places are equal; anywhere else they are a difference without measure."""
    x = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    assert elements(x, x.copy(), LOOSE).excess == 0
    for y in ([1, 2, np.inf, -np.inf], [np.nan, 1, np.inf, -np.inf], [1, np.nan, -np.inf, -np.inf]):
        found = elements(x, np.array(y, np.float32), LOOSE)
        assert found.misplaced and found.excess == math.inf
    payload = x.view(np.uint32).copy()
    payload[1] ^= 1
    found = elements(x, payload.view(np.float32), LOOSE)
    assert found.bit_equal == 0.75 and found.excess == 0


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64, np.int64, bool]
)
def test_types(dtype):
    """Every type can be compared with itself; what has no tolerance is equal or not."""
    x = np.array([0, 1, 0, 1, 1]).astype(dtype)
    y = x.copy()
    y[0] = 1
    assert elements(x, x.copy(), Tolerance(0, 0))[4:] == (math.inf, 1.0, 0, 0.0, 0.0)
    assert elements(x, y, Tolerance(0, 0)).excess == math.inf
    assert elements(x, y, Tolerance(0, 0)).bit_equal == 0.8


def test_large_integers():
    """Integers that double precision cannot tell apart are still told apart."""
    x = np.array([2**60, 5])
    assert elements(x, np.add(x, [1, 0]), Tolerance(0.1, 0)).excess == math.inf


def test_other_type():
    """Against another type the values count."""
    x = np.array([1.0, 2.0, 1 / 3], np.float32)
    found = elements(x, x.astype(ml_dtypes.bfloat16), LOOSE)
    assert found.bit_equal == pytest.approx(2 / 3)
    assert found.max_abs == abs(float(x[2]) - float(ml_dtypes.bfloat16(x[2])))


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_extremes(scale):
    """Squares that double precision cannot hold do not spoil the norms."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = elements(np.array([3.0, 4.0]) * scale, np.array([3.0, 4.5]) * scale, LOOSE)
    assert found.nl2 == pytest.approx(0.1)
    assert found.cosine == pytest.approx(27 / (5 * math.hypot(3, 4.5)))


def test_chunks(monkeypatch):
    """A large array is compared in parts, with the same result."""
    x, y = np.random.default_rng(0).normal(size=(2, 1000))
    whole = elements(x, y, LOOSE)
    monkeypatch.setattr(import_module("tensortap.diff.metrics"), "_AT_ONCE", 7)
    assert elements(x, y, LOOSE) == pytest.approx(whole)


def test_empty():
    """Nothing compared with nothing is equal."""
    assert elements(np.zeros(0), np.zeros(0), LOOSE).excess == 0


def test_tolerance():
    """It follows the types, is carried along, is exact for integers, and can be given."""
    walk = Precision(changed=True)
    first = [
        walk.tolerance(*types).rtol for types in (("float32", "float32"), ("float32", "float16"), ("int8", "int8"))
    ]
    assert first == [2**-16, 2**-6, 0]
    assert walk.tolerance("float32", "float32").rtol == 2**-6
    assert walk.tolerance("float32", "float32", "param").rtol == 2**-16
    walk.next_step()
    assert walk.tolerance("float32", "float32", "param").rtol == 2**-6
    assert Precision().tolerance("float32", "bfloat16").rtol == 2**-16
    assert Precision(0.5, 0.1).tolerance("float32", "bfloat16") == (0.5, 0.1)
    with pytest.raises(ProbeError, match="rtol must be"):
        Precision(-1)
