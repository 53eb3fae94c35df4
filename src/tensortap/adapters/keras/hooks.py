"""Hooks around a Keras layer's `call`: its inputs, its outputs, and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from keras import tree
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tensortap.adapters.keras.attributes import copy_attributes, copy_masks_back
from tensortap.adapters.keras.observer import KerasObserver, KerasStepDetector
from tensortap.adapters.plan import Port, bits_of

NO_GRADIENT: Final = "has no gradient to observe: no gradient flows through it, or it is in a branch"
NOTHING_CAME_BACK: Final = "had no gradient: no layer before it is trainable, or no backward ran in an observed step"
FROM_LOGITS: Final = (
    "had no gradient: Keras computes the loss from the logits of a sigmoid or softmax, past its output. Watch "
    "':grad_input' of this layer, or make the activation a layer of its own and watch the one before it"
)
OperationScope = Callable[[], contextlib.AbstractContextManager[None]]
Replaced = Sequence[tuple[Any, Any]]
"""Tensors, each with the one that took its place."""


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
    """Wrap a layer's `call`."""

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
            (args, kwargs), replaced = self._before(args, kwargs)
            with self.operation_scope():
                output = call(*args, **kwargs)
            copy_masks_back(replaced)
            return self._after(output)

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Enclose a call. Only a call of the root is a step."""
        yield

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Replaced]:
        ports, probes, observer = self.ports, self.probes, self.observer
        forward, backward = observer.wants(probes.input), observer.wants(probes.grad_input)
        if not (forward or backward):
            return (args, kwargs), ()
        found = observer.arguments(self._method, args, kwargs)
        if forward:
            observer.observe(ports.input, found)
        return self._with_gradient_hooks(ports.grad_input, found, (args, kwargs)) if backward else ((args, kwargs), ())

    def _after(self, output: Any) -> Any:
        ports, probes, observer = self.ports, self.probes, self.observer
        forward, backward = observer.wants(probes.output), observer.wants(probes.grad_output)
        if not (forward or backward):
            return output
        found = observer.tensors_in(output)
        if forward:
            observer.observe(ports.output, found)
        if not backward:
            return output
        if any(observer.bypasses_gradient(tensor) for _, tensor in found):
            _note(ports.grad_output, FROM_LOGITS)
        return self._with_gradient_hooks(ports.grad_output, found, output)[0]

    def _with_gradient_hooks(
        self, ports: Sequence[Port], found: Sequence[tuple[str, Any]], value: Any
    ) -> tuple[Any, Replaced]:
        """Return the value with tensors whose gradients are observed, and the pairs of original and replacement."""
        hooks = ((t, self.observer.with_gradient_hook(t, partial(self._gradient, ports, slot))) for slot, t in found)
        replaced = [(tensor, other) for tensor, other in hooks if other is not None]
        for tensor, other in replaced:
            copy_attributes(tensor, other)
        if found:
            _note(ports, NOTHING_CAME_BACK if replaced else NO_GRADIENT)
        others = {id(tensor): other for tensor, other in replaced}
        return tree.map_structure(lambda item: others.get(id(item), item), value) if others else value, replaced

    def _gradient(self, ports: Sequence[Port], slot: str, gradient: Any) -> None:
        self.observer.observe(ports, [(slot, gradient)])


def _note(ports: Sequence[Port], why: str) -> None:
    for port in ports:
        port.note = port.note or why


class KerasRootHook(KerasLayerHook):
    """Wrap the model's own `call`, which is a step, or a function while it is traced."""

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Enclose one call of the model."""
        with self.observer.traced_function() if self.observer.tracing() else _step(self.observer.steps):
            yield


@contextlib.contextmanager
def _step(steps: KerasStepDetector) -> Iterator[None]:
    steps.begin_call()
    try:
        yield
    finally:
        steps.end_call()
