"""What sees a layer's calls for one tap: what goes in, what comes out, and the gradients on their way back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from keras import tree
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.protocol import Port, bits_of

NO_GRADIENT: Final = "has no gradient that could be followed: it is not learnt through, or lies in a branch"
Inside = Callable[[], contextlib.AbstractContextManager[None]]


class Ports(NamedTuple):
    """The ports of one layer, under all its names."""

    input: tuple[Port, ...]
    output: tuple[Port, ...]
    grad_input: tuple[Port, ...]
    grad_output: tuple[Port, ...]


class Bits(NamedTuple):
    """The probes that want them."""

    input: int
    output: int
    grad_input: int
    grad_output: int


class LayerHook:
    """Goes around a layer's `call`."""

    def __init__(self, sight: Sight, ports: Ports, owner: Callable[..., Any]) -> None:
        self.sight = sight
        self.inside: Inside = contextlib.nullcontext  # what sees the operations of this layer
        self.ports = ports
        self.bits = Bits(*(bits_of(each) for each in ports))
        self._owner = owner  # the layer's own method, for the names of its arguments

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One call of the layer."""
        if self.sight.away or in_symbolic_scope():  # Keras only asks for shapes
            return call(*args, **kwargs)
        with self.around():
            args, kwargs = self._before(args, kwargs)
            with self.inside():
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
        found = sight.given(self._owner, args, kwargs)
        if seen:
            sight.see(ports.input, found)
        return self._backward(ports.grad_input, found, (args, kwargs)) if backward else (args, kwargs)

    def _after(self, output: Any) -> Any:
        ports, bits, sight = self.ports, self.bits, self.sight
        seen, backward = sight.wants(bits.output), sight.wants(bits.grad_output)
        if not (seen or backward):
            return output
        found = sight.found(output)
        if seen:
            sight.see(ports.output, found)
        return self._backward(ports.grad_output, found, output) if backward else output

    def _backward(self, ports: Sequence[Port], found: Sequence[tuple[str, Any]], value: Any) -> Any:
        """The value, with tensors whose gradients are seen."""
        pairs = ((t, self.sight.followed(t, partial(self._see_gradient, ports, slot))) for slot, t in found)
        others = {id(tensor): other for tensor, other in pairs if other is not None}
        for port in ports if found and not others else ():
            port.note = port.note or NO_GRADIENT
        return tree.map_structure(lambda item: others.get(id(item), item), value) if others else value

    def _see_gradient(self, ports: Sequence[Port], slot: str, gradient: Any) -> None:
        self.sight.see(ports, [(slot, gradient)])


class RootHook(LayerHook):
    """Goes around the model's own `call`: a step, or while it is traced a function."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """One call of the model."""
        with self.sight.function() if self.sight.tracing() else _step(self.sight):
            yield


@contextlib.contextmanager
def _step(sight: Sight) -> Iterator[None]:
    sight.begin()
    try:
        yield
    finally:
        sight.end()
