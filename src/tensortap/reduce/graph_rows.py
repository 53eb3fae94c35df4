"""Read the rows that the C kernel wrote inside a framework's graph, as arrays of 32-bit integers.

XLA knows types and shapes when a graph is traced (csrc/xla.h); ONNX Runtime when it runs (csrc/onnx.h).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.reduce import statistics
from tensortap.reduce.histogram import BUCKETS

Words = npt.NDArray[np.uint32]
ROW: Final = statistics.ROW.itemsize // 4
HEAD: Final = ROW + 2  # the row, where the histogram begins, and how long it is
WITH_HISTOGRAM: Final = HEAD + BUCKETS
_SHAPE: Final = HEAD + 2  # and the type, and the number of dimensions


class Reduced(NamedTuple):
    """A tensor of which only the row is known. `row` has the fields of `statistics.ROW`."""

    row: Any
    hist_offset: int
    hist_counts: npt.NDArray[Any] | None
    dtype: int
    shape: tuple[int, ...]


def read(words: Words, dtype: int, shape: tuple[int, ...]) -> Reduced:
    """Return a row whose type and shape are known."""
    offset, counts = _histogram(words, HEAD)
    return Reduced(_row(words), offset, counts, dtype, shape)


def read_all(words: Words) -> Reduced | None:
    """Return a row that tells its type and shape itself; None for a tensor of a type that has no row."""
    dtype, rank = words[HEAD:_SHAPE].view(np.int32).tolist()
    if dtype < 0:
        return None
    shape = tuple(words[_SHAPE : _SHAPE + 2 * rank].view(np.int64).tolist())
    offset, counts = _histogram(words, _SHAPE + 2 * rank)
    return Reduced(_row(words), offset, counts, dtype, shape)


def _row(words: Words) -> Any:
    row = words[:ROW].view(statistics.ROW)[0]
    if row["numel"] < 0:
        raise MemoryError("there was no memory to reduce a tensor inside the graph")
    return row


def _histogram(words: Words, begin: int) -> tuple[int, Words | None]:
    offset, length = words[ROW:HEAD].view(np.int32).tolist()
    return offset, None if length < 0 else words[begin : begin + length]
