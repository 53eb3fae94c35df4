"""Folding rows gives what one look at all the elements would have given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.reduce import kernel
from tensortap.reduce.merge import add_slices, merge_groups, merge_histograms
from tensortap.reduce.statistics import COUNTS, NUMBERS, STATISTICS
from tensortap.reduce.summary import Summary, summarize

SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, -2.2e-308, 1.7e308, -1.7e308, 1.0, 1e8]

floats = st.one_of(st.sampled_from(SPECIAL), st.floats(width=64), st.floats(-10, 10))
pieces = st.lists(hnp.arrays(np.float64, st.integers(0, 12), elements=floats), min_size=1, max_size=6)


def columns_of(summaries: list[Summary]) -> dict[str, np.ndarray[Any, Any]]:
    kinds = {name: np.float64 if name in STATISTICS else np.int64 for name in NUMBERS}
    return {name: np.array([s[name] for s in summaries], kinds[name]) for name in NUMBERS}


def histograms_of(summaries: list[Summary]) -> tuple[Any, Any, Any]:
    offsets = np.array([s.hist_offset for s in summaries], np.int64)
    counts = [np.asarray(s.hist_counts, np.int64) for s in summaries]
    return offsets, np.cumsum([0, *map(len, counts)]), np.concatenate(counts)


def assert_near(merged: float, whole: float, size: float) -> None:
    if math.isnan(whole) or math.isinf(whole):
        assert math.isnan(merged) == math.isnan(whole)
        if math.isinf(whole):
            assert merged > 1e308
    else:
        assert merged == pytest.approx(whole, rel=1e-12, abs=max(1e-13 * size, 5e-322)) or (
            math.isinf(merged) and whole > 1e307
        )


@settings(max_examples=examples(300), deadline=None)
@given(pieces)
def test_merged_rows_equal_the_row_of_everything(parts: list[np.ndarray[Any, Any]]) -> None:
    """Counts, ends and histogram of the parts merge exactly, moments to rounding, whatever the values are."""
    summaries = [summarize(part) for part in parts]
    whole = summarize(np.concatenate(parts))
    merged = merge_groups(columns_of(summaries), np.array([0]))
    for name in ("numel", *COUNTS, "min", "max"):
        assert np.array_equal(merged[name][0], whole[name], equal_nan=True), name
    size = max(abs(whole.min), abs(whole.max)) if whole.finite else 0.0
    for name in ("mean", "std"):
        assert_near(float(merged[name][0]), whole[name], size)
    for name in ("l1", "l2"):
        assert_near(float(merged[name][0]), whole[name], 0.0)
    [(offset, counts)] = merge_histograms(*histograms_of(summaries), np.array([0]))
    assert offset == (whole.hist_offset if whole.hist_counts is not None and len(whole.hist_counts) else 0)
    assert counts.tolist() == (whole.hist_counts.tolist() if whole.hist_counts is not None else [])


def test_groups_do_not_touch_each_other() -> None:
    """Every group is folded by itself, also when there are more groups than are folded at once."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(i, 1 + i % 3, 5) for i in range(6000)]
    summaries = [summarize(part) for part in parts]
    starts = np.arange(0, 6000, 2)
    merged = merge_groups(columns_of(summaries), starts)
    histograms = merge_histograms(*histograms_of(summaries), starts)
    for group in (0, 1, 1500, 2047, 2048, 2999):
        whole = summarize(np.concatenate(parts[2 * group : 2 * group + 2]))
        assert merged["mean"][group] == pytest.approx(whole.mean, rel=1e-14)
        assert merged["std"][group] == pytest.approx(whole.std, rel=1e-13)
        assert histograms[group][0] == whole.hist_offset
        assert whole.hist_counts is not None and histograms[group][1].tolist() == whole.hist_counts.tolist()


def test_a_group_without_finite_elements_has_no_moments() -> None:
    """Where nothing is finite, min, max, mean and std are NaN and the norms are zero."""
    merged = merge_groups(columns_of([summarize([math.nan]), summarize([math.inf])]), np.array([0]))
    assert all(math.isnan(merged[name][0]) for name in ("min", "max", "mean", "std"))
    assert merged["l1"][0] == merged["l2"][0] == 0
    assert (merged["nan"][0], merged["posinf"][0]) == (1, 1)


@pytest.mark.parametrize("way", ["c", "numpy"])
def test_counts_are_added_to_their_groups(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a loop over rows would add them: several rows of a group in one call, some left out, empty ones too."""
    if way == "numpy":
        monkeypatch.setattr(kernel, "add_histograms", None)
    elif kernel.add_histograms is None:
        pytest.skip("the extension is not built")
    rng = np.random.default_rng(0)
    lengths, group = rng.integers(0, 5, 200), rng.integers(-1, 7, 200)
    ends, first = 3 + np.concatenate([[0], np.cumsum(lengths)]), rng.integers(0, 16, 200)
    counts = rng.integers(0, 1000, ends[-1] + 2)
    dense, wanted = np.ones((7, 20), np.int64), np.ones((7, 20), np.int64)
    for row in np.flatnonzero(group >= 0):
        wanted[group[row], first[row] : first[row] + lengths[row]] += counts[ends[row] : ends[row + 1]]
    add_slices(dense, group, first, ends, counts)
    assert np.array_equal(dense, wanted)


@pytest.mark.skipif(kernel.add_histograms is None, reason="the extension is not built")
def test_counts_that_lie_nowhere_are_left_out() -> None:
    """The extension writes inside the histograms and reads inside the counts, whatever it is told."""
    dense = np.zeros((2, 4), np.int64)
    group, first = np.array([2, 0, 0, 1, 1]), np.array([0, -1, 3, 1 << 62, 0])
    add_slices(dense, group, first, np.array([0, 2, 4, 6, 8, 10]), np.arange(1, 10))
    add_slices(dense, np.array([0]), np.array([0]), np.array([-2, 1]), np.arange(3))
    add_slices(dense, np.array([0]), np.array([0]), np.array([2, 1]), np.arange(3))
    assert not dense.any()
