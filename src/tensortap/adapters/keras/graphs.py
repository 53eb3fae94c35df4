"""Tensors inside a TensorFlow graph: held in variables while it runs, and read by the host after the step.

A tensor in a graph has no values while Python sees it. On a CPU the graph hands it to a variable, which shares its
memory and copies nothing; after the step the kernel reads it there, so the row is the very row of an eager call. What
XLA compiles, and what runs on other devices, computes its rows itself (rows.py) and leaves only those. Whether anything
is written is asked inside the graph: a trigger never retraces. There is no callback into Python: XLA refuses those.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from tensortap.adapters.arrays import Taker
from tensortap.adapters.keras.cells import cell
from tensortap.adapters.keras.rows import Row
from tensortap.recorder import OpenStep, Point

NO_ELEMENTS: Final = (
    "inside what XLA compiles there are statistics and histograms only; to keep elements or call a function, "
    "compile the model with jit_compile=False"
)
OVERWRITTEN: Final = (
    "a traced function ran more than once within a step, and only its last run was seen: close each step with "
    "tap.step(), and set steps_per_execution=1"
)
_COMPARE: Final = {">": tf.greater, "<": tf.less, ">=": tf.greater_equal, "<=": tf.less_equal}


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

    def read(self, taker: Taker, step: OpenStep) -> None:
        """On the host: record it."""
        taker.take(self.point, np.asarray(self._variable.read_value()), step)


class Trace:
    """What one traced function, or one place in it, leaves: tensors in order, a count of runs, the loss."""

    def __init__(self, xla: bool) -> None:
        self.xla = xla
        self.pending: list[tuple[Point, Any]] = []
        self.loss: Any = None
        self.held: list[Raw | Row] = []
        self._read = 0
        self._runs = cell(0, tf.int64)

    def finish(self, wanted: Callable[[Any], Any], histograms: int) -> None:
        """End of the function: write everything, if it is wanted."""
        self.held = [self._holder(point, tensor, histograms) for point, tensor in self.pending]
        tensors = [tensor for _, tensor in self.pending]
        self.pending = []

        def write() -> Any:
            for held, tensor in zip(self.held, tensors, strict=True):
                held.write(tensor)
            return self._runs.assign_add(1, read_value=True)

        tf.cond(wanted(self.loss), write, self._runs.read_value)

    def _holder(self, point: Point, tensor: Any, histograms: int) -> Raw | Row:
        return Row(point, tensor, bool(point.probes & histograms)) if self.xla else Raw(point, tensor)

    def runs(self) -> int:
        """How often it has written since it was asked last."""
        total = int(self._runs.numpy())
        new, self._read = total - self._read, total
        return new


class Graphs:
    """All that one tap has in graphs."""

    def __init__(self, taker: Taker, limits: Sequence[tuple[str, float]]) -> None:
        self.taker = taker
        self._limits = limits  # comparisons of the loss that the graph itself decides
        self._traces: list[Trace] = []
        self._local = threading.local()
        self._gate = cell([True, False])
        self._loss = cell([0.0, 0.0], tf.float64)  # the last one, and how many
        self._losses = 0.0
        self._set = (True, False)

    @property
    def cells(self) -> list[Any]:
        """The variables that every function with taps reads."""
        return [self._gate]

    def open(self, always: bool, limited: bool) -> None:
        """Say what the next run is wanted for: at any rate, or if its loss passes a limit."""
        if self._set != (always, limited):
            self._set = (always, limited)
            self._gate.assign([always, limited])

    def close(self) -> None:
        """Write no more, and keep nothing: a function that was traced with taps may outlive them."""
        self.open(False, False)
        for trace in self._traces:
            for held in trace.held:
                held.free()
        self._traces.clear()

    @property
    def tracing(self) -> bool:
        """Whether a function is being traced whose end is seen."""
        return getattr(self._local, "trace", None) is not None

    @contextlib.contextmanager
    def function(self) -> Iterator[None]:
        """While this lasts, what is seen in this graph belongs together and is written at the end."""
        graph = tf.compat.v1.get_default_graph()
        trace = self._begin(graph)
        self._local.trace, self._local.graph = trace, graph
        try:
            yield
        except BaseException:
            self._traces.remove(trace)  # it will never run
            raise
        finally:
            self._local.trace = None
        self._finish(trace)

    def hold(self, point: Point, tensor: Any) -> None:
        """A tensor in a graph: keep it when the graph runs."""
        trace = getattr(self._local, "trace", None)
        if trace is None or tensor.graph is not self._local.graph:  # a loop's body, a function of its own
            trace = self._begin(tensor.graph)
            trace.pending.append((point, tensor))
            with tensor.graph.as_default():
                self._finish(trace)
            return
        trace.pending.append((point, tensor))

    def lost(self, loss: Any) -> None:
        """The loss of the function that is being traced."""
        trace = getattr(self._local, "trace", None)
        if trace is not None and getattr(loss, "graph", None) is self._local.graph:
            trace.loss = loss

    def collect(self, step: OpenStep) -> None:
        """Record what the functions that ran have written."""
        for trace in self._traces:
            if runs := trace.runs():
                for held in trace.held:
                    held.read(self.taker, step)
                if runs > 1:
                    self.taker.recorder.ledger.add("overwritten_runs", runs - 1)
                    self.taker.recorder.ledger.warn("overwritten", OVERWRITTEN)

    def loss(self) -> float | None:
        """The loss of the last run, where there was one since this was asked last."""
        loss, number = self._loss.numpy()
        new, self._losses = number != self._losses, number
        return float(loss) if new else None

    def _begin(self, graph: Any) -> Trace:
        trace = Trace(_compiled(graph))
        self._traces.append(trace)
        return trace

    def _finish(self, trace: Trace) -> None:
        if trace.xla and any(point.keeping for point, _ in trace.pending):
            self.taker.recorder.ledger.add("skipped_elements")
            self.taker.recorder.ledger.warn("xla", NO_ELEMENTS)
        if trace.loss is not None:
            self._loss.assign(tf.stack([_number(trace.loss), self._loss.read_value()[1] + 1.0]))
        trace.finish(self._wanted, self.taker.recorder.histogram_probes)

    def _wanted(self, loss: Any) -> Any:
        always, limited = tf.unstack(self._gate.read_value())
        if loss is None or not self._limits:
            return always | limited
        passed = [_COMPARE[sign](_number(loss), tf.constant(value, tf.float64)) for sign, value in self._limits]
        return always | (limited & tf.reduce_any(passed))


def _number(loss: Any) -> Any:
    return tf.cast(tf.reduce_mean(loss), tf.float64)


def _compiled(graph: Any) -> bool:
    """Whether XLA will compile it, or it may run where the host cannot read."""
    return bool(GraphOrParentsInXlaContext(graph)) or bool(tf.config.list_logical_devices("GPU"))
