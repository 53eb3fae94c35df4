"""Observe the tensors of a Keras model for one tap, whichever framework Keras computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np
import numpy.typing as npt

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.attributes import has_logits
from tensortap.adapters.nested import arguments_in, values_in
from tensortap.adapters.plan import Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import NonFiniteError
from tensortap.record.recorder import OpenStep, Point

NO_TENSOR: Final = "had no tensor there"


class KerasStepDetector(CallStepDetector):
    """A step is an eager call of the model, or a training, test or prediction step with such a call inside."""

    def begin_call(self) -> None:
        """Begin a call of the model, and with it a step; errors of ours are counted."""
        self._guarded(self.begin, "beginning a step")

    def end_call(self) -> None:
        """End that call."""
        self._guarded(self.end, "ending a step")

    def cancel(self) -> None:
        """Forget the call that began: there was no more data for it."""
        self._state().reset()

    def _guarded(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except NonFiniteError:  # the user asked for it
            raise
        except Exception as error:
            self.recorder.counters.failed("step_errors", what, error)


class _KerasTensorType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray) or bool(keras.ops.is_tensor(value))


class KerasTensors(metaclass=_KerasTensorType):
    """Everything that Keras or NumPy calls a tensor, for `isinstance`."""


class KerasObserver:
    """Observe tensors for one tap. This base class is for tensors that always have values; backends override it."""

    tensor_type: type[Any] = KerasTensors

    def __init__(self, arrays: ArrayObserver, steps: KerasStepDetector) -> None:
        self.paused = False
        self.arrays = arrays
        self.steps = steps

    # What a backend may override

    def has_values(self, tensor: Any) -> bool:
        """Return whether a tensor has values, rather than being traced."""
        return True

    def tracing(self) -> bool:
        """Return whether the current call is being traced, to run later."""
        return False

    def defer(self, point: Point, tensor: Any) -> None:
        """Record a traced tensor when its function has run."""

    def collect(self, step: OpenStep) -> None:
        """Record the tensors that were deferred."""

    def dense(self, value: Any) -> Any:
        """Return a tensor of any kind as a dense one."""
        return value

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        """Return a tensor's elements, without a copy where they lie on the host."""
        return np.asarray(keras.ops.convert_to_numpy(tensor))

    def variable(self, variable: Any) -> npt.NDArray[Any]:
        """Return the elements of a Keras variable."""
        return self.array(variable.value)

    def with_gradient_hook(self, tensor: Any, hook: Callable[[Any], None]) -> Any:
        """Return a tensor with the same values whose gradient is given to a hook; None if it has no gradient."""

    def bypasses_gradient(self, tensor: Any) -> bool:
        """Return whether a loss would take the logits of a tensor, so that no gradient passes through the tensor."""
        return has_logits(tensor)

    @contextlib.contextmanager
    def traced_function(self) -> Iterator[None]:
        """Enclose one step, or one call of the model, while it is traced."""
        yield

    # What all backends share

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Observe nothing for a while."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def tensors_in(self, value: Any) -> list[tuple[str, Any]]:
        """Return every tensor in a nested value, with its slot."""
        return [(slot, self.dense(found)) for slot, found in values_in(value, self.tensor_type)]

    def arguments(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return every tensor that a function is called with, by the names of its parameters."""
        return [(slot, self.dense(found)) for slot, found in arguments_in(function, args, kwargs, self.tensor_type)]

    def wants(self, probes: int) -> bool:
        """Return whether any of these probes wants the current call. Traced code decides when it runs."""
        return bool(probes) and (self.tracing() or bool(self.steps.current().armed & probes))

    def observe(self, ports: Sequence[Port], found: Sequence[tuple[str, Any]]) -> None:
        """Record tensors, now or when they have values, under every name of their layer."""
        for port in ports:
            if not found:
                port.note = port.note or NO_TENSOR
            for slot, tensor in found:
                try:
                    self._observe(port, slot, tensor)
                except Exception as error:
                    what = f"observing {port.path}:{port.port}"
                    self.arrays.recorder.counters.failed("skipped_tensors", what, error)

    def _observe(self, port: Port, slot: str, tensor: Any) -> None:
        point = port.points.get(slot) or port.point(slot)
        if not point.probes:
            return
        if self.has_values(tensor):
            self.record(point, tensor)
        else:
            self.defer(point, tensor)

    def record(self, point: Point, tensor: Any) -> None:
        """Record a tensor that has values, if a probe wants the step."""
        step = self.steps.current()
        if step.armed & point.probes:
            self.arrays.take(point, self.array(tensor), step)

    def observe_loss(self, loss: Any) -> None:
        """Note the loss of the step as its metric."""
        self.steps.current().metrics["loss"] = float(np.mean(self.array(loss)))


def arrays_of(value: Any) -> Any:
    """Return a nested value with its tensors as arrays. Traced tensors, which have no values, stay as they are."""
    if not isinstance(value, (dict, list, tuple)) and not keras.ops.is_tensor(value):
        return value
    return keras.tree.map_structure(_array_of, value)


def _array_of(value: Any) -> Any:
    if not keras.ops.is_tensor(value):
        return value
    try:
        return np.asarray(keras.ops.convert_to_numpy(value))
    except Exception:  # in a graph
        return value
