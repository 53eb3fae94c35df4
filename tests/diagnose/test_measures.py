"""Distances between histograms, effective rank and entropy, against direct computation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tensortap as tt
from tensortap.diagnose.history import SiteHistogram
from tensortap.diagnose.measures import attention_entropy, effective_rank, ks, psi, shares, spread
from tensortap.finding import Steps

ARRAYS = hnp.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.one_of(st.just(0.0), st.floats(-1e6, 1e6, width=32), st.floats(-2, 2, width=32)),
)


def histogram_of(array: np.ndarray) -> SiteHistogram:
    seen = tt.summarize(array)
    return SiteHistogram(
        seen.hist_offset, seen.hist_counts.astype(np.int64), seen.zeros, seen.min, seen.max, Steps(0, 0, 1)
    )


def direct_ks(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of the shares at or below a value, over every value there is."""
    values = np.concatenate([a, b])
    below = [np.searchsorted(np.sort(x), values, "right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def direct_psi(expected: np.ndarray, actual: np.ndarray, bins: int = 10) -> float:
    """Bins by the share of `expected` below each distinct value."""
    values = np.unique(np.concatenate([expected, actual]))
    e, a = np.zeros(bins), np.zeros(bins)
    for value in values:
        bin = min(int(np.floor((expected < value).mean() * bins + 1e-9)), bins - 1)
        e[bin] += (expected == value).mean()
        a[bin] += (actual == value).mean()
    e, a = np.maximum(e, 1e-4), np.maximum(a, 1e-4)
    return float(((a - e) * np.log(a / e)).sum())


@settings(deadline=None, max_examples=60)
@given(ARRAYS, ARRAYS)
def test_ks_is_that_of_the_bucketed_values(a: np.ndarray, b: np.ndarray) -> None:
    """From histograms one gets the two-sample statistic of the values cut to their buckets."""
    want = direct_ks(signed(a), signed(b))
    assert ks(shares(histogram_of(a)), shares(histogram_of(b))) == pytest.approx(want, abs=1e-12)


def signed(array: np.ndarray) -> np.ndarray:
    """Buckets as numbers in their order: sign and magnitude, with 0 for what is zero."""
    code = (np.abs(array).astype(np.float32).view(np.uint32) >> 20).astype(np.int64)
    return np.where(array == 0, 0, np.where(array > 0, code + 1, -code - 1))


@settings(deadline=None, max_examples=60)
@given(ARRAYS, ARRAYS)
def test_psi_is_that_of_the_bucketed_values(a: np.ndarray, b: np.ndarray) -> None:
    """From histograms one gets the index of the values cut to their buckets."""
    got = psi(shares(histogram_of(a)), shares(histogram_of(b)))
    assert got == pytest.approx(direct_psi(signed(a), signed(b)), rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(ARRAYS)
def test_nothing_drifts_from_itself(a: np.ndarray) -> None:
    """The distances of a histogram to itself are zero, and shares sum to one."""
    own = shares(histogram_of(a))
    assert own.sum() == pytest.approx(1)
    assert ks(own, own) == 0
    assert psi(own, own) == 0


def test_ks_is_close_to_the_exact_one() -> None:
    """Buckets cost little: within a bucket's mass of the statistic of the values themselves."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=20_000), rng.normal(0.3, 1.2, size=20_000)
    got = ks(shares(histogram_of(a)), shares(histogram_of(b)))
    assert got == pytest.approx(direct_ks(a, b), abs=0.01)


def test_effective_rank() -> None:
    """It counts the directions in which rows differ, whatever their mean and scale."""
    rng = np.random.default_rng(0)
    for rank in (1, 3, 8):
        directions = np.linalg.qr(rng.normal(size=(32, rank)))[0].T
        rows = np.linalg.qr(rng.normal(size=(500, rank)))[0] @ directions
        assert effective_rank(5 * rows + 100) == pytest.approx(rank, rel=0.02)
    assert effective_rank(np.full((9, 4), 7.0)) == 0
    assert spread(np.full((9, 4), 7.0)) == 0


def test_attention_entropy() -> None:
    """Even attention has all of it, attention on one place none; queries are counted by the keys they may see."""
    one = np.zeros((2, 3, 6, 6))
    one[..., 0] = 1
    assert attention_entropy(one) == pytest.approx(np.zeros(3))
    causal = np.tril(np.ones((6, 6)))
    assert attention_entropy(np.broadcast_to(causal / causal.sum(-1, keepdims=True), (2, 3, 6, 6))) == pytest.approx(1)
    assert attention_entropy(np.full((2, 6, 6), 1 / 6)) == pytest.approx([1.0])


@pytest.mark.parametrize(
    "array", [np.ones((2, 3)), np.ones((2, 3, 4, 4)), np.full((1, 1, 4, 4), np.nan), -np.eye(4)[None]]
)
def test_what_is_no_attention(array: np.ndarray) -> None:
    """What does not sum to one, is negative, not finite or has other axes, is not taken for attention."""
    assert attention_entropy(array) is None


@settings(deadline=None, max_examples=40)
@given(ARRAYS, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_share_of_magnitudes(a: np.ndarray, low: float, high: float) -> None:
    """Shares of magnitudes over powers of two are exact, zeros included."""
    low, high = sorted((2.0 ** np.floor(np.log2(low)), 2.0 ** np.floor(np.log2(high))))
    seen = histogram_of(a)
    assert seen.share(low, high) == pytest.approx(((abs(a) >= low) & (abs(a) < high)).mean(), abs=1e-9)
    assert seen.share(0.0, np.inf) == pytest.approx(1)
