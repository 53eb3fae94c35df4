"""What one traced function leaves when it has run: tensors in the order in which they were met, loops among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import tensorflow as tf

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.cells import cell, content
from tensortap.adapters.keras.loops import Loop
from tensortap.adapters.keras.rows import Row
from tensortap.record.recorder import OpenStep, Point


class Raw:
    """One tensor, held as it is."""

    def __init__(self, point: Point, tensor: Any) -> None:
        self.point = point
        self._variable = cell([], tensor.dtype, tf.TensorShape(None))

    def write(self, tensor: Any) -> None:
        """In the graph: keep it."""
        self._variable.assign(tensor)

    def free(self) -> None:
        """Let go of the memory."""
        self._variable.assign(tf.zeros([0], self._variable.dtype))

    def read(self, observer: ArrayObserver, step: OpenStep) -> None:
        """On the host: record it."""
        observer.take(self.point, content(self._variable), step)


class Trace:
    """What one traced function, or one place in it, leaves: tensors in order, a count of runs, the loss."""

    def __init__(self, xla: bool) -> None:
        self.xla = xla
        self.pending: list[tuple[Raw | Row, Any]] = []
        self.loss: Any = None
        self.held: list[Raw | Row | Loop] = []
        self._read = 0
        self._runs = cell(0, tf.int64)

    def add(self, holder: Raw | Row, tensor: Any) -> None:
        """A tensor, to be written at the end."""
        self.held.append(holder)
        self.pending.append((holder, tensor))

    def finish(self, wanted: Callable[[Any], Any]) -> None:
        """End of the function: write everything, if it is wanted."""
        pending, self.pending = self.pending, []

        def write() -> Any:
            for holder, tensor in pending:
                holder.write(tensor)
            return self._runs.assign_add(1, read_value=True)

        tf.cond(wanted(self.loss), write, self._runs.read_value)

    def read(self, observer: ArrayObserver, step: OpenStep) -> int:
        """Record what it has written; how often it has run."""
        runs = self._new_runs()
        record(self.held, observer, step, ran=bool(runs))
        return runs

    def _new_runs(self) -> int:
        """How often it has written since it was asked last."""
        total = int(content(self._runs))
        new, self._read = total - self._read, total
        return new


def record(holders: Sequence[Raw | Row | Loop], observer: ArrayObserver, step: OpenStep, ran: bool) -> None:
    """Record what was written, all tensors in the body of a loop pass by pass.

    What has not run may have loops that have: the loss, which is known only afterwards, was below the limit.
    """
    for graph, group in itertools.groupby(holders, _loop_of):
        if not ran:
            for loop in group if graph is not None else ():
                loop.free()
        elif graph is not None:
            _record_passes(cast("Iterable[Loop]", group), observer, step)
        else:
            for tensor in cast("Iterable[Raw | Row]", group):
                tensor.read(observer, step)


def _record_passes(loops: Iterable[Loop], observer: ArrayObserver, step: OpenStep) -> None:
    for passes in itertools.zip_longest(*(loop.take(observer, step) for loop in loops)):
        for take in filter(None, passes):
            take()


def _loop_of(holder: Raw | Row | Loop) -> Any:
    return holder.graph if isinstance(holder, Loop) else None
