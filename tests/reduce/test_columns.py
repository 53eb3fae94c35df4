"""Statistics by column, rounding and gathering: C at every level, and NumPy, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensortap.reduce import columns, kernel
from tensortap.reduce.columns import column_statistics, round_to_bfloat16

pytestmark = pytest.mark.skipif(kernel.reduce_columns is None, reason="the C extension is not built")
TYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "bool"]


@pytest.fixture(params=[] if kernel.ACTIVE == "numpy" else kernel._kernel.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernel._kernel.level()
    kernel._kernel.set_level(request.param)
    yield request.param
    kernel._kernel.set_level(before)


def matrix(dtype: str, rows: int, width: int) -> Any:
    """Values of all sizes, with zeros of both signs; NaN and infinities where the type has them; one column of NaN."""
    rng = np.random.default_rng(rows * width)
    values = rng.normal(size=(rows, width)) * 10.0 ** rng.integers(-3, 2, width) + rng.integers(0, 2, width)
    values[rng.random(values.shape) < 0.1] = 0.0
    values[rng.random(values.shape) < 0.05] = -0.0
    if dtype not in ("int8", "bool"):
        for odd in (np.nan, np.inf, -np.inf):
            values[rng.random(values.shape) < 0.02] = odd
        values[:, 0] = np.nan
    with np.errstate(all="ignore"):
        return np.nan_to_num(values).astype(dtype) if dtype in ("int8", "bool") else values.astype(np.dtype(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_columns_are_numpys_to_the_last_bit(level: str, dtype: str) -> None:
    """Counts, means, squares and extremes of every column are those of the NumPy version."""
    for rows, width in ((1, 1), (7, 33), (300, 1100)):
        block = matrix(dtype, rows, width)
        for name, got, want in zip(
            columns.ColumnStatistics._fields, column_statistics(block), columns._by_numpy(block), strict=True
        ):
            assert got.tobytes() == want.astype(got.dtype).tobytes(), (level, name, rows, width)


def test_rounding_is_that_of_ml_dtypes(level: str) -> None:
    """To the nearest, ties to even, infinities beyond the range, NaN as it was."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 50_001, dtype=np.uint64).astype(np.uint32)
    bits[:6] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFFC00001, 0x00000001]
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        want = values.astype(ml_dtypes.bfloat16)
    assert round_to_bfloat16(values).tobytes() == want.tobytes()
    assert round_to_bfloat16(values[::-3]).tobytes() == want[::-3].tobytes()


def test_rows_are_gathered_from_anywhere() -> None:
    """Rows of several pieces of memory come together in the order that is asked for."""
    assert kernel.gather_rows is not None
    pieces = [np.arange(n * 5, dtype=np.int32).reshape(n, 5) + 1000 * n for n in (3, 40, 700)]
    rows = [(piece, i) for piece in pieces for i in range(len(piece))]
    order = np.random.default_rng(0).permutation(len(rows))
    addresses = np.array([rows[i][0].ctypes.data + 20 * rows[i][1] for i in order], np.uint64)
    out = np.zeros((len(rows), 5), np.int32)
    kernel.gather_rows(out.ctypes.data, addresses.ctypes.data, len(rows), 20)
    assert np.array_equal(out, np.stack([rows[i][0][rows[i][1]] for i in order]))
