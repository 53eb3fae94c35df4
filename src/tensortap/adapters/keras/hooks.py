"""What sees a layer's calls for one tap: what goes in, what comes out, and the gradients on their way back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tensortap.adapters.base import Port
from tensortap.adapters.keras.gradients import seen_backward
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.tensors import exchanged, given_in, tensors_in
from tensortap.errors import NonFiniteError


Inside = Callable[[], contextlib.AbstractContextManager[None]]


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Ports(NamedTuple):
    """The ports of one layer, under all its names."""

    input: tuple[Port, ...]
    output: tuple[Port, ...]
    grad_input: tuple[Port, ...]
    grad_output: tuple[Port, ...]


class LayerHook:
    """Goes around a layer's `call`."""

    def __init__(self, sight: Sight, ports: Ports, owner: Callable[..., Any], inside: Inside = _nothing) -> None:
        self.sight = sight
        self._inside = inside  # what sees the operations of this layer
        self.ports = ports
        self.bits = Ports(*(_bits(each) for each in ports))
        self._owner = owner  # the layer's own method, for the names of its arguments

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One call of the layer."""
        if in_symbolic_scope():  # Keras only asks for shapes
            return call(*args, **kwargs)
        with self.around():
            args, kwargs = self._before(args, kwargs)
            with self._inside():
                output = call(*args, **kwargs)
            return self._after(output)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Nothing: the step is the root's affair."""
        yield

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ports, bits, sight = self.ports, self.bits, self.sight
        seen, backward = sight.wants(bits.input), sight.wants(bits.grad_input)
        if not (seen or backward):
            return args, kwargs
        found = given_in(self._owner, args, kwargs)
        if seen:
            sight.see(ports.input, found)
        return self._backward(ports.grad_input, found, (args, kwargs)) if backward else (args, kwargs)

    def _after(self, output: Any) -> Any:
        ports, bits, sight = self.ports, self.bits, self.sight
        seen, backward = sight.wants(bits.output), sight.wants(bits.grad_output)
        if not (seen or backward):
            return output
        found = tensors_in(output)
        if seen:
            sight.see(ports.output, found)
        return self._backward(ports.grad_output, found, output) if backward else output

    def _backward(self, ports: Sequence[Port], found: Sequence[tuple[str, Any]], value: Any) -> Any:
        """The value, with tensors whose gradients are seen."""
        others: dict[int, Any] = {}
        for slot, tensor in found:
            if isinstance(tensor, tf.Tensor) and (tensor.dtype.is_floating or tensor.dtype.is_complex):
                others[id(tensor)] = seen_backward(tensor, partial(self._see_gradient, ports, slot))
        return exchanged(value, others)

    def _see_gradient(self, ports: Sequence[Port], slot: str, gradient: Any) -> None:
        self.sight.see(ports, [(slot, gradient)])


class RootHook(LayerHook):
    """Goes around the model's own `call`: in eager mode that is a step, in a graph a function that is traced."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """One call of the model."""
        sight = self.sight
        with _step(sight) if tf.executing_eagerly() else traced(sight):
            yield


@contextlib.contextmanager
def _step(sight: Sight) -> Iterator[None]:
    begin(sight)
    try:
        yield
    finally:
        end(sight)


@contextlib.contextmanager
def traced(sight: Sight) -> Iterator[None]:
    """A function is being traced, unless one within which this is called is already."""
    with contextlib.nullcontext() if sight.graphs.tracing or tf.executing_eagerly() else sight.graphs.function():
        yield


def begin(sight: Sight) -> None:
    """A step begins."""
    _guarded(sight, sight.steps.begin, "beginning a step")


def end(sight: Sight) -> None:
    """It is over."""
    _guarded(sight, sight.steps.end, "ending a step")


def _guarded(sight: Sight, act: Callable[[], None], what: str) -> None:
    try:
        act()
    except NonFiniteError:  # the user asked for it
        raise
    except Exception as error:
        sight.taker.recorder.ledger.failed("step_errors", what, error)


def _bits(ports: Sequence[Port]) -> Any:
    bits = 0
    for port in ports:
        bits |= port.bits
    return bits
