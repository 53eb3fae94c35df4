"""Convert Arrow columns to NumPy arrays and back, without the functions of Arrow that import pandas.

`pyarrow.array`, `pyarrow.scalar`, expressions and data sets import pandas if it is installed: half a second, which the
first request to a viewer would wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
_TABLED: Final = 1 << 22  # combinations of words up to which a table beats sorting


def array_of(column: Any) -> npt.NDArray[Any]:
    """Return the values; NaN for a null among floats.

    >>> array_of(pa.chunked_array([[1.5, None], [2.0]])), array_of(pa.array([True, False]))
    (array([1.5, nan, 2. ]), array([ True, False]))
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_part(chunk) for chunk in chunks if len(chunk)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, _dtype(column.type))


def arrow_of(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None = None) -> Any:
    """Return numbers as an Arrow array, null where they are `missing`; `pyarrow.array` would import pandas.

    >>> arrow_of(np.array([1.5, 0.0]), np.array([False, True])).to_pylist(), arrow_of(np.array([True])).to_pylist()
    ([1.5, None], [True])
    """
    data = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, pa.py_buffer(data)])


def empty_table(schema: Any) -> Any:
    """Return a table without rows; the `empty_table` of Arrow's schemas would import pandas.

    >>> empty_table(pa.schema({"step": pa.int64()})).num_rows
    0
    """
    return pa.Table.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _part(chunk: Any) -> npt.NDArray[Any]:
    valid, data = chunk.buffers()
    if pa.types.is_boolean(chunk.type):
        return _bits(data, chunk)
    values = np.frombuffer(data, _dtype(chunk.type))[chunk.offset : chunk.offset + len(chunk)]
    if chunk.null_count:  # `pyarrow.compute.fill_null` would import pandas
        values = np.where(_bits(valid, chunk), values, np.nan if values.dtype.kind == "f" else 0)
    return values


def _bits(buffer: Any, chunk: Any) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return bits[chunk.offset : chunk.offset + len(chunk)].astype(bool)


def _dtype(kind: Any) -> Any:
    return np.dtype(bool if pa.types.is_boolean(kind) else str(kind).replace("double", "float64"))


def encoded(column: Any) -> Any:
    """Return a column as one dictionary array."""
    column = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    column = column.unify_dictionaries().combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def numbered(code: Ints, size: int) -> tuple[Ints, Ints]:
    """Return the codes in use, and for each row which of them it has."""
    if size > _TABLED:
        return np.unique(code, return_inverse=True)
    present = np.flatnonzero(np.bincount(code, minlength=1)) if len(code) else np.zeros(0, np.int64)
    table = np.zeros(size, np.int64)
    table[present] = np.arange(len(present))
    return present, table[code]


def per_run(function: Callable[[Ints], Ints], values: Ints) -> Ints:
    """Return a function of each value, which is asked once for equal values in a row, as the steps of rows are.

    >>> per_run(lambda steps: steps * 10, np.array([3, 3, 4, 3])).tolist()
    [30, 30, 40, 30]
    """
    first = np.ones(len(values), bool)
    first[1:] = values[1:] != values[:-1]
    starts = np.flatnonzero(first)
    return np.repeat(function(values[starts]), np.diff(starts, append=len(values)))
