"""Tensors in the body of a loop inside a graph: every pass is kept while the loop runs, and becomes a call.

The body belongs to whoever made the loop, so nothing can be added to the values that it hands from pass to pass.
Instead a pass is appended to a tensor list in a variable. The list holds references, so nothing is copied. XLA has no
such lists: there the row of every pass goes into a table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tensortap.adapters.arrays import MOST_LOOPS, ArrayObserver
from tensortap.adapters.keras.graphs.rows import LoopRows
from tensortap.adapters.keras.graphs.variables import LoopVariable, host_variable, read_variable
from tensortap.record.recorder import OpenStep, Point


class LoopTensors:
    """The tensors of a loop's passes as they are, of any shape."""

    def __init__(self, point: Point, tensor: Any) -> None:
        self.point = point
        self._dtype = tensor.dtype
        with tf.init_scope():
            self._list = LoopVariable(host_variable(self._empty(), shape=()))

    def write_pass(self, tensor: Any, number: Any) -> None:
        """Keep the tensor of one pass (in the loop)."""
        self._list.assign(tf.raw_ops.TensorListPushBack(input_handle=self._list.read(), tensor=tensor))

    def passes(self, arrays: ArrayObserver, step: OpenStep, number: int) -> list[Callable[[], None]]:
        """Return, on the host, what records each of the first passes."""
        kept = self._list.variable.read_value()
        return [partial(self._record, arrays, step, kept, i) for i in range(number)]

    def free(self) -> None:
        """Release the memory."""
        self._list.variable.assign(self._empty())

    def _record(self, arrays: ArrayObserver, step: OpenStep, kept: Any, i: int) -> None:
        tensor = tf.raw_ops.TensorListGetItem(
            input_handle=kept, index=i, element_shape=tf.constant(-1), element_dtype=self._dtype
        )
        arrays.take(self.point, np.asarray(tensor), step)

    def _empty(self) -> Any:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(-1), max_num_elements=tf.constant(-1), element_dtype=self._dtype
        )


class LoopTap:
    """One tensor of a graph that runs any number of times while the function runs once."""

    def __init__(self, store: LoopTensors | LoopRows, graph: Any) -> None:
        self.graph = graph
        self._store = store
        self._number = LoopVariable(host_variable(0, tf.int32))

    def write(self, tensor: Any, wanted: Any) -> None:
        """Keep a tensor if it is wanted and there is room, and count it (in the loop)."""
        number = self._number.read()

        def keep() -> Any:
            self._store.write_pass(tensor, number)
            return tf.identity(number)

        def add() -> Any:
            kept = tf.cond(number < MOST_LOOPS, keep, lambda: tf.identity(number))
            self._number.add(1)
            return kept

        tf.cond(wanted, add, lambda: tf.identity(number))

    def passes(self, arrays: ArrayObserver, step: OpenStep) -> list[Callable[[], None]]:
        """Return, on the host, what records each pass since the last call, and begin again."""
        number = int(read_variable(self._number.variable))
        if number > MOST_LOOPS:
            arrays.recorder.counters.add("unseen_iterations", number - MOST_LOOPS)
        found = self._store.passes(arrays, step, min(number, MOST_LOOPS))
        self.free()
        return found

    def free(self) -> None:
        """Release the memory, and begin again."""
        if int(read_variable(self._number.variable)):
            self._number.variable.assign(0)
            self._store.free()
