"""What sees a layer's calls for one tap: inputs before, outputs after, and the step around the root."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensortap.adapters.arrays import NO_ARRAY_IN, NO_ARRAY_OUT, ArrayObserver, Arrays, arrays_in, as_array
from tensortap.adapters.nested import arguments_in
from tensortap.adapters.protocol import Port, bits_of
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import NonFiniteError


class LayerHook:
    """Sees one layer, under every name it has."""

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
        """Nothing: the step is the root's affair."""

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before an in-place layer can change what it is given."""
        step = self.steps.current()
        if not step.armed & self.input_bits:
            return
        try:
            given = [(slot, as_array(found)) for slot, found in arguments_in(function, args, kwargs, Arrays)]
            self.observer.take_all(self.inputs, given, step, NO_ARRAY_IN)
        except Exception as error:
            self._failed("observing an input", error)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The layer's own function."""
        return function

    def after(self, output: Any) -> None:
        """The call has returned."""
        step = self.steps.current()
        if not step.armed & self.output_bits:
            return
        try:
            self.observer.take_all(self.outputs, arrays_in(output), step, NO_ARRAY_OUT)
        except Exception as error:
            self._failed("observing an output", error)

    def ended(self) -> None:
        """Nothing to do."""

    def _failed(self, what: str, error: Exception) -> None:
        counters = self.observer.recorder.counters
        if counters.strict:  # it was counted where it happened
            raise error
        counters.failed("skipped_tensors", what, error)


class RootHook(LayerHook):
    """Sees the watched object itself: its calls are the steps."""

    def begin(self) -> None:
        """A call begins, and with it a step."""
        try:
            self.steps.begin()
        except NonFiniteError:  # the user asked for it
            raise
        except Exception as error:
            self.observer.recorder.counters.failed("step_errors", "beginning a step", error)

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call begins."""
        self.begin()
        super().before(function, args, kwargs)

    def ended(self) -> None:
        """The call is over."""
        try:
            self.steps.end()
        except NonFiniteError:
            raise
        except Exception as error:
            self.observer.recorder.counters.failed("step_errors", "ending a step", error)
