"""Tensors in the body of a loop inside a graph: each pass is kept while it runs, and is a call when the host reads it.

The body belongs to whoever made the loop, so nothing can be carried along in it: a pass is added to a list that lies in
a variable. The list holds references, so nothing is copied. What XLA compiles has no such lists, and puts the row of
each pass into a table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.cells import LoopCell, cell, content
from tensortap.adapters.keras.rows import Rows
from tensortap.adapters.protocol import MOST_LOOPS
from tensortap.record.recorder import OpenStep, Point


class Elements:
    """The tensors of a loop's passes as they are, of any shape."""

    def __init__(self, point: Point, tensor: Any) -> None:
        self.point = point
        self._dtype = tensor.dtype
        with tf.init_scope():
            self._list = LoopCell(cell(self._empty(), shape=()))

    def put(self, tensor: Any, number: Any) -> None:
        """In the loop: keep what one pass has."""
        self._list.assign(tf.raw_ops.TensorListPushBack(input_handle=self._list.read(), tensor=tensor))

    def passes(self, observer: ArrayObserver, step: OpenStep, number: int) -> list[Callable[[], None]]:
        """On the host: what records each of the first passes."""
        kept = self._list.variable.read_value()
        return [partial(self._take, observer, step, kept, i) for i in range(number)]

    def free(self) -> None:
        """Let go of the memory."""
        self._list.variable.assign(self._empty())

    def _take(self, observer: ArrayObserver, step: OpenStep, kept: Any, i: int) -> None:
        tensor = tf.raw_ops.TensorListGetItem(
            input_handle=kept, index=i, element_shape=tf.constant(-1), element_dtype=self._dtype
        )
        observer.take(self.point, np.asarray(tensor), step)

    def _empty(self) -> Any:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(-1), max_num_elements=tf.constant(-1), element_dtype=self._dtype
        )


class Loop:
    """One tensor of a graph that runs any number of times while the function runs once."""

    def __init__(self, store: Elements | Rows, graph: Any) -> None:
        self.graph = graph
        self._store = store
        self._number = LoopCell(cell(0, tf.int32))

    def write(self, tensor: Any, wanted: Any) -> None:
        """In the loop: keep it if it is wanted and there is room, and count it."""
        number = self._number.read()

        def keep() -> Any:
            self._store.put(tensor, number)
            return tf.identity(number)

        def add() -> Any:
            kept = tf.cond(number < MOST_LOOPS, keep, lambda: tf.identity(number))
            self._number.add(1)
            return kept

        tf.cond(wanted, add, lambda: tf.identity(number))

    def take(self, observer: ArrayObserver, step: OpenStep) -> list[Callable[[], None]]:
        """On the host: what records each pass since this was asked last."""
        number = int(content(self._number.variable))
        if number > MOST_LOOPS:
            observer.recorder.counters.add("unseen_iterations", number - MOST_LOOPS)
        found = self._store.passes(observer, step, min(number, MOST_LOOPS))
        self.free()
        return found

    def free(self) -> None:
        """Let go of the memory, and begin again."""
        if int(content(self._number.variable)):
            self._number.variable.assign(0)
            self._store.free()
