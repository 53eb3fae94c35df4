"""Put one tap's hooks on an object's layers and functions, and take them off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.numpy import calls, mlp, operations
from tensortap.adapters.numpy.function_wrapper import FunctionWrapper
from tensortap.adapters.numpy.hooks import NumpyLayerHook, NumpyRootHook
from tensortap.adapters.numpy.layers import CALL_METHODS, NumpyMember, NumpyMembers, definer_of, methods_of
from tensortap.adapters.numpy.method_sites import observe_method
from tensortap.adapters.numpy.references import Reference
from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.record.recorder import OpenStep


class NumpyTaps:
    """The hooks of one tap on one object."""

    def __init__(self, observer: ArrayObserver, steps: CallStepDetector, plan: Plan) -> None:
        self.ports: list[Port] = []
        self._observer = observer
        self._steps = steps
        self._plan = plan
        self._operations: operations.NumpyOperations | None = None
        self._arrays: list[tuple[NumpyMember, Port]] = []
        self._undo: list[Callable[[], None]] = []

    def attach(self, root: Any, members: NumpyMembers) -> None:
        """Put hooks on what the probes want, and on the root to find steps."""
        try:
            for names in by_object(members.layers):
                self._attach_layer(names, root=names[0].value is root)
            for function in members.functions:
                self._attach_function(function)
            for name in members.methods:
                self._attach_method(root, name)
            self._operations = self._attach_operations(members)
        except BaseException:  # a class whose attributes cannot be set
            self.detach()
            raise
        ports = ((member, self._port(member.path, "param")) for member in members.arrays)
        self._arrays = [(member, port) for member, port in ports if port is not None]

    def detach(self) -> None:
        """Take every hook off, the last one first."""
        while self._undo:
            self._undo.pop()()

    def record_arrays(self, step: OpenStep) -> None:
        """Record the arrays that layers hold, at the end of a step."""
        for member, port in self._arrays:
            if step is self._observer.recorder.current and step.armed & port.bits and member.holder is not None:
                self._observer.take_at_step_end(port, member.holder.get, step)

    def unseen_operations(self) -> dict[str, str]:
        """Return patterns for operations, each with why none was met; empty for those that met one."""
        return {} if self._operations is None else self._operations.unseen()

    def _attach_layer(self, names: list[NumpyMember], root: bool) -> None:
        value = names[0].value
        inputs, outputs = self._pair([member.path for member in names])
        hook = (NumpyRootHook if root else NumpyLayerHook)(self._observer, self._steps, inputs, outputs)
        if root or inputs or outputs:
            self._watch(value, hook)
        if mlp.is_mlp(value):
            self._attach_mlp(value, names)

    def _attach_mlp(self, value: Any, names: list[NumpyMember]) -> None:
        hooks = []
        for name, _ in mlp.layers_in(value):
            inputs, outputs = self._pair([joined(member.path, name) for member in names])
            hooks.append(NumpyLayerHook(self._observer, self._steps, inputs, outputs) if inputs or outputs else None)
        if any(hooks):
            taps = mlp.MLPTaps(value, hooks)
            self._watch(value, taps)
            taps.attach()
            self._undo.append(taps.detach)

    def _attach_operations(self, members: NumpyMembers) -> operations.NumpyOperations | None:
        """Pass traced arrays to every layer, if patterns match operations."""
        patterns = operations.wanted_patterns(self._plan, [member.path for member in members.layers])
        if not patterns:
            return None
        taps = operations.NumpyOperations(self._observer, self._steps, self._plan, patterns)
        for names in by_object(members.layers):
            self._watch(names[0].value, operations.NumpyOperationHook(taps, names[0].path, names[0].value))
        return taps

    def _watch(self, value: Any, hook: calls.CallHook) -> None:
        methods = {name: definer_of(value, name) for name in methods_of(value)}
        calls.watch(value, hook, methods, CALL_METHODS.__contains__)
        key = id(value)
        self._undo.append(lambda: calls.unwatch(key, hook, methods))

    def _attach_method(self, root: Any, name: str) -> None:
        inputs, outputs = self._pair([name])
        if inputs or outputs:
            hook = NumpyLayerHook(self._observer, self._steps, inputs, outputs)
            self._undo.append(observe_method(root, name, hook))

    def _attach_function(self, function: NumpyMember) -> None:
        inputs, outputs = self._pair([function.path])
        if not (inputs or outputs) or function.holder is None:
            return
        hook = NumpyLayerHook(self._observer, self._steps, inputs, outputs)
        self._undo.append(_wrap_function(function.holder, hook))

    def _pair(self, paths: Iterable[str]) -> tuple[list[Port], list[Port]]:
        """Return the ports for inputs and outputs of a layer, under all its names."""
        names = list(paths)
        inputs, outputs = ([p for path in names if (p := self._port(path, kind))] for kind in ("input", "output"))
        return inputs, outputs

    def _port(self, path: str, kind: str) -> Port | None:
        port = self._plan.of(self._observer.recorder, path, kind)
        if port is not None:
            self.ports.append(port)
        return port


def _wrap_function(reference: Reference, hook: calls.CallHook) -> Callable[[], None]:
    held = reference.get()
    wrapper = held if isinstance(held, FunctionWrapper) else FunctionWrapper(held)
    wrapper.hooks = (*wrapper.hooks, hook)
    if wrapper is not held:
        reference.put(wrapper)
    return partial(_unwrap_function, reference, wrapper, hook)


def _unwrap_function(reference: Reference, wrapper: FunctionWrapper, hook: calls.CallHook) -> None:
    wrapper.hooks = tuple(other for other in wrapper.hooks if other is not hook)
    if not wrapper.hooks and reference.get() is wrapper:  # otherwise another object was put there meanwhile
        reference.put(wrapper.original)


def by_object(members: Iterable[NumpyMember]) -> list[list[NumpyMember]]:
    """Return members in groups: all names of one object."""
    groups: dict[int, list[NumpyMember]] = {}
    for member in members:
        groups.setdefault(id(member.value), []).append(member)
    return list(groups.values())


def joined(path: str, name: str) -> str:
    """Return a path with one name more."""
    return f"{path}.{name}" if path else name
