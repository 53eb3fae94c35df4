"""Hooks around a Keras layer's `call`: its inputs, its outputs, and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from keras import tree
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tensortap.adapters.keras.observer import KerasObserver
from tensortap.adapters.plan import Port, bits_of

NO_GRADIENT: Final = "has no gradient that could be followed: it is not learnt through, or lies in a branch"
OperationScope = Callable[[], contextlib.AbstractContextManager[None]]


class LayerPorts(NamedTuple):
    """The ports of one layer, under all its names."""

    input: tuple[Port, ...]
    output: tuple[Port, ...]
    grad_input: tuple[Port, ...]
    grad_output: tuple[Port, ...]


class LayerProbes(NamedTuple):
    """The probes that want each kind of port, as bits."""

    input: int
    output: int
    grad_input: int
    grad_output: int


class KerasLayerHook:
    """Goes around a layer's `call`."""

    def __init__(self, observer: KerasObserver, ports: LayerPorts, method: Callable[..., Any]) -> None:
        self.observer = observer
        self.operation_scope: OperationScope = contextlib.nullcontext  # where the layer's operations are observed
        self.ports = ports
        self.probes = LayerProbes(*(bits_of(each) for each in ports))
        self._method = method  # for the names of its arguments

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Observe one call of the layer."""
        if self.observer.paused or in_symbolic_scope():  # where Keras only infers shapes
            return call(*args, **kwargs)
        with self.step_scope():
            args, kwargs = self._before(args, kwargs)
            with self.operation_scope():
                output = call(*args, **kwargs)
            return self._after(output)

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Enclose a call. Only a call of the root is a step."""
        yield

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ports, probes, observer = self.ports, self.probes, self.observer
        forward, backward = observer.wants(probes.input), observer.wants(probes.grad_input)
        if not (forward or backward):
            return args, kwargs
        found = observer.arguments(self._method, args, kwargs)
        if forward:
            observer.observe(ports.input, found)
        return self._with_gradient_hooks(ports.grad_input, found, (args, kwargs)) if backward else (args, kwargs)

    def _after(self, output: Any) -> Any:
        ports, probes, observer = self.ports, self.probes, self.observer
        forward, backward = observer.wants(probes.output), observer.wants(probes.grad_output)
        if not (forward or backward):
            return output
        found = observer.tensors_in(output)
        if forward:
            observer.observe(ports.output, found)
        return self._with_gradient_hooks(ports.grad_output, found, output) if backward else output

    def _with_gradient_hooks(self, ports: Sequence[Port], found: Sequence[tuple[str, Any]], value: Any) -> Any:
        """Return the value with tensors whose gradients are observed."""
        hooks = ((t, self.observer.with_gradient_hook(t, partial(self._gradient, ports, slot))) for slot, t in found)
        replaced = {id(tensor): other for tensor, other in hooks if other is not None}
        for port in ports if found and not replaced else ():
            port.note = port.note or NO_GRADIENT
        return tree.map_structure(lambda item: replaced.get(id(item), item), value) if replaced else value

    def _gradient(self, ports: Sequence[Port], slot: str, gradient: Any) -> None:
        self.observer.observe(ports, [(slot, gradient)])


class KerasRootHook(KerasLayerHook):
    """Goes around the model's own `call`, which is a step, or a function while it is traced."""

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Enclose one call of the model."""
        with self.observer.traced_function() if self.observer.tracing() else _step(self.observer):
            yield


@contextlib.contextmanager
def _step(observer: KerasObserver) -> Iterator[None]:
    observer.begin_step()
    try:
        yield
    finally:
        observer.end_step()
