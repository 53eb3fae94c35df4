"""Hooks on a NumPy-style layer's calls: inputs before, outputs after, and the step around the root."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensortap.adapters.arrays import NO_ARRAY_IN, NO_ARRAY_OUT, ArrayObserver, Arrays, arrays_in, as_array
from tensortap.adapters.nested import arguments_in
from tensortap.adapters.plan import Port, bits_of
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import NonFiniteError


class NumpyLayerHook:
    """Observe one layer, under every name it has."""

    def __init__(
        self, observer: ArrayObserver, steps: CallStepDetector, inputs: Sequence[Port], outputs: Sequence[Port]
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.input_bits = bits_of(inputs)
        self.output_bits = bits_of(outputs)

    def begin(self) -> None:
        """Do nothing: only a call of the root is a step."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record inputs, before an in-place layer can change them."""
        step = self.steps.current()
        if not step.armed & self.input_bits:
            return
        try:
            given = [(slot, as_array(found)) for slot, found in arguments_in(function, args, kwargs, Arrays)]
            self.observer.take_all(self.inputs, given, step, NO_ARRAY_IN)
        except Exception as error:
            self._failed("observing an input", error)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the layer's own function."""
        return function

    def after(self, output: Any) -> None:
        """Record outputs."""
        step = self.steps.current()
        if not step.armed & self.output_bits:
            return
        try:
            self.observer.take_all(self.outputs, arrays_in(output), step, NO_ARRAY_OUT)
        except Exception as error:
            self._failed("observing an output", error)

    def ended(self) -> None:
        """Do nothing."""

    def _failed(self, what: str, error: Exception) -> None:
        counters = self.observer.recorder.counters
        if counters.strict:  # it was counted where it happened
            raise error
        counters.failed("skipped_tensors", what, error)


class NumpyRootHook(NumpyLayerHook):
    """Observe the watched object itself, whose calls are the steps."""

    def begin(self) -> None:
        """Begin a step."""
        try:
            self.steps.begin()
        except NonFiniteError:  # the user asked for it
            raise
        except Exception as error:
            self.observer.recorder.counters.failed("step_errors", "beginning a step", error)

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a step, and record inputs."""
        self.begin()
        super().before(function, args, kwargs)

    def ended(self) -> None:
        """End the call."""
        try:
            self.steps.end()
        except NonFiniteError:
            raise
        except Exception as error:
            self.observer.recorder.counters.failed("step_errors", "ending a step", error)
