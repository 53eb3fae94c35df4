"""Taps on a Keras model: put around the `call` of its layers and its training steps, and taken off without a trace."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import keras
import numpy as np

from tensortap.adapters.arrays import ArrayObserver, NamedArrays, unseen
from tensortap.adapters.keras.backend import Backend
from tensortap.adapters.keras.layers import Layer, Variable, layers_of, variables_of
from tensortap.adapters.keras.sight import arrays_of
from tensortap.adapters.keras.standins import join
from tensortap.adapters.numpy.ops import Groups
from tensortap.adapters.protocol import Clock, Plan, Port
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import MODULE_PORTS, PARAMETER_PORTS
from tensortap.select.sites import Candidate, Pattern
from tensortap.select.triggers.measured import comparison

_BACKENDS: Final = {"tensorflow": "OnTensorflow", "torch": "OnTorch", "jax": "OnJax"}
_NO_OPERATIONS: Final = "{!r}: Keras shows single operations on the TensorFlow backend only"
_NOT_BUILT: Final = (
    "{!r}: the weights of layers that are not built are not known yet: call the model once, or "
    "model.build(input_shape), and watch it then"
)
_LATE: Final = "was not there when the watch began: call the model once, or model.build(input_shape), before it"
_METHODS: Final = ("call", "quantized_call")


def _of_tensorflow(name: str, otherwise: Any) -> Any:
    """What there is of operations, where Keras runs on TensorFlow."""
    if keras.backend.backend() != "tensorflow":
        return otherwise
    return getattr(importlib.import_module(f"{__package__}.ops"), name)


def adapt(model: Any, **options: Any) -> KerasAdapter | None:
    """The adapter for a layer or model."""
    return KerasAdapter(model) if isinstance(model, keras.Layer) else None


class KerasAdapter:
    """Taps on one model and its layers."""

    def __init__(self, model: Any) -> None:
        self._root = weakref.ref(model)
        self._ports: list[Port] = []
        self._params: list[tuple[Variable, Port]] = []
        self._undo: list[Callable[[], None]] = []

    def candidates(self) -> list[Candidate]:
        """Every layer, every operation of a functional model, every variable."""
        layers = layers_of(self._model())
        found = [Candidate(layer.path, _types(layer.value), MODULE_PORTS, layer.leaf) for layer in layers]
        return found + [
            Candidate(v.path, ("Variable",), ("param", "grad") if v.trainable else ("param",))
            for v in variables_of(layers)
        ]

    def refuse(self, pattern: Pattern) -> None:
        """Operations are TensorFlow's, and weights are known of layers that are built."""
        if pattern.kind == "op" and keras.backend.backend() != "tensorflow":
            raise UnsupportedError(_NO_OPERATIONS.format(pattern.text))
        if pattern.ports and pattern.ports <= set(PARAMETER_PORTS) and not self._built(pattern):
            raise UnsupportedError(_NOT_BUILT.format(pattern.text))

    def _built(self, pattern: Pattern) -> bool:
        """Whether a pattern finds weights, or no layer could still make any."""
        candidates = self.candidates()
        found = any(pattern.matches(candidate, port) for candidate in candidates for port in candidate.ports)
        return found or all(getattr(layer.value, "built", True) for layer in layers_of(self._model()))

    def operations(self) -> frozenset[str]:
        """The names of all operations there may be."""
        known: frozenset[str] = _of_tensorflow("KNOWN", frozenset())
        return known

    @property
    def groups(self) -> Groups:
        """What patterns such as `op:@matmul` mean."""
        groups: Groups = _of_tensorflow("GROUPS", {})
        return groups

    def untappable(self) -> dict[str, str]:
        """Nothing is known that could not be tapped."""
        return {}

    def describe(self) -> dict[str, Any]:
        """The tree of layers."""
        layers = layers_of(self._model())
        sizes = {v.path: int(np.prod(v.value.shape)) for v in variables_of(layers)}
        tree = [
            {"path": layer.path, "type": type(layer.value).__name__, "parameters": _own(layer.path, sizes)}
            for layer in layers
        ]
        return {
            "framework": "keras",
            "class": type(self._model()).__name__,
            "backend": keras.backend.backend(),
            "modules": tree,
        }

    def attach(self, recorder: Recorder, plan: Plan, clock: Clock, observer: ArrayObserver | None = None) -> None:
        """Go around every call that the probes want, and around the model's own to find steps."""
        model = self._model()
        self._recorder, self._plan, self._clock = recorder, plan, clock
        self._there = {candidate.path for candidate in self.candidates()}
        self._observer = observer or ArrayObserver(recorder)
        self._names = NamedArrays(self._observer, plan)
        self._limits = _limits(recorder)
        self._backend = _backend(self._observer, clock, [limit for _, limit in self._limits])
        try:
            self._attach_all(model, layers_of(model))
        except BaseException:
            self.detach()
            raise
        self.arm()

    def arm(self) -> None:
        """Tell graphs what the step is wanted for; what runs eagerly asks by itself."""
        step = self._recorder.current
        decided = 0 if self._clock.explicit else sum(bit for bit, _ in self._limits)
        self._backend.open(bool(step.armed & ~decided), bool(step.armed & decided))

    def detach(self) -> None:
        """Take every tap off, the last one first."""
        while self._undo:
            self._undo.pop()()
        self._backend.close()

    def current(self) -> OpenStep:
        """The calling thread's step."""
        return self._backend.steps.current()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        before = self._backend.steps.enter(step)
        if step is not None:
            self._backend.open(bool(step.armed), False)
        return before

    def closing(self, step: OpenStep) -> None:
        """Take what graphs have left, and the variables."""
        if step is self.current():
            self._backend.collect(step)
        for variable, port in self._params:
            if step is self._recorder.current and step.armed & port.bits:
                self._observer.take_late(port, partial(self._value, variable), step)
        self._backend.steps.closed(step)

    def left_open(self) -> list[OpenStep]:
        """Other threads' steps that nothing has closed. A graph may have left something for the last one of ours."""
        self._backend.collect(self._recorder.current)
        return self._backend.steps.left_open()

    def named(self, name: str, value: Any) -> bool:
        """A value the user named."""
        return self._names.see(name, arrays_of(value), self.current())

    def unseen(self) -> dict[str, str]:
        """Layers, variables and names that were wanted but never seen."""
        found = unseen(self._ports, self._names) | self._backend.unseen() | self._late()
        return {site: why for site, why in found.items() if why}

    def _late(self) -> dict[str, str]:
        """Layers and variables that the model made after the watch began, and that were wanted."""
        if self._root() is None:
            return {}
        made = [candidate for candidate in self.candidates() if candidate.path not in self._there]
        wanted = [
            (c, port) for c in made for port in c.ports if self._plan.port_for_named_value(self._recorder, c, port)
        ]
        return {f"{candidate.path}:{port}": _LATE for candidate, port in wanted}

    def _value(self, variable: Variable) -> Any:
        return self._backend.sight.variable(variable.value)

    def _model(self) -> Any:
        model = self._root()
        if model is None:
            raise ReferenceError("the watched model is gone")
        return model

    def _attach_all(self, model: Any, layers: list[Layer]) -> None:
        self._undo += self._backend.enclose(model)
        everywhere = self._backend.look_inside(self._plan, [layer.path for layer in layers])
        for names in _by_object(layers):
            self._attach_layer(names, root=names[0].value is model, anyway=everywhere)
        variables = variables_of(layers)
        params = ((v, self._port(v.path, "param")) for v in variables)
        self._params = [(v, port) for v, port in params if port is not None]
        grads = [(v, port) for v in variables if v.trainable and (port := self._port(v.path, "grad"))]
        self._undo += self._backend.watch(model, grads)

    def _attach_layer(self, names: list[Layer], root: bool, anyway: bool) -> None:
        ports = [tuple(filter(None, (self._port(f.path, kind) for f in names))) for kind in MODULE_PORTS]
        if not (root or anyway or any(ports)):
            return
        path, layer, _ = names[0]
        for method in _METHODS:
            if hasattr(layer, method):
                hook = self._backend.hook(
                    dict(zip(MODULE_PORTS, ports, strict=True)), getattr(layer, method), path, root
                )
                self._undo.append(join(layer, method, hook))

    def _port(self, path: str, kind: str) -> Port | None:
        port = self._plan.of(self._recorder, path, kind)
        if port is not None:
            self._ports.append(port)
        return port


