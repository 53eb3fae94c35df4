"""The values of a traced JAX step that one tap wants, decided when a layer, name, scope or operation is first met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax

from tensortap.adapters.arrays import MOST_LOOPS, ArrayCatcher, ArrayObserver
from tensortap.adapters.jax import kernel, rows
from tensortap.adapters.jax.extract import ExportedArrays
from tensortap.adapters.jax.operations import GROUPS
from tensortap.adapters.jax.tag import Mark
from tensortap.adapters.plan import Plan, Port
from tensortap.select.sites import Candidate

MOST_BYTES: Final = 1 << 28  # of one tensor that leaves a step as it is


class JaxSelection:
    """The ports that the probes of one tap want. `late`: layers become known only while they run."""

    def __init__(self, plan: Plan, observer: ArrayObserver, *, late: bool) -> None:
        self.ports: dict[tuple[str, str], Port | None] = {}
        self.seen_paths: dict[str, None] = {}
        self.late = late
        self.has_layers = False  # calls of modules were seen
        self.has_operations = any(p.is_op for probe in plan.probes for p in probe.patterns)
        self._plan = plan
        self._recorder = observer.recorder
        self._keeps_all = isinstance(observer, ArrayCatcher)

    def wants(self, path: str, port: str, types: tuple[str, ...] = (), leaf: bool = True) -> bool:
        """Return whether any probe wants a port of a layer or a parameter."""
        key = (path, port)
        if key not in self.ports:
            self.seen_paths[path] = None
            found = self._plan.of(self._recorder, path, port)
            if found is None and self.late:
                found = self._plan.port_for_named_value(self._recorder, Candidate(path, types, (port,), leaf), port)
            self.ports[key] = found
        return self.ports[key] is not None

    def wants_name(self, name: str, port: str) -> bool:
        """Return whether any probe wants a value that the user named, or its cotangent."""
        key = (name, port)
        if key not in self.ports:
            self.ports[key] = self._plan.port_for_named_value(self._recorder, Candidate(name, (), (port,)), port)
        return self.ports[key] is not None

    def wants_scope(self, path: str) -> bool:
        """Return whether any probe wants a name scope. Modules open scopes too: where there are any, they are sites."""
        if self.has_layers:
            return False
        self.seen_paths[path] = None
        return self.wants_name(path, "output")

    def wants_operation(self, path: str, name: str, number: int, port: str) -> bool:
        """Return whether any probe wants an operation."""
        key = (f"{path}/{name}#{number}", port)
        if key not in self.ports:
            chosen = [
                (pattern, 1 << i)
                for i, probe in enumerate(self._plan.probes)
                for pattern in probe.patterns
                if pattern.is_op and pattern.matches_op(path, name, number, port, GROUPS)
            ]
            self.ports[key] = Port(self._recorder, key[0], port, chosen, name) if chosen else None
        return self.ports[key] is not None

    def port(self, mark: Mark) -> Port | None:
        """Return the port that a mark stands for."""
        return self.ports.get((mark.path, mark.port))

    def export_kind(self, value: Any, mark: Mark, looping: bool) -> str:
        """Return how a value leaves a compiled step: as it is ("raw"), as a row, or as a row with a histogram."""
        port = self.port(mark)
        if port is None:
            return ""
        small = value.size * value.dtype.itemsize * (MOST_LOOPS if looping else 1) <= MOST_BYTES
        if small and (port.point(mark.slot).keeping or self._keeps_all):
            return "raw"
        return "histogram" if port.bits & self._recorder.histogram_probes else "row"

    def wants_hash(self, mark: Mark) -> bool:
        """Return whether a probe keeps the content hash of what a mark stands for."""
        port = self.port(mark)
        return port is not None and bool(port.bits & self._recorder.hash_probes)


def export(selections: Mapping[int, JaxSelection]) -> Any:
    """Return the function that exports a value from a step, for all taps (by number) that want it."""

    def choose(value: Any, marks: Sequence[Mark], looping: bool) -> ExportedArrays:
        ways = {selections[m.tap].export_kind(value, m, looping) for m in marks if m.tap in selections}
        if "raw" in ways:
            return ExportedArrays("raw", (value,))
        hashed = any(selections[m.tap].wants_hash(m) for m in marks if m.tap in selections)
        if rows.ON_HOST and jax.default_backend() == "cpu" and kernel.available():
            return kernel.row_of(value, "histogram" in ways, hashed)
        return ExportedArrays("row", rows.row_of(value, "histogram" in ways, hashed))

    return choose
