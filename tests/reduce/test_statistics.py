"""The registry of statistics, and everything that must agree with it."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tensortap as tt
from tensortap.diff.metrics import relative
from tensortap.record.columns import Columns
from tensortap.reduce import _kernel
from tensortap.reduce.statistics import (
    BY_NAME,
    COLUMNS,
    CONDITIONS,
    EMPTY_ROW,
    NUMBERS,
    REGISTRY,
    ROW,
    RowValues,
    row_without_values,
)
from tensortap.store.schema import RECORDS
from tensortap.view.api.stats import STATS

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-folder.md"
NULL = {"always": "", "finite": "; null when none is finite", "spread": "; null when all that are finite are equal"}


def test_the_c_kernel_has_the_same_row():
    """C lists the statistics in the registry's order: slot by slot."""
    assert _kernel.STATISTICS == NUMBERS == ROW.names
    assert [statistic.slot for statistic in REGISTRY] == list(range(len(REGISTRY)))
    assert ROW.itemsize == 8 * len(REGISTRY)


def test_a_summary_has_every_statistic():
    """`Summary` has a field for each, with its type."""
    types = {field.name: field.type for field in fields(RowValues)}
    assert types == {s.name: "int" if s.is_count else "float" for s in REGISTRY}
    assert [name for name in tt.summarize([1.0]) if name in BY_NAME] == list(NUMBERS)


def test_the_schema_and_the_table_have_every_statistic():
    """Files and step tables have a column for each, and a bitmap for each condition."""
    for statistic in REGISTRY:
        assert RECORDS.field(statistic.name).type == (pa.int64() if statistic.is_count else pa.float64())
    assert [name for name in RECORDS.names if name in BY_NAME] == list(NUMBERS)
    table = Columns(1, 1, 1, 1)
    assert {*NUMBERS, *CONDITIONS} <= set(table.columns) and set(NUMBERS) <= set(COLUMNS)


def test_rows_without_values_are_undefined():
    """A tensor without elements has counts and sums of zero; one without values has nothing but its size."""
    assert pytest.approx(tuple(tt.summarize(np.zeros(0))[name] for name in NUMBERS), nan_ok=True) == EMPTY_ROW
    absent = dict(zip(NUMBERS, row_without_values(7), strict=True))
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
    assert set(relative(a, b)) == {statistic.name for statistic in REGISTRY if statistic.bound is not None}


@pytest.mark.parametrize("statistic", REGISTRY, ids=NUMBERS)
def test_the_document_describes_it(statistic):
    """The table in docs/run-folder.md has a line for each statistic, with its type and meaning."""
    kind = "int64" if statistic.is_count else "double"
    line = f"| `{statistic.name}` | {kind} | {statistic.meaning}{NULL[statistic.defined]} |"
    assert line in DOCUMENT.read_text().splitlines()
