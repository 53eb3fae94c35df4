"""Single operations of a tap, for adapters that see operations while layers run: the wanted ones, and their ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensortap.adapters.arrays import NO_ARRAY_IN, NO_ARRAY_OUT, ArrayObserver, Arrays, arrays_in, as_array
from tensortap.adapters.nested import values_in
from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.select.ports import FORWARD_PORTS
from tensortap.select.sites import Pattern

Groups = Mapping[str, frozenset[str]]


class OperationTaps:
    """All operations of one tap. Ports are decided when an operation is first met."""

    groups: Groups
    missed: str  # why a pattern has met none

    def __init__(self, observer: ArrayObserver, steps: CallStepDetector, plan: Plan, patterns: list[Pattern]) -> None:
        self.observer = observer
        self.steps = steps
        self._plan = plan
        self._patterns = patterns
        self._ports: dict[tuple[str, str, int, str], Port | None] = {}
        self.bits = 0
        for i, probe in enumerate(plan.probes):
            self.bits |= any(pattern in patterns for pattern in probe.patterns) << i

    def observe(
        self, path: str, number: int, name: str, args: Any, kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run an operation, and record its inputs and outputs."""
        given, gives = (self.port(path, name, number, port) for port in ("input", "output"))
        step = self.steps.current()
        if given is not None and step.armed & given.bits:
            self._record(given, _arguments(args, kwargs), NO_ARRAY_IN)
        output = run()
        if gives is not None and step.armed & gives.bits:
            self._record(gives, arrays_in(output), NO_ARRAY_OUT)
        return output

    def unseen(self) -> dict[str, str]:
        """Return patterns for operations, each with why none was met; empty for those that met one."""
        met = {
            pattern for port in self._ports.values() if port is not None and port.seen for pattern, _ in port.patterns
        }
        return {pattern.text: "" if pattern in met else self.missed for pattern in self._patterns}

    def _record(self, port: Port, found: list[tuple[str, Any]], why: str) -> None:
        try:
            self.observer.take_all([port], found, self.steps.current(), why)
        except Exception as error:
            self.observer.recorder.counters.failed("skipped_tensors", f"observing {port.path}", error)

    def port(self, path: str, op: str, number: int, port: str) -> Port | None:
        """Return the port of an operation, if any probe wants it."""
        key = (path, op, number, port)
        if key not in self._ports:
            chosen = [
                (pattern, 1 << i)
                for i, probe in enumerate(self._plan.probes)
                for pattern in probe.patterns
                if pattern in self._patterns and pattern.matches_op(path, op, number, port, self.groups)
            ]
            recorder = self.observer.recorder
            self._ports[key] = Port(recorder, f"{path}/{op}#{number}", port, chosen, op) if chosen else None
        return self._ports[key]


def operation_patterns(plan: Plan, paths: Iterable[str], known: frozenset[str], groups: Groups) -> list[Pattern]:
    """Return the patterns for operations: `op:…`, and `layer/name` where both the layer and the name are known."""
    layers = set(paths)
    patterns = [p for probe in plan.probes for p in probe.patterns]
    return [p for p in patterns if p.kind == "op" or _means_operation(p, layers, known, groups)]


def _means_operation(pattern: Pattern, paths: set[str], known: frozenset[str], groups: Groups) -> bool:
    operation = pattern.operation
    if operation is None:
        return False
    names = {name for name in known if operation.names.fullmatch(name)}
    names.update(name for group in operation.groups for name in groups.get(group, ()))
    pairs = ((path, name) for path in paths for name in names)
    number = operation.number or 0
    return any(pattern.matches_op(path, name, number, port, groups) for path, name in pairs for port in FORWARD_PORTS)


def _arguments(args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = [(slot, as_array(value)) for slot, value in values_in(args, Arrays)]
    found += [(slot, as_array(v)) for slot, v in values_in({k: v for k, v in kwargs.items() if k != "out"}, Arrays)]
    return [("", found[0][1])] if len(found) == 1 else found
