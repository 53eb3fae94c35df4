"""Tensors inside TensorFlow graphs: kept in variables while a graph runs, and read by the host after the step.

README.md of `adapters/keras` says why it is done this way.
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
from tensortap.adapters.keras.graphs.loops import LoopTap, LoopTensors
from tensortap.adapters.keras.graphs.rows import HeldRow, LoopRows
from tensortap.adapters.keras.graphs.traces import HeldTensor, TracedFunction, record
from tensortap.adapters.keras.graphs.variables import LoopVariable, host_variable, read_variable
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


class _Tracing(threading.local):
    function: TracedFunction | None = None
    graph: Any = None


class GraphTaps:
    """All taps in graphs that belong to one tap of the user."""

    def __init__(self, arrays: ArrayObserver, limits: Sequence[tuple[str, float]]) -> None:
        self.arrays = arrays
        self._limits = limits  # comparisons of the loss that the graph itself decides
        self._functions: list[TracedFunction] = []
        self._loops: list[LoopTap] = []  # in functions whose end is not seen
        self._tracing = _Tracing()
        self._armed = LoopVariable(host_variable([True, False]))
        self._was_armed = (True, False)
        self._loss = host_variable([0.0, 0.0], tf.float64)  # the last one, and how many
        self._losses = 0.0

    @property
    def mark(self) -> Any:
        """The variable that every function with taps captures, and no other function."""
        return self._armed.handle

    def arm(self, always: bool, limited: bool) -> None:
        """Tell graphs what the next run is wanted for: in any case, or if its loss passes a limit."""
        if self._was_armed != (always, limited):
            self._was_armed = (always, limited)
            self._armed.variable.assign([always, limited])

    def close(self) -> None:
        """Stop writing and release everything: a function that was traced with taps may outlive them."""
        self.arm(False, False)
        for held in (*self._loops, *(held for function in self._functions for held in function.held)):
            held.free()
        self._functions.clear()
        self._loops.clear()

    @property
    def tracing(self) -> bool:
        """Whether a function is being traced whose end is seen."""
        return self._tracing.function is not None

    @contextlib.contextmanager
    def function(self) -> Iterator[None]:
        """Enclose a function: the tensors in its graph belong together and are written at its end."""
        graph = tf.compat.v1.get_default_graph()
        function = self._begin(graph)
        self._tracing.function, self._tracing.graph = function, graph
        try:
            yield
        except BaseException:
            self._functions.remove(function)  # it will never run
            raise
        finally:
            self._tracing.function = None
        self._finish(function)

    def keep(self, point: Point, tensor: Any) -> None:
        """Keep a tensor of a graph when the graph runs."""
        function = self._tracing.function
        if function is not None and tensor.graph is self._tracing.graph:
            function.add(self._held(point, tensor, function.xla), tensor)
            return
        with tensor.graph.as_default():
            if function is not None or _in_loop(tensor.graph):  # or a branch, or a function of its own
                self._keep_passes(point, tensor, function)
            else:
                function = self._begin(tensor.graph)
                function.add(self._held(point, tensor, function.xla), tensor)
                self._finish(function)

    def _keep_passes(self, point: Point, tensor: Any, function: TracedFunction | None) -> None:
        xla = _compiled(tensor.graph)
        self._count_skipped_elements(xla, point)
        store = LoopRows(point, tensor, *self._wants(point)) if xla else LoopTensors(point, tensor)
        loop = LoopTap(store, tensor.graph)
        loop.write(tensor, self._wanted(None))
        self._loops.append(loop) if function is None else function.held.append(loop)

    def _held(self, point: Point, tensor: Any, xla: bool) -> HeldTensor | HeldRow:
        self._count_skipped_elements(xla, point)
        return HeldRow(point, tensor, *self._wants(point)) if xla else HeldTensor(point, tensor)

    def _wants(self, point: Point) -> tuple[bool, bool]:
        """Return whether a histogram and a content hash are wanted."""
        recorder = self.arrays.recorder
        return bool(point.probes & recorder.histogram_probes), bool(point.probes & recorder.hash_probes)

    def _count_skipped_elements(self, xla: bool, point: Point) -> None:
        if xla and point.keeping:
            self.arrays.recorder.counters.add("skipped_elements")
            self.arrays.recorder.counters.warn("xla", NO_ELEMENTS)

    def observe_loss(self, loss: Any) -> None:
        """Note the loss of the function that is being traced."""
        function = self._tracing.function
        if function is not None and getattr(loss, "graph", None) is self._tracing.graph:
            function.loss = loss

    def collect(self, step: OpenStep) -> None:
        """Record what the functions that ran have written."""
        for function in self._functions:
            runs = function.record(self.arrays, step)
            if runs > 1:
                self.arrays.recorder.counters.add("overwritten_runs", runs - 1)
                self.arrays.recorder.counters.warn("overwritten", OVERWRITTEN)
        record(self._loops, self.arrays, step, ran=True)

    def loss(self) -> float | None:
        """Return the loss of the last run, if there was one since the last call."""
        loss, number = read_variable(self._loss)
        new, self._losses = number != self._losses, number
        return float(loss) if new else None

    def _begin(self, graph: Any) -> TracedFunction:
        function = TracedFunction(_compiled(graph))
        self._functions.append(function)
        return function

    def _finish(self, function: TracedFunction) -> None:
        if function.loss is not None:
            self._loss.assign(tf.stack([_number(function.loss), self._loss.read_value()[1] + 1.0]))
        function.finish(self._wanted)

    def _wanted(self, loss: Any) -> Any:
        always, limited = tf.unstack(self._armed.read())
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
    """Return whether XLA will compile a graph, or it may run where the host cannot read."""
    return bool(GraphOrParentsInXlaContext(graph)) or bool(tf.config.list_logical_devices("GPU"))
