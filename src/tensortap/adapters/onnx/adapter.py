"""The adapter for ONNX Runtime sessions: `run` is observed, and an instrumented copy shows the tensors inside."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Final

from tensortap.adapters.arrays import ArrayAdapter, ArrayObserver, NamedArrays, unseen
from tensortap.adapters.onnx import dispatch
from tensortap.adapters.onnx.capabilities import CAPABILITIES
from tensortap.adapters.onnx.graph import OnnxGraph
from tensortap.adapters.onnx.instrumented import InstrumentedSession, OnnxSite
from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import nearest
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import FORWARD_PORTS
from tensortap.select.sites import Candidate

INNER_NODES: Final = (
    "{} of {} tensors lie inside If, Loop or Scan nodes and are not seen (counted as unseen_nodes); only the outputs "
    "of these nodes are. Where a condition is fixed, export or simplify the model with it: the branch becomes the graph"
)
GIVEN: Final = "is given to the session: ':input{}' shows it"


class OnnxAdapter(ArrayAdapter):
    """Taps on one session. Its optimised graph is dumped when the adapter is made."""

    capabilities = CAPABILITIES
    steps: CallStepDetector

    def __init__(self, session: Any) -> None:
        self._session = weakref.ref(session)
        self.graph = OnnxGraph(session)
        self._ports: list[Port] = []
        self._constants: list[Port] = []
        self._instrumented: InstrumentedSession | None = None

    def candidates(self) -> list[Candidate]:
        """Return the session, every tensor that a node makes, and every initializer."""
        root = Candidate("", (type(self._model()).__name__,), FORWARD_PORTS, leaf=not self.graph.nodes)
        tensors = [Candidate(name, node.types, FORWARD_PORTS) for node in self.graph.nodes for name in node.gives]
        return [root, *tensors, *(Candidate(name, ("Initializer",), ("param",)) for name in self.graph.constants)]

    def untappable(self) -> dict[str, str]:
        """Return tensors that were removed by fusion, those inside branches and loops, and the session's inputs."""
        given = [value.name for value in self._model().get_inputs()]
        return self.graph.missing | {name: GIVEN.format(f".{name}" if given[1:] else "") for name in given}

    def describe(self) -> dict[str, Any]:
        """Return the nodes, and what an instrumented copy costs, for `run.json`."""
        session = self._model()
        return {
            "framework": "onnx",
            "class": type(session).__name__,
            "modules": [
                {"path": n, "type": node.types[0], "parameters": node.parameters}
                for node in self.graph.nodes
                for n in node.gives
            ],
            "providers": session.get_providers(),
            "fused_away": len(self.graph.missing),
            "twin_bytes": self.graph.nbytes,
        }

    def attach(self, recorder: Recorder, plan: Plan, observer: ArrayObserver | None = None) -> None:
        """Observe the session's runs."""
        session = self._model()
        self._recorder, self._plan = recorder, plan
        self._observer = observer or ArrayObserver(recorder)
        self.steps = CallStepDetector(recorder)
        self._names = NamedArrays(self._observer, plan)
        tensors = (self._site(node.given, name, name) for node in self.graph.nodes for name in node.gives)
        sites = [site for site in tensors if site.inputs or site.outputs]
        given = tuple(value.name for value in session.get_inputs())
        root = self._site(given, "\n".join(value.name for value in session.get_outputs()), "")
        ports = (self._port(name, "param") for name in self.graph.constants)
        self._constants = [port for port in ports if port is not None]
        self._instrumented = InstrumentedSession(self.graph, self._observer, self.steps, sites, root)
        self._warn_of_unknown_names()
        self._count_inner_nodes()
        dispatch.add_observer(session, self._instrumented)

    def detach(self) -> None:
        """Restore the session's `run`."""
        session = self._session()
        if session is not None and self._instrumented is not None:
            dispatch.remove_observer(session, self._instrumented)

    def collect(self, step: OpenStep) -> None:
        """Record the initializers."""
        for port in self._constants:
            if step is self._recorder.current and step.armed & port.bits:
                self._observer.take_at_step_end(port, partial(self.graph.constant, port.path), step)

    def named(self, name: str, value: Any) -> bool:
        """Record a value the user named."""
        return self._names.see(name, value, self.steps.current())

    def unseen(self) -> dict[str, str]:
        """Return tensors and names that were wanted but never seen, with the reason."""
        return unseen(self._ports, self._names)

    def _model(self) -> Any:
        session = self._session()
        if session is None:
            raise ReferenceError("the watched session is gone")
        return session

    def _count_inner_nodes(self) -> None:
        """Count the nodes inside If, Loop and Scan nodes that a wide pattern would have matched."""
        patterns = [p for probe in self._plan.probes for p in probe.patterns if p.kind != "path" or "*" in p.text]
        inner = [Candidate(name, node.types, FORWARD_PORTS) for node in self.graph.inner_nodes for name in node.gives]
        hidden = [c for c in inner if any(p.matches(c, port) for p in patterns for port in FORWARD_PORTS)]
        if hidden:
            counters = self._recorder.counters
            counters.add("unseen_nodes", len(hidden))
            counters.warn("inner nodes", INNER_NODES.format(len(hidden), len(hidden) + len(self.graph.nodes)))

    def _warn_of_unknown_names(self) -> None:
        """Warn of patterns with a slash that match no tensor: they may mean values that the user names later."""
        known = [candidate.path for candidate in self.candidates()]
        for pattern in self._plan.waiting(known, (*FORWARD_PORTS, "param")):
            if near := nearest(pattern.head, known):
                self._recorder.counters.warn(
                    f"waiting:{pattern.text}",
                    f"{pattern.text!r} is not a tensor of this session; it waits for a value named with tap(). "
                    f"Did you mean {' or '.join(map(repr, near))}?",
                )

    def _site(self, given: tuple[str, ...], gives: str, path: str) -> OnnxSite:
        inputs, outputs = ([port] if (port := self._port(path, kind)) else [] for kind in ("input", "output"))
        return OnnxSite(given, gives, inputs, outputs)

    def _port(self, path: str, kind: str) -> Port | None:
        port = self._plan.of(self._recorder, path, kind)
        if port is not None:
            self._ports.append(port)
        return port
