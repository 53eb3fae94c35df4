"""Record the arrays that go into a compiled function and come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.jax.capabilities import CAPABILITIES
from tensortap.adapters.null import NullAdapter
from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.steps import StepDetector, ThreadState
from tensortap.record.recorder import Recorder
from tensortap.select.ports import PARAMETER_PORTS
from tensortap.select.probes import Probe
from tensortap.select.sites import Candidate

_PORTS: Final = ("output", "input", *PARAMETER_PORTS)


class JaxScriptAdapter(NullAdapter):
    """Observe the arguments and results of a function, and nothing inside it."""

    capabilities = CAPABILITIES
    names_only = False

    def __init__(self, name: str, parameters: dict[str, int]) -> None:
        self._name = name
        self._parameters = parameters
        self._known: dict[tuple[str, str, str], Any] = {}

    def describe(self) -> dict[str, Any]:
        """Return the function's name and its parameters, for `run.json`."""
        tree = [{"path": name, "type": "Array", "parameters": size} for name, size in self._parameters.items()]
        return {"framework": "jax", "class": self._name, "library": "function", "modules": tree}

    def plan(self, probes: Sequence[Probe]) -> Plan:
        """Return an empty plan: names are known when the function is called."""
        return Plan({}, tuple(probes))

    def attach(self, recorder: Recorder, plan: Plan) -> None:
        """Put nothing on."""
        self.steps = StepDetector(recorder, ThreadState)
        self._observer, self._plan = ArrayObserver(recorder), plan

    def wants(self, port: str) -> bool:
        """Return whether the step that is open wants a port of anything."""
        found = self._port("x", port)
        return found is not None and bool(self.steps.current().armed & found.bits)

    def see(self, name: str, port: str, value: Any, slot: str = "") -> None:
        """Record an array under a name, where a probe wants it."""
        known = self._port(name, port)
        step = self.steps.current()
        if known is not None and step.armed & known.bits:
            self._observer.take(known.point(slot), host(value), step)

    def _port(self, name: str, port: str) -> Port | None:
        key = (name, port, "")
        if key not in self._known:
            candidate = Candidate(name, ("Array",), _PORTS, True)
            self._known[key] = self._plan.port_for_named_value(self._observer.recorder, candidate, port)
        found: Port | None = self._known[key]
        return found


def host(value: Any) -> np.ndarray[Any, Any]:
    """Return the elements of an array that are on this process; of a sharded array, the local part."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.asarray(value.addressable_shards[0].data)
    return np.asarray(value)
