"""Taps on an object whose layers are callables: put on by class and by slot, and taken off without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from tensortap.adapters.arrays import ArrayObserver, NamedArrays, unseen
from tensortap.adapters.numpy import calls, mlp, ops
from tensortap.adapters.numpy.hooks import LayerHook, RootHook
from tensortap.adapters.numpy.layers import REPORTED, Found, Layers, definer_of, has_layers, layers_of, methods_of
from tensortap.adapters.numpy.slots import Slot
from tensortap.adapters.protocol import Clock, Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import FORWARD_PORTS
from tensortap.select.sites import Candidate

FOREIGN: Final = "is a model of another framework inside this one; watch it by itself"
NOT_CALLED: Final = (
    "layers of the watched object ran, but the object itself was never called by a method that is known to be one "
    f"({', '.join(REPORTED[:4])} …), so no step could be found: close each with tap.step()"
)


def adapt(model: Any, **options: Any) -> NumpyAdapter | None:
    """The adapter for an object, or nothing when there is nothing in it to call."""
    return NumpyAdapter(model) if has_layers(model) else None


class NumpyAdapter:
    """Taps on one object and its layers."""

    groups = ops.GROUPS

    def __init__(self, root: Any) -> None:
        self._root = _reference(root)
        self._ports: list[Port] = []
        self._undo: list[Callable[[], None]] = []
        self._arrays: list[tuple[Found, Port]] = []
        self._ops: ops.OpTaps | None = None

    def candidates(self) -> list[Candidate]:
        """Every layer, function in a slot and array that can be tapped."""
        found = self._layers()
        layers = [
            Candidate(f.path, _types(f.value), FORWARD_PORTS, f.leaf and not mlp.is_mlp(f.value)) for f in found.layers
        ]
        inside = [
            Candidate(_joined(f.path, name), (activation,), FORWARD_PORTS)
            for f in found.layers
            if mlp.is_mlp(f.value)
            for name, activation in mlp.layers_in(f.value)
        ]
        functions = [Candidate(f.path, _function_types(f.value), FORWARD_PORTS) for f in found.functions]
        return [*layers, *inside, *functions, *(Candidate(f.path, ("ndarray",), ("param",)) for f in found.arrays)]

    def operations(self) -> frozenset[str]:
        """The names of all operations there may be."""
        return ops.KNOWN

    def untappable(self) -> dict[str, str]:
        """Models of other frameworks inside."""
        return dict.fromkeys(self._layers().foreign, FOREIGN)

    def describe(self) -> dict[str, Any]:
        """The tree of layers."""
        found = self._layers()
        sizes = {f.path: f.value.size for f in found.arrays}
        tree = [
            {"path": f.path, "type": type(f.value).__name__, "parameters": sizes.get(f.path, 0) or _own(f.path, sizes)}
            for f in (*found.layers, *found.functions)
        ]
        return {"framework": "numpy", "class": type(self._model()).__name__, "modules": tree}

    def attach(self, recorder: Recorder, plan: Plan, clock: Clock, observer: ArrayObserver | None = None) -> None:
        """Let hooks see what the probes want, and the root to find steps."""
        self._recorder, self._plan = recorder, plan
        self._observer = observer or ArrayObserver(recorder)
        self._steps = CallStepDetector(recorder, clock)
        self._names = NamedArrays(self._observer, plan)
        found = self._layers()
        try:
            self._attach_all(found)
        except BaseException:  # a class that lets nobody set its attributes
            self.detach()
            raise
        ports = ((f, self._port(f.path, "param")) for f in found.arrays)
        self._arrays = [(f, port) for f, port in ports if port is not None]

    def arm(self) -> None:
        """A tap that is not wanted asks one question and goes."""

    def detach(self) -> None:
        """Take every hook off, the last one first."""
        while self._undo:
            self._undo.pop()()

    def current(self) -> OpenStep:
        """The calling thread's step."""
        return self._steps.current()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        return self._steps.enter(step)

    def closing(self, step: OpenStep) -> None:
        """Take the arrays that layers hold."""
        for found, port in self._arrays:
            if step is self._recorder.current and step.armed & port.bits and found.holder is not None:
                self._observer.take_late(port, found.holder.get, step)
        self._steps.closed(step)

    def left_open(self) -> list[OpenStep]:
        """Other threads' steps that nothing has closed."""
        return self._steps.left_open()

    def named(self, name: str, value: Any) -> bool:
        """A value the user named."""
        return self._names.see(name, value, self.current())

    def unseen(self) -> dict[str, str]:
        """Layers and names that were wanted but never seen."""
        if self._steps.lost and any(port.seen for port in self._ports):
            self._recorder.counters.warn("root", NOT_CALLED)
        operations = {} if self._ops is None else self._ops.unseen()
        found = unseen(self._ports, self._names) | operations
        return {site: why for site, why in found.items() if why}

    def _model(self) -> Any:
        root = self._root()
        if root is None:
            raise ReferenceError("the watched object is gone")
        return root

    def _layers(self) -> Layers:
        return layers_of(self._model())

    def _attach_all(self, found: Layers) -> None:
        for layer in _by_object(found.layers):
            self._attach_layer(layer)
        for function in found.functions:
            self._attach_function(function)
        self._ops = self._attach_operations(found)

    def _attach_layer(self, names: list[Found]) -> None:
        value = names[0].value
        root = value is self._model()
        hook = (RootHook if root else LayerHook)(self._observer, self._steps, *self._pair([f.path for f in names]))
        if root or hook.inputs or hook.outputs:
            self._watch(value, hook)
        if mlp.is_mlp(value):
            self._attach_inside(value, names)

    def _attach_inside(self, value: Any, names: list[Found]) -> None:
        hooks = []
        for name, _ in mlp.layers_in(value):
            inputs, outputs = self._pair([_joined(f.path, name) for f in names])
            hooks.append(LayerHook(self._observer, self._steps, inputs, outputs) if inputs or outputs else None)
        if any(hooks):
            inside = mlp.Inside(value, hooks)
            self._watch(value, inside)
            inside.attach()
            self._undo.append(inside.detach)

    def _attach_operations(self, found: Layers) -> ops.OpTaps | None:
        """Where patterns ask for operations, every layer is given traced arrays."""
        patterns = ops.op_patterns(self._plan, [f.path for f in found.layers])
        if not patterns:
            return None
        taps = ops.OpTaps(self._observer, self._steps, self._plan, patterns)
        for names in _by_object(found.layers):
            self._watch(names[0].value, ops.OpHook(taps, names[0].path, names[0].value))
        return taps

    def _watch(self, value: Any, hook: calls.Hook) -> None:
        methods = {name: definer_of(value, name) for name in methods_of(value)}
        calls.watch(value, hook, methods, REPORTED.__contains__)
        key = id(value)
        self._undo.append(lambda: calls.unwatch(key, hook, methods))

    def _attach_function(self, found: Found) -> None:
        inputs, outputs = self._pair([found.path])
        if not (inputs or outputs) or found.holder is None:
            return
        held = found.holder.get()
        slot = held if isinstance(held, Slot) else Slot(held)
        hook, holder = LayerHook(self._observer, self._steps, inputs, outputs), found.holder
        slot.hooks = (*slot.hooks, hook)
        if slot is not held:
            holder.put(slot)

        def undo() -> None:
            slot.hooks = tuple(other for other in slot.hooks if other is not hook)
            if not slot.hooks and holder.get() is slot:  # otherwise somebody has put something else there
                holder.put(slot.original)

        self._undo.append(undo)

    def _pair(self, paths: Iterable[str]) -> tuple[list[Port], list[Port]]:
        """The ports for inputs and outputs of a layer, under all its names."""
        names = list(paths)
        inputs, outputs = ([p for path in names if (p := self._port(path, kind))] for kind in ("input", "output"))
        return inputs, outputs

    def _port(self, path: str, kind: str) -> Port | None:
        port = self._plan.of(self._recorder, path, kind)
        if port is not None:
            self._ports.append(port)
        return port


def _by_object(found: Iterable[Found]) -> list[list[Found]]:
    groups: dict[int, list[Found]] = {}
    for each in found:
        groups.setdefault(id(each.value), []).append(each)
    return list(groups.values())


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # a list, a dict, an object with slots
        return lambda: value


def _types(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cls.__name__ for cls in type(value).__mro__ if cls is not object))


def _function_types(value: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys((getattr(value, "__name__", type(value).__name__), type(value).__name__)))


def _own(path: str, sizes: dict[str, int]) -> int:
    """How many numbers a layer holds itself."""
    return sum(size for name, size in sizes.items() if name.rpartition(".")[0] == path)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
