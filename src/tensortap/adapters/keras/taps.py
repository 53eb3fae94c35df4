"""Put one tap's hooks on a Keras model's layers, training steps and optimizers, and take them off."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import keras

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.keras.backends.base import KerasBackend
from tensortap.adapters.keras.layers import KerasLayer, KerasVariable, layers_of, variables_of
from tensortap.adapters.keras.wrappers import wrap_method
from tensortap.adapters.plan import Plan, Port
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import MODULE_PORTS
from tensortap.select.triggers.measured import comparison

_BACKENDS: Final = {"tensorflow": "KerasOnTensorflow", "torch": "KerasOnTorch", "jax": "KerasOnJax"}
_METHODS: Final = ("call", "quantized_call")


class KerasTaps:
    """The hooks of one tap on one model."""

    def __init__(self, observer: ArrayObserver, plan: Plan) -> None:
        self.ports: list[Port] = []
        self._observer = observer
        self._recorder = observer.recorder
        self._plan = plan
        self._limits = _loss_limits(observer.recorder)
        self.backend = _backend(observer, [limit for _, limit in self._limits])
        self._params: list[tuple[KerasVariable, Port]] = []
        self._undo: list[Callable[[], None]] = []

    def attach(self, model: Any) -> None:
        """Put hooks around every call that the probes want, and around the model's own to find steps."""
        try:
            self._attach(model, layers_of(model))
        except BaseException:
            self.detach()
            raise
        self.backend.steps.call_is_all = not any(port.port.startswith("grad") for port in self.ports)
        self.arm()

    def arm(self) -> None:
        """Set which probes want the step, for graphs to read; hooks that run eagerly ask by themselves."""
        step = self._recorder.current
        decided_in_graph = 0 if self.backend.steps.explicit else sum(probe for probe, _ in self._limits)
        self.backend.arm(bool(step.armed & ~decided_in_graph), bool(step.armed & decided_in_graph))

    def detach(self) -> None:
        """Take every hook off, the last one first."""
        while self._undo:
            self._undo.pop()()
        self.backend.close()

    def record_variables(self, step: OpenStep) -> None:
        """Record the variables that probes want, at the end of a step."""
        for variable, port in self._params:
            if step is self._recorder.current and step.armed & port.bits:
                self._observer.take_at_step_end(port, partial(self.backend.observer.variable, variable.value), step)

    def _attach(self, model: Any, layers: list[KerasLayer]) -> None:
        self._undo += self.backend.prepare(model)
        every_layer = self.backend.observe_operations(self._plan, [layer.path for layer in layers])
        for names in _by_object(layers):
            self._attach_layer(names, root=names[0].value is model, always=every_layer)
        variables = variables_of(layers)
        params = ((v, self._port(v.path, "param")) for v in variables)
        self._params = [(v, port) for v, port in params if port is not None]
        grads = [(v, port) for v in variables if v.trainable and (port := self._port(v.path, "grad"))]
        self._undo += self.backend.attach_training(model, grads)

    def _attach_layer(self, names: list[KerasLayer], root: bool, always: bool) -> None:
        ports = [tuple(filter(None, (self._port(f.path, kind) for f in names))) for kind in MODULE_PORTS]
        if not (root or always or any(ports)):
            return
        path, layer, _ = names[0]
        for method in _METHODS:
            if hasattr(layer, method):
                by_kind = dict(zip(MODULE_PORTS, ports, strict=True))
                hook = self.backend.layer_hook(by_kind, getattr(layer, method), path, root)
                self._undo.append(wrap_method(layer, method, hook))

    def _port(self, path: str, kind: str) -> Port | None:
        port = self._plan.of(self._recorder, path, kind)
        if port is not None:
            self.ports.append(port)
        return port


def _backend(observer: ArrayObserver, limits: Sequence[tuple[str, float]]) -> KerasBackend:
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise UnsupportedError(
            f"the Keras backend must be one of {', '.join(_BACKENDS)}, got {name}; "
            "name values instead: with tensortap.watch(): tensortap.tap(x, 'name')"
        )
    module = importlib.import_module(f"{__package__}.backends.{name}")
    backend: KerasBackend = getattr(module, _BACKENDS[name])(observer, limits)
    return backend


def _loss_limits(recorder: Recorder) -> list[tuple[int, tuple[str, float]]]:
    """Return the probes that only ask whether the loss passes a limit: a graph can decide that.

    None with look-back, which keeps all steps.
    """
    if recorder.lookback.steps:
        return []
    found = ((1 << i, comparison(probe.when)) for i, probe in enumerate(recorder.probes))
    return [(bit, (c.sign, c.value)) for bit, c in found if c is not None and c.name == "loss"]


def _by_object(layers: Iterable[KerasLayer]) -> list[list[KerasLayer]]:
    groups: dict[int, list[KerasLayer]] = {}
    for layer in layers:
        groups.setdefault(id(layer.value), []).append(layer)
    return list(groups.values())
