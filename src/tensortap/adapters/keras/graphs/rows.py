"""Compute a tensor's row inside a graph, for XLA and for devices whose memory the host cannot read.

Counts, minimum, maximum and histogram equal the CPU kernel's; moments are summed in float64 in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tensortap.adapters.arrays import MOST_LOOPS, ArrayObserver
from tensortap.adapters.keras.graphs.hashing import hash_halves
from tensortap.adapters.keras.graphs.variables import LoopVariable, host_variable, read_variable
from tensortap.record.recorder import OpenStep, Point
from tensortap.reduce.content_hash import ABSENT, finished
from tensortap.reduce.graph_kernel import COUNTS, MOMENTS, reduce_in_graph, row_from_graph
from tensortap.reduce.graph_rows import Reduced
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.numpy_kernel import trimmed
from tensortap.types import DTYPE_CODE, DTYPES

_MOST_AXES: Final = 8
_NUMBERS: Final = len(COUNTS) + len(MOMENTS)
_NO_BUCKET: Final = BUCKETS  # zeros and what is not finite


class HeldRow:
    """One tensor's statistics, and its histogram where wanted, in variables."""

    room: tuple[int, ...] = ()

    def __init__(self, point: Point, tensor: Any, histogram: bool, hashed: bool) -> None:
        self.point = point
        self.dtype = DTYPE_CODE[tensor.dtype.name]
        self.axes = tensor.shape.rank
        if self.axes is None or self.axes > _MOST_AXES:
            raise ValueError(f"a tensor with {self.axes} axes has no row in a graph")
        self._hashed = hashed and tensor.shape.is_fully_defined()  # lookups need to know how many bytes there are
        numbers = _NUMBERS + self.axes + 2 * self._hashed
        self._numbers = host_variable(np.zeros((*self.room, numbers)), tf.float64)
        self._counts = host_variable(np.zeros((*self.room, BUCKETS + 1)), tf.int32) if histogram else None

    def write(self, tensor: Any) -> None:
        """Reduce a tensor (in the graph)."""
        flat = _flat(tensor)
        self._numbers.assign(_numbers(tensor, flat, self._hashed))
        if self._counts is not None:
            self._counts.assign(_buckets(flat))

    def free(self) -> None:
        """Release nothing: a row is small."""

    def record(self, arrays: ArrayObserver, step: OpenStep) -> None:
        """Put the row into the step's table (on the host)."""
        if step.armed & self.point.probes:
            counts = None if self._counts is None else read_variable(self._counts)
            self._record(arrays, step, read_variable(self._numbers), counts)

    def _record(self, arrays: ArrayObserver, step: OpenStep, numbers: Any, counts: Any) -> None:
        shape = tuple(int(size) for size in numbers[_NUMBERS : _NUMBERS + self.axes])
        content = ABSENT
        if self._hashed:
            low, high = map(int, numbers[_NUMBERS + self.axes :])
            content = finished(low | high << 32, math.prod(shape) * DTYPES[self.dtype].itemsize)
        row = row_from_graph(numbers[: len(COUNTS)], numbers[len(COUNTS) : _NUMBERS], content=content)
        offset, kept = (0, None) if counts is None else trimmed(counts[:BUCKETS].astype(np.uint32))
        arrays.take(self.point, Reduced(row, offset, kept, self.dtype, shape), step)


class LoopRows(HeldRow):
    """The rows of a loop's passes."""

    room = (MOST_LOOPS,)

    def write_pass(self, tensor: Any, number: Any) -> None:
        """Reduce the tensor of one pass (in the loop)."""
        flat = _flat(tensor)
        LoopVariable(self._numbers).assign_row(number, _numbers(tensor, flat, self._hashed))
        if self._counts is not None:
            LoopVariable(self._counts).assign_row(number, _buckets(flat))

    def passes(self, arrays: ArrayObserver, step: OpenStep, number: int) -> list[Callable[[], None]]:
        """Return, on the host, what records each of the first passes."""
        if not step.armed & self.point.probes:
            return []
        numbers = read_variable(self._numbers)
        counts = [None] * number if self._counts is None else read_variable(self._counts)
        return [partial(self._record, arrays, step, numbers[i], counts[i]) for i in range(number)]


def _flat(tensor: Any) -> Any:
    return tf.reshape(tf.abs(tensor) if tensor.dtype.is_complex else tensor, [-1])


def _numbers(tensor: Any, flat: Any, hashed: bool) -> Any:
    halves = [hash_halves(tensor)] if hashed else []
    return tf.concat([_moments(flat), tf.cast(tf.shape(tensor), tf.float64), *halves], 0)


class _TensorflowGraphOperations:
    """TensorFlow's operations, for the shared graph kernel."""

    isnan = staticmethod(tf.math.is_nan)
    isfinite = staticmethod(tf.math.is_finite)
    min = staticmethod(tf.reduce_min)
    sqrt = staticmethod(tf.sqrt)
    max = staticmethod(tf.reduce_max)
    sum = staticmethod(tf.reduce_sum)
    where = staticmethod(tf.where)
    maximum = staticmethod(tf.maximum)

    def is_zero(self, x: Any) -> Any:
        return x == 0.0

    def count(self, condition: Any) -> Any:
        return tf.reduce_sum(tf.cast(condition, tf.float64))

    def as_float(self, count: Any, like: Any) -> Any:
        return count


def _moments(flat: Any) -> Any:
    values = reduce_in_graph(_TensorflowGraphOperations(), tf.cast(flat, tf.float64))
    return tf.stack([*values.counts, *values.moments])


def _buckets(flat: Any) -> Any:
    """Count the elements of each bucket: sign, exponent and three mantissa bits of the float."""
    v = tf.cast(flat, tf.float32 if flat.dtype.size < 4 or flat.dtype == tf.float32 else tf.float64)
    bits = tf.bitcast(_cut(v) if v.dtype == tf.float64 else v, tf.int32)
    sign = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 31), 1)
    bucket = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 19), 0xFFE), sign)
    bucket = tf.where(tf.math.is_finite(v) & (v != 0.0), bucket, _NO_BUCKET)
    return tf.math.unsorted_segment_sum(tf.ones_like(bucket), bucket, BUCKETS + 1)


def _cut(v: Any) -> Any:
    """Truncate doubles to floats, never rounding."""
    cut = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(v, tf.int64), ~0x1FFF_FFFF), tf.float64)
    return tf.cast(tf.clip_by_value(cut, tf.float32.min, tf.float32.max), tf.float32)
