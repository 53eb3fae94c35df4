"""Statistics of every column of a matrix, and rounding to bfloat16: in C where it was built, else by NumPy.

Both add a column's values in the order of the rows, in double, and so give the same numbers to the last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.reduce import kernel as kernels
from tensortap.reduce.buffers import buffer_of

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_MOST_ROWS = 1 << 31
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_IN_C = {np.dtype(np.float32), np.dtype(np.float16), _BFLOAT16, np.dtype(ml_dtypes.float8_e4m3fn),
         np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.bool_)}  # fmt: skip


class ColumnStatistics(NamedTuple):
    """For every column: the counts of finite, zero and positive values, and mean, squares, minimum and maximum.

    `squares` is the sum of squared deviations from the mean. A column without finite values has mean 0, minimum inf
    and maximum -inf.
    """

    finite: Counts
    zero: Counts
    positive: Counts
    mean: Floats
    squares: Floats
    min: Floats
    max: Floats


def column_statistics(block: Array) -> ColumnStatistics:
    """Return the statistics of the columns of a matrix with at least one row.

    >>> found = column_statistics(np.array([[1.0, 0.0], [3.0, np.nan]], np.float32))
    >>> found.mean.tolist(), found.finite.tolist(), found.max.tolist()
    ([2.0, 0.0], [2, 1], [3.0, 0.0])
    """
    rows, width = block.shape
    if kernels.reduce_columns is None or block.dtype not in _IN_C or not rows or not width or rows >= _MOST_ROWS:
        return _by_numpy(block)
    dense = np.ascontiguousarray(block)
    out = np.empty((7, width), np.int64)
    buffer = buffer_of(dense)
    kernels.reduce_columns(out.ctypes.data, buffer.address, buffer.dtype, rows, width)
    reals = out.view(np.float64)
    return ColumnStatistics(out[0], out[1], out[2], reals[3], reals[4], reals[5], reals[6])


def round_to_bfloat16(values: Array) -> Array:
    """Return float32 values as bfloat16, to the nearest, in one run of memory.

    >>> round_to_bfloat16(np.array([1.0, 3.14159], np.float32)).tolist()
    [1.0, 3.140625]
    """
    if kernels.round_bfloat16 is None:
        return np.array(values, dtype=_BFLOAT16, order="C", copy=True)
    dense = np.ascontiguousarray(values, np.float32)
    out = np.empty(dense.shape, np.uint16)
    kernels.round_bfloat16(out.ctypes.data, dense.ctypes.data, dense.size)
    return out.view(_BFLOAT16)


def _by_numpy(block: Array) -> ColumnStatistics:
    exact = block.dtype in _IN_C
    wide: Array = block.astype(np.float32 if exact else np.float64)
    usable = np.isfinite(wide)
    finite = np.count_nonzero(usable, axis=0)
    clean: Array = np.where(usable, wide, 0.0).astype(wide.dtype)
    mean = np.where(finite > 0, clean.sum(axis=0, dtype=np.float64) / np.maximum(finite, 1), 0.0)
    away: Array = np.where(usable, clean - mean.astype(wide.dtype), 0.0).astype(np.float64)
    return ColumnStatistics(
        finite, np.count_nonzero(wide == 0, axis=0), np.count_nonzero(wide > 0, axis=0), mean,
        np.square(away).sum(axis=0),
        np.where(usable, wide, np.inf).min(axis=0, initial=np.inf).astype(np.float64) + 0.0,
        np.where(usable, wide, -np.inf).max(axis=0, initial=-np.inf).astype(np.float64) + 0.0,
    )  # fmt: skip
