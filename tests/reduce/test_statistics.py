"""The registry of statistics, and everything that must agree with it."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tensortap as tt
from tensortap.diff.metrics import relative, scaled_differences
from tensortap.diff.pair import Pair
from tensortap.record.columns import Columns
from tensortap.reduce import _kernel
from tensortap.reduce.content_hash import ABSENT
from tensortap.reduce.merge import merge_groups
from tensortap.reduce.statistics import (
    BY_NAME,
    COLUMNS,
    CONDITIONS,
    EMPTY_ROW,
    FIELDS,
    NUMBERS,
    REGISTRY,
    ROW,
    RowValues,
    row_without_values,
)
from tensortap.store.schema import RECORDS
from tensortap.view.api.stats import STATS

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-folder.md"
NULL = {"always": "", "finite": "; null when none is finite", "spread": "; null when all that are finite are equal",
        "hashed": "; null when it was not asked for"}  # fmt: skip


def test_the_c_kernel_has_the_same_row():
    """C lists the statistics in the registry's order: slot by slot."""
    assert _kernel.STATISTICS == FIELDS == ROW.names
    assert [statistic.slot for statistic in REGISTRY] == list(range(len(REGISTRY)))
    assert ROW.itemsize == 8 * len(REGISTRY)


def test_a_summary_has_every_statistic():
    """`Summary` has a field for each, with its type."""
    types = {field.name: field.type for field in fields(RowValues)}
    assert types == {s.name: "int" if s.is_count else "float" for s in REGISTRY} | {"hash": "int | None"}
    assert [name for name in tt.summarize([1.0]) if name in BY_NAME] == list(FIELDS)


def test_the_schema_and_the_table_have_every_statistic():
    """Files and step tables have a column for each, and a bitmap for each condition."""
    for statistic in REGISTRY:
        assert RECORDS.field(statistic.name).type == (pa.int64() if statistic.dtype is np.int64 else pa.float64())
    assert [name for name in RECORDS.names if name in BY_NAME] == list(FIELDS)
    table = Columns(1, 1, 1, 1)
    assert {*FIELDS, *CONDITIONS} <= set(table.columns) and set(FIELDS) <= set(COLUMNS)


def test_rows_without_values_are_undefined():
    """A tensor without elements has counts and sums of zero; one without values has nothing but its size."""
    empty, absent = (dict(zip(FIELDS, row, strict=True)) for row in (EMPTY_ROW, row_without_values(7)))
    assert empty.pop("hash") == absent.pop("hash") == ABSENT and tt.summarize(np.zeros(0)).hash is None
    assert pytest.approx({name: tt.summarize(np.zeros(0))[name] for name in NUMBERS}, nan_ok=True) == empty
    assert absent.pop("numel") == 7
    assert all(value == 0 if BY_NAME[name].is_count else np.isnan(value) for name, value in absent.items())


def test_the_viewer_offers_and_names_what_the_registry_says():
    """A statistic with a scale is in the viewer's list, under its label."""
    for statistic in REGISTRY:
        if statistic.scale is not None:
            stat = STATS[statistic.name]
            assert (stat.label, stat.scale, stat.unit) == (statistic.label, statistic.scale, statistic.unit)
    assert all(stat.label for stat in STATS.values())


def test_runs_are_compared_by_what_a_tolerance_bounds():
    """`diff` compares the statistics that cannot move further than the elements do."""
    a, b = tt.summarize([1.0, 2.0, 5.0]), tt.summarize([1.0, 2.5, 5.0])
    compared = {statistic.name for statistic in REGISTRY if statistic.bound is not None}
    assert set(relative(scaled_differences(a, b))) == compared


@pytest.mark.parametrize("statistic", REGISTRY, ids=FIELDS)
def test_the_document_describes_it(statistic):
    """The table in docs/run-folder.md has a line for each statistic, with its type and meaning."""
    kind = "int64" if statistic.dtype is np.int64 else "double"
    line = f"| `{statistic.name}` | {kind} | {statistic.meaning}{NULL[statistic.defined]} |"
    assert line in DOCUMENT.read_text().splitlines()


def standardized(array: np.ndarray) -> tuple[float, float]:
    """Skewness and kurtosis in extended precision."""
    x = array.astype(np.longdouble).ravel()
    d = x - x.mean()
    variance = (d * d).mean()
    return float((d**3).mean() / variance**1.5), float((d**4).mean() / variance**2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32])
@pytest.mark.parametrize("size", [2, 100, 4096, 300_001])
def test_kurtosis_skewness_and_absmax_are_exact(dtype, size):
    """They agree with extended precision to the rounding of doubles, over one block or many."""
    array = (np.random.default_rng(size).standard_gamma(2.0, size) * 100 - 150).astype(dtype)
    summary = tt.summarize(array)
    assert (summary.skewness, summary.kurtosis) == pytest.approx(standardized(array), rel=1e-12, abs=1e-12)
    assert summary.absmax == np.abs(array.astype(np.float64)).max()


@pytest.mark.parametrize("offset", [0.5, 0.99, 1.5, 1.99, 2.01, 3.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_shape_is_exact_wherever_the_mean_lies(dtype, offset):
    """How far the mean is from zero, against the spread, takes no digit from the shape, drift or not."""
    rng = np.random.default_rng(3)
    for array in (
        rng.uniform(-1.7, 1.7, 20_000) + offset,
        np.linspace(-offset, offset, 20_000) + rng.gamma(2, 1, 20_000),
    ):
        summary = tt.summarize(array.astype(dtype))
        expected = standardized(array.astype(dtype))
        assert (summary.skewness, summary.kurtosis) == pytest.approx(expected, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e-40, 1e60, 1e160, 1e290])
def test_no_scale_changes_the_shape(scale):
    """Skewness and kurtosis of doubles near the ends of their range are those of the numbers scaled back."""
    array = np.random.default_rng(0).standard_normal(5000)
    plain, scaled = tt.summarize(array), tt.summarize(array * scale)
    assert (scaled.skewness, scaled.kurtosis) == pytest.approx((plain.skewness, plain.kurtosis), rel=1e-12)


def test_without_spread_there_is_no_shape():
    """Equal elements, and none, have neither skewness nor kurtosis."""
    for values in ([3.0] * 5000, [float("nan")], []):
        summary = tt.summarize(np.array(values))
        assert np.isnan(summary.kurtosis) and np.isnan(summary.skewness)


def test_kurtosis_merges_exactly():
    """Rows of pieces, equal ones and empty ones among them, merge into the row of the whole."""
    rng = np.random.default_rng(1)
    pieces = [rng.standard_normal(n) * n + n for n in (1, 3, 700, 40)] + [np.full(9, 2.5), np.zeros(0)]
    rows = [tt.summarize(piece) for piece in pieces]
    columns = {name: np.array([row[name] for row in rows], ROW[name]) for name in NUMBERS}
    merged, whole = merge_groups(columns, np.array([0])), tt.summarize(np.concatenate(pieces))
    for name in NUMBERS:
        assert float(merged[name][0]) == pytest.approx(whole[name], rel=1e-11), name


def test_a_pair_of_runs_has_a_field_for_what_is_compared():
    """What `diff` says of two sites has the statistics that are compared."""
    assert {statistic.name for statistic in REGISTRY if statistic.bound is not None} <= {f.name for f in fields(Pair)}
