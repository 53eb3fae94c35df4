"""`summarize`: one tensor in, one small value out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tensortap.reduce.histogram import RELATIVE_ERROR
from tensortap.reduce.statistics import COLUMNS, COUNTS, STATISTICS
from tensortap.reduce.summary import Summary, summarize


def expected(array: np.ndarray[Any, Any]) -> dict[str, float]:
    """The statistics in float64 NumPy; complex numbers by magnitude."""
    x = np.abs(array) if array.dtype.kind == "c" else array
    x = x.astype(np.float64).ravel()
    finite = x[np.isfinite(x)]
    return {
        "numel": x.size, "nan": np.isnan(x).sum(), "posinf": (x == np.inf).sum(), "neginf": (x == -np.inf).sum(),
        "zeros": (x == 0).sum(), "min": finite.min(), "max": finite.max(), "mean": finite.mean(),
        "std": finite.std(), "l1": np.abs(finite).sum(), "l2": np.sqrt((finite**2).sum()),
    }  # fmt: skip


def assert_summary(summary: Summary, array: np.ndarray[Any, Any]) -> None:
    known = expected(array)
    for name in ("numel", *COUNTS, "min", "max"):
        assert summary[name] == known[name], name
    for name in ("mean", "std", "l1", "l2"):
        assert summary[name] == pytest.approx(known[name], rel=1e-6, abs=1e-6), name
    assert summary.hist_counts is not None
    assert summary.hist_counts.sum() == summary.finite - summary.zeros


@pytest.mark.parametrize(
    "dtype",
    [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
     np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, bool, np.complex64,
     np.complex128, ml_dtypes.int4, ml_dtypes.float4_e2m1fn, ">f4", ">i8", np.longdouble],
    ids=lambda dtype: np.dtype(dtype).str + np.dtype(dtype).name,
)  # fmt: skip
def test_every_numpy_type(dtype: Any) -> None:
    """The statistics of every element type are those of its values in float64."""
    array = (np.arange(40) % 5).reshape(4, 10).astype(dtype)
    assert_summary(summarize(array), array)
    assert_summary(summarize(array[::2, ::-3]), array[::2, ::-3])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
     torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128],
    ids=str,
)  # fmt: skip
def test_every_torch_type(dtype: torch.dtype) -> None:
    """A tensor of every type, also transposed and expanded, gives what its values give in NumPy."""
    values = (torch.arange(24) % 5).reshape(4, 6)
    wide = values.to(torch.complex128 if dtype.is_complex else torch.float64)
    wide = wide.bool().double() if dtype is torch.bool else wide
    tensor = values.to(dtype)
    assert_summary(summarize(tensor), wide.numpy())
    assert_summary(summarize(tensor.T), wide.numpy())
    assert_summary(summarize(tensor[:1].expand(3, 6)), wide[:1].expand(3, 6).numpy())


def test_what_is_not_finite_is_counted_and_left_out_of_the_moments() -> None:
    """NaN and infinities have counts of their own; the moments are those of the finite elements."""
    summary = summarize([1.0, 3.0, math.nan, math.inf, math.inf, -math.inf, 0.0])
    assert (summary.nan, summary.posinf, summary.neginf, summary.zeros, summary.finite) == (1, 2, 1, 1, 3)
    assert (summary.min, summary.max, summary.mean) == (0.0, 3.0, pytest.approx(4 / 3))


@pytest.mark.parametrize("value", [[], [math.nan], [math.inf, -math.inf]], ids=str)
def test_nothing_finite(value: list[float]) -> None:
    """Where no element is finite, min, max, mean, std and quantiles are NaN."""
    summary = summarize(value)
    assert all(math.isnan(summary[name]) for name in ("min", "max", "mean", "std"))
    assert math.isnan(summary.quantile(0.5)) and summary.bars() == "" and summary.numel == len(value)


def test_it_is_a_mapping_over_its_columns() -> None:
    """A summary is read by name like a row of a run."""
    summary = summarize(np.ones((2, 3), np.float32))
    assert isinstance(summary, Mapping)
    assert set(summary) <= set(COLUMNS) and {*COUNTS, *STATISTICS} <= set(summary)
    assert dict(summary)["shape"] == (2, 3) and len(summary) == len(list(summary))
    assert summary["dtype"] == "float32" and summary.get("finite") is None
    with pytest.raises(KeyError):
        summary["finite"]


def test_quantiles_lie_within_their_bound() -> None:
    """A quantile is exact at the ends and within the stated relative error between them."""
    x = np.random.default_rng(0).normal(3, 2, 10_000)
    summary = summarize(x)
    assert (summary.quantile(0), summary.quantile(1)) == (x.min(), x.max())
    for q in (0.01, 0.25, 0.5, 0.9, 0.999):
        element = np.quantile(x, q, method="inverted_cdf")
        assert abs(summary.quantile(q) - element) <= RELATIVE_ERROR * abs(element)


def test_without_a_histogram_there_are_no_quantiles() -> None:
    """`histogram=False` leaves the histogram out, and quantiles are NaN."""
    summary = summarize([1.0, 2.0], histogram=False)
    assert summary.hist_counts is None and summary.hist_offset is None
    assert math.isnan(summary.quantile(0.5)) and summary.bars() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32([[1, 2], [3, math.nan]]), "[2,2] f32 mean 2 std 0.816 min 1 max 3 zeros 0% nan 1"),
        (np.zeros((), np.float64), "[] f64 mean 0 std 0 min 0 max 0 zeros 100% nan 0"),
        (np.array([1, math.inf]), "[2] f64 mean 1 std 0 min 1 max 1 zeros 0% nan 0 inf 1"),
        (np.array([True, False]), "[2] bool mean 0.5 std 0.5 min 0 max 1 zeros 50% nan 0"),
    ],
    ids=["nan", "scalar", "inf", "bool"],
)
def test_it_prints_as_one_readable_line(value: Any, text: str) -> None:
    """Printed, a summary is one line with shape, type, moments, zeros, what is not finite, and the histogram."""
    assert str(summarize(value)).startswith(text)
    assert "\n" not in str(summarize(value))
