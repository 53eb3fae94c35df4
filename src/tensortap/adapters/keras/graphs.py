"""Tensors inside a TensorFlow graph: held in variables while it runs, and read by the host after the step.

A tensor in a graph has no values while Python sees it. On a CPU the graph hands it to a variable, which shares its
memory and copies nothing; after the step the kernel reads it there, so the row is the very row of an eager call. What
XLA compiles, and what runs on other devices, computes its rows itself (rows.py) and leaves only those. Whether anything
is written is asked inside the graph: a trigger never retraces. There is no callback into Python: XLA refuses those.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.cells import LoopCell, cell, content
from tensortap.adapters.keras.loops import Elements, Loop
from tensortap.adapters.keras.rows import Row, Rows
from tensortap.adapters.keras.traces import Raw, Trace, record
from tensortap.record.recorder import OpenStep, Point

NO_ELEMENTS: Final = (
    "inside what XLA compiles there are statistics and histograms only; to keep elements or call a function, "
    "compile the model with jit_compile=False"
)
OVERWRITTEN: Final = (
    "a traced function ran more than once within a step, and only its last run was seen: close each step with "
    "tap.step(), and set steps_per_execution=1"
)
_COMPARE: Final = {">": tf.greater, "<": tf.less, ">=": tf.greater_equal, "<=": tf.less_equal}


class Graphs:
    """All that one tap has in graphs."""

    def __init__(self, observer: ArrayObserver, limits: Sequence[tuple[str, float]]) -> None:
        self.observer = observer
        self._limits = limits  # comparisons of the loss that the graph itself decides
        self._traces: list[Trace] = []
        self._loops: list[Loop] = []  # in functions whose end is not seen
        self._local = threading.local()
        self._gate = LoopCell(cell([True, False]))
        self._loss = cell([0.0, 0.0], tf.float64)  # the last one, and how many
        self._losses = 0.0
        self._set = (True, False)

    @property
    def mark(self) -> Any:
        """What every function with taps captures, and no other."""
        return self._gate.handle

    def open(self, always: bool, limited: bool) -> None:
        """Say what the next run is wanted for: at any rate, or if its loss passes a limit."""
        if self._set != (always, limited):
            self._set = (always, limited)
            self._gate.variable.assign([always, limited])

    def close(self) -> None:
        """Write no more, and keep nothing: a function that was traced with taps may outlive them."""
        self.open(False, False)
        for held in (*self._loops, *(held for trace in self._traces for held in trace.held)):
            held.free()
        self._traces.clear()
        self._loops.clear()

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
        if trace is not None and tensor.graph is self._local.graph:
            trace.add(self._holder(point, tensor, trace.xla), tensor)
            return
        with tensor.graph.as_default():
            if trace is not None or _in_loop(tensor.graph):  # or a branch, or a function of its own
                self._hold_passes(point, tensor, trace)
            else:
                trace = self._begin(tensor.graph)
                trace.add(self._holder(point, tensor, trace.xla), tensor)
                self._finish(trace)

    def _hold_passes(self, point: Point, tensor: Any, trace: Trace | None) -> None:
        xla = _compiled(tensor.graph)
        self._say_what_is_skipped(xla, point)
        store = Rows(point, tensor, self._histogram(point)) if xla else Elements(point, tensor)
        loop = Loop(store, tensor.graph)
        loop.write(tensor, self._plan(None))
        self._loops.append(loop) if trace is None else trace.held.append(loop)

    def _holder(self, point: Point, tensor: Any, xla: bool) -> Raw | Row:
        self._say_what_is_skipped(xla, point)
        return Row(point, tensor, self._histogram(point)) if xla else Raw(point, tensor)

    def _histogram(self, point: Point) -> bool:
        return bool(point.probes & self.observer.recorder.histogram_probes)

    def _say_what_is_skipped(self, xla: bool, point: Point) -> None:
        if xla and point.keeping:
            self.observer.recorder.counters.add("skipped_elements")
            self.observer.recorder.counters.warn("xla", NO_ELEMENTS)

    def lost(self, loss: Any) -> None:
        """The loss of the function that is being traced."""
        trace = getattr(self._local, "trace", None)
        if trace is not None and getattr(loss, "graph", None) is self._local.graph:
            trace.loss = loss

    def collect(self, step: OpenStep) -> None:
        """Record what the functions that ran have written."""
        for trace in self._traces:
            runs = trace.read(self.observer, step)
            if runs > 1:
                self.observer.recorder.counters.add("overwritten_runs", runs - 1)
                self.observer.recorder.counters.warn("overwritten", OVERWRITTEN)
        record(self._loops, self.observer, step, ran=True)

    def loss(self) -> float | None:
        """The loss of the last run, where there was one since this was asked last."""
        loss, number = content(self._loss)
        new, self._losses = number != self._losses, number
        return float(loss) if new else None

    def _begin(self, graph: Any) -> Trace:
        trace = Trace(_compiled(graph))
        self._traces.append(trace)
        return trace

    def _finish(self, trace: Trace) -> None:
        if trace.loss is not None:
            self._loss.assign(tf.stack([_number(trace.loss), self._loss.read_value()[1] + 1.0]))
        trace.finish(self._plan)

    def _plan(self, loss: Any) -> Any:
        always, limited = tf.unstack(self._gate.read())
        if loss is None or not self._limits:
            return always | limited
        passed = [_COMPARE[sign](_number(loss), tf.constant(value, tf.float64)) for sign, value in self._limits]
        return always | (limited & tf.reduce_any(passed))


def _in_loop(graph: Any) -> bool:
    while graph is not None and not isinstance(graph, WhileBodyFuncGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def _number(loss: Any) -> Any:
    return tf.cast(tf.reduce_mean(loss), tf.float64)


def _compiled(graph: Any) -> bool:
    """Whether XLA will compile it, or it may run where the host cannot read."""
    return bool(GraphOrParentsInXlaContext(graph)) or bool(tf.config.list_logical_devices("GPU"))
