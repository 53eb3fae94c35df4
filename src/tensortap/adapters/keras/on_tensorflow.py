"""Keras on TensorFlow: tensors in hand, and in graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras import retracing
from tensortap.adapters.keras.backend import Backend, Undo
from tensortap.adapters.keras.graphs import Graphs
from tensortap.adapters.keras.hooks import LayerHook
from tensortap.adapters.keras.layers import Variable
from tensortap.adapters.keras.ops import GraphOps, operations
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.standins import Around
from tensortap.adapters.keras.steps import KerasStepDetector
from tensortap.adapters.protocol import Clock, Plan, Port
from tensortap.record.recorder import OpenStep, Point

_NO_NUMBERS: Final = (tf.string, tf.resource, tf.variant)
_SPREAD: Final = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


class _Kind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        known = isinstance(value, (tf.Tensor, *_SPREAD, np.ndarray))
        return known and value.dtype not in _NO_NUMBERS


class TensorflowTensors(metaclass=_Kind):
    """TensorFlow's tensors, ragged and sparse ones by their values, and NumPy's arrays."""


class GraphSight(Sight):
    """Records tensors in hand; lets graphs hold the others until they have run."""

    kind = TensorflowTensors

    def __init__(self, observer: ArrayObserver, steps: KerasStepDetector, graphs: Graphs) -> None:
        super().__init__(observer, steps)
        self.graphs = graphs

    def in_hand(self, tensor: Any) -> bool:
        """Whether it is an array or an eager tensor."""
        return isinstance(tensor, np.ndarray) or hasattr(tensor, "numpy")

    def tracing(self) -> bool:
        """Whether a graph is being built."""
        return not tf.executing_eagerly()

    def hold(self, point: Point, tensor: Any) -> None:
        """Let the graph keep it."""
        self.graphs.hold(point, tensor)

    def collect(self, step: OpenStep) -> None:
        """Record what graphs have left, and the loss."""
        loss = self.graphs.loss()
        if loss is not None:
            step.metrics["loss"] = loss
        if step.armed:
            self.graphs.collect(step)

    def plain(self, value: Any) -> Any:
        """Ragged and sparse tensors by their values."""
        if isinstance(value, tf.RaggedTensor):
            return value.flat_values
        return value.values if isinstance(value, _SPREAD) else value

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        """Not by `numpy()`, which copies."""
        return np.asarray(tensor)

    def followed(self, tensor: Any, see: Callable[[Any], None]) -> Any:
        """By an identity whose backward is seen."""
        if not isinstance(tensor, tf.Tensor) or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return None
        if _in_branch():
            return None
        passed = _identity(tensor, see)
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            passed._keras_mask = mask
        return passed

    @contextlib.contextmanager
    def function(self) -> Iterator[None]:
        """A function is being traced, unless one within which this is called is already."""
        with self.graphs.function() if self.tracing() and not self.graphs.tracing else contextlib.nullcontext():
            yield

    def lost(self, loss: Any) -> None:
        """The loss, now or when the graph runs."""
        if self.in_hand(loss):
            super().lost(loss)
        else:
            self.graphs.lost(loss)


class OnTensorflow(Backend):
    """One tap's view of TensorFlow."""

    sight: GraphSight

    def __init__(self, observer: ArrayObserver, clock: Clock, limits: Sequence[tuple[str, float]]) -> None:
        super().__init__(GraphSight(observer, KerasStepDetector(observer.recorder, clock), Graphs(observer, limits)))
        self._ops: GraphOps | None = None
        self._watched: retracing.Watched | None = None

    def open(self, always: bool, limited: bool) -> None:
        """Set the gate that graphs ask."""
        self.sight.graphs.open(always, limited)

    def enclose(self, model: Any) -> list[Undo]:
        """Keep traces apart that are made from now on."""
        counters = self.sight.observer.recorder.counters
        watched = retracing.Watched(model, self.sight.graphs.mark, counters)
        leave = retracing.RETRACING.join(watched)
        if leave is None:
            counters.add("unseen_functions")
            counters.warn("retracing", retracing.NOT_RETRACED)
            return []
        self._watched = watched
        return [leave]

    def watch(self, model: Any, gradients: Sequence[tuple[Variable, Port]]) -> list[Undo]:
        """The last taps: functions are traced anew when all are on, and again where one is called while they go."""
        undo = super().watch(model, gradients)
        if self._watched is None:
            return undo
        retracing.RETRACING.renew(self._watched)
        return [*undo, partial(retracing.RETRACING.renew, self._watched)]

    def look_inside(self, plan: Plan, paths: Sequence[str]) -> bool:
        """See single operations, if the probes ask for any."""
        self._ops = operations(self.sight, plan, paths)
        return self._ops is not None

    def hook(self, ports: Mapping[str, Sequence[Port]], method: Any, path: str, root: bool) -> Around:
        """What goes around a layer's method."""
        hook = super().hook(ports, method, path, root)
        if self._ops is not None and isinstance(hook, LayerHook):
            hook.inside = partial(self._ops.inside, path)
        return hook

    def close(self) -> None:
        """Shut the gate of functions that outlive the taps."""
        self.sight.graphs.close()

    def unseen(self) -> dict[str, str]:
        """Patterns for operations that met none."""
        return {} if self._ops is None else self._ops.unseen()


def _in_branch() -> bool:
    """Whether a branch is being traced: TensorFlow cannot differentiate one whose backward writes."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and not type(graph).__name__.startswith("Cond"):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def _identity(tensor: Any, see: Callable[[Any], None]) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(x: Any) -> Any:
        def backward(dy: Any) -> Any:
            see(dy)
            return dy

        return tf.identity(x), backward

    return identity(tensor)
