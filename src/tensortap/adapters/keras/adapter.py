"""The adapter for Keras layers and models."""

from __future__ import annotations

import importlib
import weakref
from typing import Any, Final

import keras
import numpy as np

from tensortap.adapters.arrays import ArrayAdapter, ArrayObserver, NamedArrays, unseen
from tensortap.adapters.keras.capabilities import CAPABILITIES
from tensortap.adapters.keras.context.recorder import KerasContext
from tensortap.adapters.keras.layers import layers_of, variables_of
from tensortap.adapters.keras.observer import arrays_of
from tensortap.adapters.keras.taps import KerasTaps
from tensortap.adapters.operations import Groups
from tensortap.adapters.plan import Plan
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import MODULE_PORTS, PARAMETER_PORTS
from tensortap.select.sites import Candidate, Pattern

_NO_OPERATIONS: Final = (
    "{!r}: Keras shows single operations on the TensorFlow backend only: choose that backend, or name the value where "
    "you compute it: tensortap.tap(x, 'net/scores')"
)
_NOT_BUILT: Final = (
    "{!r}: the weights of layers that are not built are not known yet: call the model once, or "
    "model.build(input_shape), and watch it then"
)
_MADE_LATER: Final = "was not there when the watch began: call the model once, or model.build(input_shape), before it"


def _of_tensorflow(name: str, otherwise: Any) -> Any:
    """Return a constant of `graphs.operations` where Keras runs on TensorFlow."""
    if keras.backend.backend() != "tensorflow":
        return otherwise
    return getattr(importlib.import_module(f"{__package__}.graphs.operations"), name)


class KerasAdapter(ArrayAdapter):
    """Taps on one model and its layers."""

    capabilities = CAPABILITIES

    def __init__(self, model: Any, context: bool = False) -> None:
        self._root = weakref.ref(model)
        self._records_context = context

    def candidates(self) -> list[Candidate]:
        """Return every layer, every operation of a functional model, every variable."""
        layers = layers_of(self._model())
        found = [Candidate(layer.path, _types(layer.value), MODULE_PORTS, layer.leaf) for layer in layers]
        return found + [
            Candidate(v.path, ("Variable",), ("param", "grad") if v.trainable else ("param",))
            for v in variables_of(layers)
        ]

    def refuse(self, pattern: Pattern) -> None:
        """Refuse operations outside TensorFlow, and weights of layers that are not built."""
        super().refuse(pattern)
        if pattern.kind == "op" and keras.backend.backend() != "tensorflow":
            raise UnsupportedError(_NO_OPERATIONS.format(pattern.text))
        if pattern.ports and pattern.ports <= set(PARAMETER_PORTS) and not self._built(pattern):
            raise UnsupportedError(_NOT_BUILT.format(pattern.text))

    def _built(self, pattern: Pattern) -> bool:
        """Return whether a pattern matches weights, or all layers are built."""
        candidates = self.candidates()
        found = any(pattern.matches(candidate, port) for candidate in candidates for port in candidate.ports)
        return found or all(getattr(layer.value, "built", True) for layer in layers_of(self._model()))

    def operations(self) -> frozenset[str]:
        """Return the names of all operations there may be."""
        known: frozenset[str] = _of_tensorflow("KNOWN", frozenset())
        return known

    @property
    def groups(self) -> Groups:
        """What patterns such as `op:@matmul` mean."""
        groups: Groups = _of_tensorflow("GROUPS", {})
        return groups

    def describe(self) -> dict[str, Any]:
        """Return the tree of layers, for `run.json`."""
        layers = layers_of(self._model())
        sizes = {v.path: int(np.prod(v.value.shape)) for v in variables_of(layers)}
        tree = [
            {"path": layer.path, "type": type(layer.value).__name__, "parameters": _own_size(layer.path, sizes)}
            | _activation(layer.value)
            for layer in layers
        ]
        return {
            "framework": "keras",
            "class": type(self._model()).__name__,
            "backend": keras.backend.backend(),
            "modules": tree,
        }

    def attach(self, recorder: Recorder, plan: Plan, observer: ArrayObserver | None = None) -> None:
        """Put the taps on."""
        self._recorder, self._plan = recorder, plan
        self._known = {candidate.path for candidate in self.candidates()}
        observer = observer or ArrayObserver(recorder)
        self._names = NamedArrays(observer, plan)
        self._taps = KerasTaps(observer, plan)
        self.steps = self._taps.backend.steps
        if self._records_context:
            self._taps.backend.context = KerasContext(self._model(), recorder.events)
        self._taps.attach(self._model())

    def change(self, recorder: Recorder, plan: Plan) -> None:
        """Replace the taps, after recording the values of graphs in the open step. Graphs are traced again."""
        self._taps.backend.collect(recorder.current)
        super().change(recorder, plan)
        self.arm()

    def arm(self) -> None:
        """Set which probes want the step, for graphs to read."""
        self._taps.arm()

    def detach(self) -> None:
        """Take every tap off."""
        if self._taps.backend.context is not None:
            self._taps.backend.context.close()
        self._taps.detach()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own; return the one it had."""
        before = self.steps.enter(step)
        if step is not None:
            self._taps.backend.arm(bool(step.armed), False)
        return before

    def collect(self, step: OpenStep) -> None:
        """Record the values that graphs have written, and the variables."""
        if step is self.steps.current():
            self._taps.backend.collect(step)
        self._taps.record_variables(step)

    def left_open(self) -> list[OpenStep]:
        """Return steps that nothing has closed, after recording the values that a graph may have written for the last
        one.
        """
        self._taps.backend.collect(self._recorder.current)
        return self.steps.left_open()

    def named(self, name: str, value: Any) -> bool:
        """Record a value the user named."""
        return self._names.see(name, arrays_of(value), self.steps.current())

    def unseen(self) -> dict[str, str]:
        """Return layers, variables and names that were wanted but never seen, with the reason."""
        found = unseen(self._taps.ports, self._names) | self._taps.backend.unseen() | self._made_later()
        return {site: why for site, why in found.items() if why}

    def _made_later(self) -> dict[str, str]:
        """Return wanted layers and variables that the model made after the watch began."""
        if self._root() is None:
            return {}
        made = [candidate for candidate in self.candidates() if candidate.path not in self._known]
        wanted = [
            (c, port) for c in made for port in c.ports if self._plan.port_for_named_value(self._recorder, c, port)
        ]
        return {f"{candidate.path}:{port}": _MADE_LATER for candidate, port in wanted}

    def _model(self) -> Any:
        model = self._root()
        if model is None:
            raise ReferenceError("the watched model is gone")
        return model


def _types(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cls.__name__ for cls in type(value).__mro__ if cls is not object))


def _activation(layer: Any) -> dict[str, str]:
    """Return the name of the function that a layer applies to its output, where there is one."""
    name = getattr(getattr(layer, "activation", None), "__name__", "linear")
    return {} if name == "linear" else {"activation": str(name)}


def _own_size(path: str, sizes: dict[str, int]) -> int:
    """Return the number of elements in a layer's own weights."""
    return sum(size for name, size in sizes.items() if name.rpartition(".")[0] == path)