def _backend(observer: ArrayObserver, clock: Clock, limits: Sequence[tuple[str, float]]) -> Backend:
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise UnsupportedError(
            f"Keras on the {name} backend cannot be watched, only on {', '.join(_BACKENDS)}; "
            "name values instead: with tensortap.watch(): tensortap.tap(x, 'name')"
        )
    found: Backend = getattr(importlib.import_module(f"{__package__}.on_{name}"), _BACKENDS[name])(
        observer, clock, limits
    )
    return found


def _limits(recorder: Recorder) -> list[tuple[int, tuple[str, float]]]:
    """The probes that ask only whether the loss passes a limit: a graph can decide that. Look-back keeps all steps."""
    if recorder.lookback.steps:
        return []
    found = ((1 << i, comparison(probe.when)) for i, probe in enumerate(recorder.probes))
    return [(bit, (c.sign, c.value)) for bit, c in found if c is not None and c.name == "loss"]


def _by_object(layers: Iterable[Layer]) -> list[list[Layer]]:
    groups: dict[int, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(id(layer.value), []).append(layer)
    return list(groups.values())


def _types(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cls.__name__ for cls in type(value).__mro__ if cls is not object))


def _own(path: str, sizes: dict[str, int]) -> int:
    """How many numbers a layer holds itself."""
    return sum(size for name, size in sizes.items() if name.rpartition(".")[0] == path)
