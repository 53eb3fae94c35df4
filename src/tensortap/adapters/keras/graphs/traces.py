"""The values that one traced function writes when it runs: tensors and loops, in the order of tracing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import tensorflow as tf

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.graphs.loops import LoopTap
from tensortap.adapters.keras.graphs.rows import HeldRow
from tensortap.adapters.keras.graphs.variables import host_variable, read_variable
from tensortap.record.recorder import OpenStep, Point


class HeldTensor:
    """One tensor, kept as it is in a variable."""

    def __init__(self, point: Point, tensor: Any) -> None:
        self.point = point
        self._variable = host_variable([], tensor.dtype, tf.TensorShape(None))

    def write(self, tensor: Any) -> None:
        """Keep a tensor (in the graph)."""
        self._variable.assign(tensor)

    def free(self) -> None:
        """Release the memory."""
        self._variable.assign(tf.zeros([0], self._variable.dtype))

    def record(self, arrays: ArrayObserver, step: OpenStep) -> None:
        """Record it (on the host)."""
        arrays.take(self.point, read_variable(self._variable), step)


class TracedFunction:
    """The values that one traced function, or one place in it, writes: tensors in order, a count of runs, the loss."""

    def __init__(self, xla: bool) -> None:
        self.xla = xla
        self.loss: Any = None
        self.held: list[HeldTensor | HeldRow | LoopTap] = []
        self._pending: list[tuple[HeldTensor | HeldRow, Any]] = []
        self._read = 0
        self._runs = host_variable(0, tf.int64)

    def add(self, holder: HeldTensor | HeldRow, tensor: Any) -> None:
        """Add a tensor, to be written at the end of the function."""
        self.held.append(holder)
        self._pending.append((holder, tensor))

    def finish(self, wanted: Callable[[Any], Any]) -> None:
        """End the function: write everything if the run is wanted."""
        pending, self._pending = self._pending, []

        def write() -> Any:
            for holder, tensor in pending:
                holder.write(tensor)
            return self._runs.assign_add(1, read_value=True)

        done = tf.cond(wanted(self.loss), write, self._runs.read_value)
        graph = tf.compat.v1.get_default_graph()
        if graph.name.startswith("__backward"):  # TensorFlow drops from it what no gradient needs
            graph.control_outputs.append(done.op)

    def record(self, arrays: ArrayObserver, step: OpenStep) -> int:
        """Record what it has written; return how often it has run since the last call."""
        runs = self._new_runs()
        record(self.held, arrays, step, ran=bool(runs))
        return runs

    def _new_runs(self) -> int:
        total = int(read_variable(self._runs))
        new, self._read = total - self._read, total
        return new


def record(held: Sequence[HeldTensor | HeldRow | LoopTap], arrays: ArrayObserver, step: OpenStep, ran: bool) -> None:
    """Record what was written; tensors in the body of one loop pass by pass.

    A function that has not written may have loops that have: the loss, known only afterwards, was below the limit.
    """
    for graph, group in itertools.groupby(held, _loop_of):
        if not ran:
            for loop in group if graph is not None else ():
                loop.free()
        elif graph is not None:
            _record_passes(cast("Iterable[LoopTap]", group), arrays, step)
        else:
            for tensor in cast("Iterable[HeldTensor | HeldRow]", group):
                tensor.record(arrays, step)


def _record_passes(loops: Iterable[LoopTap], arrays: ArrayObserver, step: OpenStep) -> None:
    for passes in itertools.zip_longest(*(loop.passes(arrays, step) for loop in loops)):
        for record_pass in filter(None, passes):
            record_pass()


def _loop_of(held: HeldTensor | HeldRow | LoopTap) -> Any:
    return held.graph if isinstance(held, LoopTap) else None
