"""Arrow columns of numbers as NumPy arrays. `to_numpy` would import pandas first, while somebody waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def array_of(column: Any) -> npt.NDArray[Any]:
    """The values; NaN for a null among floats.

    >>> array_of(pa.chunked_array([[1.5, None], [2.0]])), array_of(pa.array([True, False]))
    (array([1.5, nan, 2. ]), array([ True, False]))
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_part(chunk) for chunk in chunks if len(chunk)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, _dtype(column.type))


def _part(chunk: Any) -> npt.NDArray[Any]:
    if pa.types.is_boolean(chunk.type):
        bits = np.unpackbits(np.frombuffer(chunk.buffers()[1], np.uint8), bitorder="little")
        return bits[chunk.offset : chunk.offset + len(chunk)].astype(bool)
    if chunk.null_count:
        chunk = pc.fill_null(chunk, float("nan"))
    return np.frombuffer(chunk.buffers()[1], _dtype(chunk.type))[chunk.offset : chunk.offset + len(chunk)]


def _dtype(kind: Any) -> Any:
    return np.dtype(bool if pa.types.is_boolean(kind) else str(kind).replace("double", "float64"))
