"""What one tap does with tensors, whichever framework Keras computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np
import numpy.typing as npt

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.steps import KerasStepDetector
from tensortap.adapters.nested import arguments_in, values_in
from tensortap.adapters.protocol import Port
from tensortap.errors import NonFiniteError
from tensortap.record.recorder import OpenStep, Point

NO_TENSOR: Final = "had no tensor there"


class _Kind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, np.ndarray) or bool(keras.ops.is_tensor(value))


class Tensors(metaclass=_Kind):
    """Whatever counts as a tensor."""


class Sight:
    """Sees tensors for one tap. Backends say more: this is for tensors that always have values."""

    kind: type[Any] = Tensors

    def __init__(self, observer: ArrayObserver, steps: KerasStepDetector) -> None:
        self.away = False  # what is called now is not for us
        self.observer = observer
        self.steps = steps

    # What a backend knows better

    def in_hand(self, tensor: Any) -> bool:
        """Whether a tensor has values, rather than a place in something that is being traced."""
        return True

    def tracing(self) -> bool:
        """Whether what is called now only describes what will run later."""
        return False

    def hold(self, point: Point, tensor: Any) -> None:
        """Record a tensor without values when it has them."""

    def collect(self, step: OpenStep) -> None:
        """Record what was held."""

    def plain(self, value: Any) -> Any:
        """A tensor of whatever kind as a dense one."""
        return value

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        """A tensor's elements, without a copy where they lie on the host."""
        return np.asarray(keras.ops.convert_to_numpy(tensor))

    def variable(self, variable: Any) -> npt.NDArray[Any]:
        """What a variable of Keras holds."""
        return self.array(variable.value)

    def followed(self, tensor: Any, see: Callable[[Any], None]) -> Any:
        """The same values, with `see` called for the gradient on its way back; None for what has no gradient."""

    @contextlib.contextmanager
    def function(self) -> Iterator[None]:
        """One training, test or prediction step, or one call of the model, while it is traced."""
        yield

    # What is the same for all

    @contextlib.contextmanager
    def averted(self) -> Iterator[None]:
        """See no call for a while."""
        self.away = True
        try:
            yield
        finally:
            self.away = False

    def found(self, value: Any) -> list[tuple[str, Any]]:
        """Every tensor in a nested value, with its slot."""
        return [(slot, self.plain(found)) for slot, found in values_in(value, self.kind)]

    def given(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Every tensor that a function is called with."""
        return [(slot, self.plain(found)) for slot, found in arguments_in(function, args, kwargs, self.kind)]

    def wants(self, bits: int) -> bool:
        """Whether anything with these probes is to be seen now: what is traced decides when it runs."""
        return bool(bits) and (self.tracing() or bool(self.steps.current().armed & bits))

    def see(self, ports: Sequence[Port], found: Sequence[tuple[str, Any]]) -> None:
        """Record what was found, under every name it has."""
        for port in ports:
            if not found:
                port.note = port.note or NO_TENSOR
            for slot, tensor in found:
                try:
                    self._see(port, slot, tensor)
                except Exception as error:
                    self.observer.recorder.counters.failed(
                        "skipped_tensors", f"observing {port.path}:{port.port}", error
                    )

    def _see(self, port: Port, slot: str, tensor: Any) -> None:
        point = port.points.get(slot) or port.point(slot)
        if not point.probes:
            return
        if self.in_hand(tensor):
            self.take(point, tensor)
        else:
            self.hold(point, tensor)

    def take(self, point: Point, tensor: Any) -> None:
        """Record a tensor with values, if the step is wanted."""
        step = self.steps.current()
        if step.armed & point.probes:
            self.observer.take(point, self.array(tensor), step)

    def lost(self, loss: Any) -> None:
        """The loss of the step."""
        self.steps.current().metrics["loss"] = float(np.mean(self.array(loss)))

    def begin(self) -> None:
        """A step begins."""
        self._guarded(self.steps.begin, "beginning a step")

    def end(self) -> None:
        """It is over."""
        self._guarded(self.steps.end, "ending a step")

    def _guarded(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except NonFiniteError:  # the user asked for it
            raise
        except Exception as error:
            self.observer.recorder.counters.failed("step_errors", what, error)


def arrays_of(value: Any) -> Any:
    """A nested value with its tensors as arrays; what is being traced has no values to give, and stays."""
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
