"""Keras on TensorFlow: eager tensors, and tensors in graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.backends.base import KerasBackend, Undo
from tensortap.adapters.keras.graphs import gradients, retracing
from tensortap.adapters.keras.graphs.operations import KerasOperations, operations
from tensortap.adapters.keras.graphs.taps import GraphTaps
from tensortap.adapters.keras.hooks import KerasLayerHook
from tensortap.adapters.keras.layers import KerasVariable
from tensortap.adapters.keras.observer import KerasObserver, KerasStepDetector
from tensortap.adapters.keras.wrappers import CallHook
from tensortap.adapters.plan import Plan, Port
from tensortap.record.recorder import OpenStep, Point

_NOT_NUMERIC: Final = (tf.string, tf.resource, tf.variant)
_COMPOSITE: Final = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


class _TensorflowTensorType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        known = isinstance(value, (tf.Tensor, *_COMPOSITE, np.ndarray))
        return known and value.dtype not in _NOT_NUMERIC


class TensorflowTensors(metaclass=_TensorflowTensorType):
    """Numeric tensors of TensorFlow, ragged and sparse ones among them, and NumPy's arrays, for `isinstance`."""


class KerasGraphObserver(KerasObserver):
    """Record eager tensors; graphs keep the others until they have run."""

    tensor_type = TensorflowTensors

    def __init__(self, arrays: ArrayObserver, steps: KerasStepDetector, graphs: GraphTaps) -> None:
        super().__init__(arrays, steps)
        self.graphs = graphs

    def has_values(self, tensor: Any) -> bool:
        """Return whether it is an array or an eager tensor."""
        return isinstance(tensor, np.ndarray) or hasattr(tensor, "numpy")

    def tracing(self) -> bool:
        """Return whether a graph is being built."""
        return not tf.executing_eagerly()

    def defer(self, point: Point, tensor: Any) -> None:
        """Have the graph keep it."""
        self.graphs.keep(point, tensor)

    def collect(self, step: OpenStep) -> None:
        """Record the values that graphs have written, and the loss."""
        loss = self.graphs.loss()
        if loss is not None:
            step.metrics["loss"] = loss
        if step.armed:
            self.graphs.collect(step)

    def dense(self, value: Any) -> Any:
        """Return the values of ragged and sparse tensors."""
        if isinstance(value, tf.RaggedTensor):
            return value.flat_values
        return value.values if isinstance(value, _COMPOSITE) else value

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        """Return the elements. Not by `numpy()`, which copies."""
        return np.asarray(tensor)

    def with_gradient_hook(self, tensor: Any, hook: Callable[[Any], None]) -> Any:
        """Return the tensor through an identity whose backward calls the hook."""
        if not isinstance(tensor, tf.Tensor) or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return None
        if _in_branch():
            return None
        return gradients.with_gradient_hook(tensor, hook)

    def bypasses_gradient(self, tensor: Any) -> bool:
        """Return whether a loss would take the logits, so that no gradient passes through the tensor."""
        return super().bypasses_gradient(tensor) or (isinstance(tensor, tf.Tensor) and gradients.is_asked_for(tensor))

    @contextlib.contextmanager
    def traced_function(self) -> Iterator[None]:
        """Enclose a function that is traced, unless it is called within another such function."""
        with self.graphs.function() if self.tracing() and not self.graphs.tracing else contextlib.nullcontext():
            yield

    def observe_loss(self, loss: Any) -> None:
        """Note the loss, now or when the graph runs."""
        if self.has_values(loss):
            super().observe_loss(loss)
        else:
            self.graphs.observe_loss(loss)


class KerasOnTensorflow(KerasBackend):
    """One tap's side of TensorFlow."""

    observer: KerasGraphObserver

    def __init__(self, arrays: ArrayObserver, limits: Sequence[tuple[str, float]]) -> None:
        steps = KerasStepDetector(arrays.recorder)
        super().__init__(KerasGraphObserver(arrays, steps, GraphTaps(arrays, limits)))
        self._operations: KerasOperations | None = None
        self._watched: retracing.WatchedModel | None = None

    def arm(self, always: bool, limited: bool) -> None:
        """Set the variable that graphs read."""
        self.observer.graphs.arm(always, limited)

    def prepare(self, model: Any) -> list[Undo]:
        """Keep traces that are made from now on apart from the others."""
        counters = self.observer.arrays.recorder.counters
        watched = retracing.WatchedModel(model, self.observer.graphs.mark, counters)
        leave = retracing.RETRACING.join(watched)
        if leave is None:
            counters.add("unseen_functions")
            counters.warn("retracing", retracing.NOT_RETRACED)
            return []
        self._watched = watched
        return [leave]

    def attach_training(self, model: Any, gradients: Sequence[tuple[KerasVariable, Port]]) -> list[Undo]:
        """Register the last hooks: functions are traced again when all are registered, and once more when they are
        removed.
        """
        undo = super().attach_training(model, gradients)
        if self._watched is None:
            return undo
        retracing.RETRACING.renew(self._watched)
        return [*undo, partial(retracing.RETRACING.renew, self._watched)]

    def observe_operations(self, plan: Plan, paths: Sequence[str]) -> bool:
        """Observe single operations if the probes ask for any."""
        self._operations = operations(self.observer, plan, paths)
        return self._operations is not None

    def layer_hook(self, ports: Mapping[str, Sequence[Port]], method: Any, path: str, root: bool) -> CallHook:
        """Return the hook that goes around a layer's method."""
        hook = super().layer_hook(ports, method, path, root)
        if self._operations is not None and isinstance(hook, KerasLayerHook):
            hook.operation_scope = partial(self._operations.inside, path)
        return hook

    def close(self) -> None:
        """Stop functions that outlive the taps from writing."""
        self.observer.graphs.close()

    def unseen(self) -> dict[str, str]:
        """Return patterns for operations, each with why none was met; empty for those that met one."""
        return {} if self._operations is None else self._operations.unseen()


def _in_branch() -> bool:
    """Return whether a branch is being traced: TensorFlow cannot differentiate one whose backward writes."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and not type(graph).__name__.startswith("Cond"):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None
