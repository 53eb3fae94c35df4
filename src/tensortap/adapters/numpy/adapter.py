"""The adapter for objects whose layers are callables: NumPy-style networks and scikit-learn's estimators."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from tensortap.adapters.arrays import ArrayAdapter, ArrayObserver, NamedArrays, unseen
from tensortap.adapters.numpy import mlp, operations
from tensortap.adapters.numpy.capabilities import CAPABILITIES
from tensortap.adapters.numpy.layers import CALL_METHODS, NumpyMembers, layers_of
from tensortap.adapters.numpy.taps import NumpyTaps, joined
from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import FORWARD_PORTS
from tensortap.select.sites import Candidate

FOREIGN: Final = "is a model of another framework inside this one; watch it by itself"
BESIDE_LAYERS: Final = (
    "is a method of an object whose layers are objects, and only those are watched. Name its result where you call it: "
    "x = tensortap.tap(x, 'net/name')"
)
NOT_CALLED: Final = (
    "layers of the watched object ran, but the object itself was never called by a method that is known to be one "
    f"({', '.join(CALL_METHODS[:4])} …), so no step could be found: close each with tap.step()"
)


class NumpyAdapter(ArrayAdapter):
    """Taps on one object and its layers."""

    capabilities = CAPABILITIES
    groups = operations.GROUPS
    steps: CallStepDetector

    def __init__(self, root: Any) -> None:
        self._root = _reference(root)

    def candidates(self) -> list[Candidate]:
        """Return every layer, function and array that can be tapped."""
        found = self._members()
        layers = [
            Candidate(f.path, _types(f.value), FORWARD_PORTS, f.leaf and not mlp.is_mlp(f.value)) for f in found.layers
        ]
        inside = [
            Candidate(joined(f.path, name), (activation,), FORWARD_PORTS)
            for f in found.layers
            if mlp.is_mlp(f.value)
            for name, activation in mlp.layers_in(f.value)
        ]
        functions = [Candidate(f.path, _function_types(f.value), FORWARD_PORTS) for f in found.functions]
        methods = [Candidate(name, ("method",), FORWARD_PORTS) for name in found.methods]
        return [
            *layers,
            *inside,
            *functions,
            *methods,
            *(Candidate(f.path, ("ndarray",), ("param",)) for f in found.arrays),
        ]

    def operations(self) -> frozenset[str]:
        """Return the names of all operations there may be."""
        return operations.KNOWN

    def untappable(self) -> dict[str, str]:
        """Return models of other frameworks inside the object, and methods beside layers."""
        found = self._members()
        return dict.fromkeys(found.foreign, FOREIGN) | dict.fromkeys(found.other_methods, BESIDE_LAYERS)

    def describe(self) -> dict[str, Any]:
        """Return the tree of layers, for `run.json`."""
        found = self._members()
        sizes = {f.path: f.value.size for f in found.arrays}
        tree = [
            {"path": f.path, "type": type(f.value).__name__, "parameters": sizes.get(f.path, 0) or _own(f.path, sizes)}
            for f in (*found.layers, *found.functions)
        ]
        return {"framework": "numpy", "class": type(self._model()).__name__, "modules": tree}

    def attach(self, recorder: Recorder, plan: Plan, observer: ArrayObserver | None = None) -> None:
        """Put the taps on."""
        self._recorder = recorder
        observer = observer or ArrayObserver(recorder)
        self.steps = CallStepDetector(recorder)
        self._names = NamedArrays(observer, plan)
        self._taps = NumpyTaps(observer, self.steps, plan)
        members = self._members()
        self._methods = frozenset(members.methods)
        self._taps.attach(self._model(), members)

    def detach(self) -> None:
        """Take every hook off."""
        self._taps.detach()

    def collect(self, step: OpenStep) -> None:
        """Record the arrays that layers hold."""
        self._taps.record_arrays(step)

    def named(self, name: str, value: Any) -> bool:
        """Record a value the user named."""
        return self._names.see(name, value, self.steps.current())

    def unseen(self) -> dict[str, str]:
        """Return layers and names that were wanted but never seen, with the reason."""
        if self.steps.lost and any(port.seen for port in self._taps.ports):
            self._recorder.counters.warn("root", NOT_CALLED)
        wanted = [port for port in self._taps.ports if port.path not in self._methods or _is_named(port)]
        found = unseen(wanted, self._names) | self._taps.unseen_operations()
        return {site: why for site, why in found.items() if why}

    def _model(self) -> Any:
        root = self._root()
        if root is None:
            raise ReferenceError("the watched object is gone")
        return root

    def _members(self) -> NumpyMembers:
        return layers_of(self._model())


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # a list, a dict, an object with slots
        return lambda: value


def _is_named(port: Port) -> bool:
    """Return whether a pattern names exactly this method. A method chosen by a wider pattern need not return arrays."""
    return any(pattern.kind == "path" and pattern.head == port.path for pattern, _ in port.patterns)


def _types(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cls.__name__ for cls in type(value).__mro__ if cls is not object))


def _function_types(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys((getattr(value, "__name__", type(value).__name__), type(value).__name__)))


def _own(path: str, sizes: dict[str, int]) -> int:
    """Return the number of elements in a layer's own arrays."""
    return sum(size for name, size in sizes.items() if name.rpartition(".")[0] == path)
