"""Taps on an ONNX Runtime session: its `run` is seen, and a twin with more outputs shows the tensors inside."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Final

import onnxruntime

from tensortap.adapters.arrays import ArrayObserver, NamedArrays, unseen
from tensortap.adapters.onnx import dispatch
from tensortap.adapters.onnx.graph import Graph
from tensortap.adapters.onnx.twin import Site, Twin
from tensortap.adapters.protocol import Clock, Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import nearest
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import FORWARD_PORTS
from tensortap.select.sites import Candidate

GIVEN: Final = "is given to the session: ':input{}' shows it"


def adapt(model: Any, **options: Any) -> OnnxAdapter | None:
    """The adapter for a session, or nothing for other objects of ONNX Runtime."""
    return OnnxAdapter(model) if isinstance(model, onnxruntime.InferenceSession) else None


class OnnxAdapter:
    """Taps on one session. Its graph is dumped once, when it is first asked about."""

    def __init__(self, session: Any) -> None:
        self._session = weakref.ref(session)
        self.graph = Graph(session)
        self._ports: list[Port] = []
        self._constants: list[Port] = []
        self._twin: Twin | None = None

    def candidates(self) -> list[Candidate]:
        """The session, every tensor that a node gives, and every initializer."""
        root = Candidate("", (type(self._model()).__name__,), FORWARD_PORTS, leaf=not self.graph.nodes)
        tensors = [Candidate(name, node.types, FORWARD_PORTS) for node in self.graph.nodes for name in node.gives]
        return [root, *tensors, *(Candidate(name, ("Initializer",), ("param",)) for name in self.graph.constants)]

    def untappable(self) -> dict[str, str]:
        """Tensors that were fused away, those inside branches and loops, and what the session is given."""
        given = [value.name for value in self._model().get_inputs()]
        return self.graph.missing | {name: GIVEN.format(f".{name}" if given[1:] else "") for name in given}

    def describe(self) -> dict[str, Any]:
        """The nodes, and what a twin costs."""
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

    def attach(self, recorder: Recorder, plan: Plan, clock: Clock, observer: ArrayObserver | None = None) -> None:
        """See the session's runs."""
        session = self._model()
        self._recorder, self._plan = recorder, plan
        self._observer = observer or ArrayObserver(recorder)
        self._steps = CallStepDetector(recorder, clock)
        self._names = NamedArrays(self._observer, plan)
        tensors = (self._site(node.given, name, name) for node in self.graph.nodes for name in node.gives)
        sites = [site for site in tensors if site.inputs or site.outputs]
        given = tuple(value.name for value in session.get_inputs())
        root = self._site(given, "\n".join(value.name for value in session.get_outputs()), "")
        ports = (self._port(name, "param") for name in self.graph.constants)
        self._constants = [port for port in ports if port is not None]
        self._twin = Twin(self.graph, self._observer, self._steps, sites, root)
        self._hint()
        dispatch.join(session, self._twin)

    def arm(self) -> None:
        """An unwanted step runs the session itself."""

    def detach(self) -> None:
        """Give the session its `run` back."""
        session = self._session()
        if session is not None and self._twin is not None:
            dispatch.leave(session, self._twin)

    def current(self) -> OpenStep:
        """The calling thread's step."""
        return self._steps.current()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        return self._steps.enter(step)

    def closing(self, step: OpenStep) -> None:
        """Take the initializers."""
        for port in self._constants:
            if step is self._recorder.current and step.armed & port.bits:
                self._observer.take_late(port, partial(self.graph.constant, port.path), step)
        self._steps.closed(step)

    def left_open(self) -> list[OpenStep]:
        """Other threads' steps that nothing has closed."""
        return self._steps.left_open()

    def named(self, name: str, value: Any) -> bool:
        """A value the user named."""
        return self._names.see(name, value, self.current())

    def unseen(self) -> dict[str, str]:
        """Tensors and names that were wanted but never seen."""
        return unseen(self._ports, self._names)

    def _model(self) -> Any:
        session = self._session()
        if session is None:
            raise ReferenceError("the watched session is gone")
        return session

    def _hint(self) -> None:
        """Tensors have slashes in their names, and so have values that the user is still to name."""
        there = [candidate.path for candidate in self.candidates()]
        for pattern in self._plan.waiting(there, (*FORWARD_PORTS, "param")):
            if near := nearest(pattern.head, there):
                self._recorder.counters.warn(
                    f"waiting:{pattern.text}",
                    f"{pattern.text!r} is no tensor of this session; it waits for a value named with tap(). "
                    f"Did you mean {' or '.join(map(repr, near))}?",
                )

    def _site(self, given: tuple[str, ...], gives: str, path: str) -> Site:
        inputs, outputs = ([port] if (port := self._port(path, kind)) else [] for kind in ("input", "output"))
        return Site(given, gives, inputs, outputs)

    def _port(self, path: str, kind: str) -> Port | None:
        port = self._plan.of(self._recorder, path, kind)
        if port is not None:
            self._ports.append(port)
        return port
