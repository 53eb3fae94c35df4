"""Taps on a model of JAX: calls of layers are tagged, and what is tagged comes out of the step, or as it is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad

from tensortap.adapters.arrays import NEVER, NO_VALUE, ArrayObserver, NamedArrays
from tensortap.adapters.jax import calls, carried
from tensortap.adapters.jax.context import LIVE
from tensortap.adapters.jax.intercept import INTERCEPTORS
from tensortap.adapters.jax.layers import arrays_of, kind_of, layers_of, value_of
from tensortap.adapters.jax.operations import GROUPS
from tensortap.adapters.jax.tag import Mark, tag, watchable
from tensortap.adapters.jax.watcher import Watcher
from tensortap.adapters.nested import values_in
from tensortap.adapters.protocol import Clock, Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import UnsupportedError, nearest
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import MODULE_PORTS
from tensortap.select.sites import Candidate, Pattern

PARAMETER_PORTS: Final = ("param", "grad")
_NO_LAYERS: Final = "are known only when they run; watch_step(step, model) with no pattern shows them"
_NO_OPERATION: Final = "no such operation ran in a step that was observed"


def adapt(model: Any, **options: Any) -> JaxAdapter | None:
    """The adapter for a module, or nothing for other objects of JAX's libraries."""
    return JaxAdapter(model) if kind_of(model) in ("nnx", "equinox", "linen", "haiku") else None


class JaxAdapter:
    """Taps on one model. `live`: values are taken as they are made; otherwise `StepFunction` brings them."""

    groups = GROUPS

    def __init__(self, model: Any, *, live: bool = True) -> None:
        self.kind = kind_of(model)
        self.late = self.kind not in ("nnx", "equinox")  # what layers there are shows only when they run
        self.watcher: Watcher | None = None
        self._model: Callable[[], Any] = weakref.ref(model) if hasattr(model, "__weakref__") else lambda: model
        self._class = type(model)
        self._live = live
        self._paths = {layer.path: layer for layer in layers_of(model)}
        self._parameters = dict(arrays_of(model))
        self._structure: Any = jax.tree.structure(model) if self.kind == "tree" else None

    def candidates(self) -> list[Candidate]:
        """Every layer and every parameter that is known before anything runs."""
        layers = [
            Candidate(path, tuple(c.__name__ for c in type(layer.module).__mro__[:-1]), MODULE_PORTS, layer.leaf)
            for path, layer in self._paths.items()
        ]
        ports = PARAMETER_PORTS if not self.late else PARAMETER_PORTS[:1]
        return [*layers, *(Candidate(path, (type(p).__name__,), ports) for path, p in self._parameters.items())]

    def untappable(self) -> dict[str, str]:
        """Layers of Linen and Haiku are not known beforehand, which is said."""
        return {"(its layers)": _NO_LAYERS} if self.kind in ("linen", "haiku") else {}

    def operations(self) -> set[str]:
        """The names of all operations: JAX's own, and those of whoever has taught it more."""
        known = (*vars(primitives).values(), *ad.primitive_jvps)
        return {str(primitive.name) for primitive in known if isinstance(primitive, Primitive)}

    def refuse(self, pattern: Pattern) -> None:
        """Single operations are seen in a whole step only, gradients of parameters where a model holds them."""
        if self.late and pattern.ports == {"grad"}:
            raise UnsupportedError(
                f"{pattern.text!r}: of JAX, gradients of parameters are seen in modules of NNX and Equinox. Name the "
                "parameters inside the loss, params = tensortap.tap(params, 'net/params'), and watch "
                "'net/params:grad_output'"
            )
        if self._live and pattern.kind == "op":
            raise UnsupportedError(
                f"{pattern.text!r}: single operations of JAX are seen where the whole step is watched: "
                f"tensortap.watch_step(step, model, {pattern.text!r})"
            )

    def describe(self) -> dict[str, Any]:
        """The layers, and how many numbers each of them learns."""
        return {
            "framework": "jax",
            "class": self._class.__name__ if self.kind else "function",
            "library": self.kind or "function",
            "modules": [
                {"path": path, "type": type(layer.module).__name__, "parameters": _size(layer.module)}
                for path, layer in self._paths.items()
            ],
        }

    def attach(self, recorder: Recorder, plan: Plan, clock: Clock, observer: ArrayObserver | None = None) -> None:
        """See the calls of layers."""
        self._recorder, self._plan = recorder, plan
        observer, self._steps = observer or ArrayObserver(recorder), CallStepDetector(recorder, clock)
        self._names = NamedArrays(observer, plan)
        root = self._class if self.kind in ("nnx", "equinox") else None
        self.watcher = Watcher(plan, observer, self._steps, root=root, live=self._live, late=self.late)
        for path, port in plan.ports:
            self.watcher.wants(path, port)
        self.watcher.seen_paths.clear()
        if root is not None:
            calls.join(self.watcher, self._model())
        if self._live:
            if root is None:
                INTERCEPTORS.join(self.watcher)
            LIVE.join(self.watcher)

    def arm(self) -> None:
        """An unwanted step runs the user's own function."""

    def detach(self) -> None:
        """Classes as they were, and functions as they were traced before."""
        if self.watcher is not None:
            self.watcher.open = False
            calls.leave(self.watcher)
            INTERCEPTORS.leave(self.watcher)
            if self._live:
                LIVE.leave(self.watcher)

    def current(self) -> OpenStep:
        """The calling thread's step."""
        return self._steps.current()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        return self._steps.enter(step)

    def closing(self, step: OpenStep) -> None:
        """Take what the step has given, and parameters that no argument of it held."""
        if self.watcher is not None:
            if self._live:
                jax.effects_barrier()
            self.watcher.settle(step)
            self._parameters_of(self.watcher, step)
        self._steps.closed(step)

    def left_open(self) -> list[OpenStep]:
        """Other threads' steps that nothing has closed. What the open step gave is taken, so that it counts as seen."""
        if self.watcher is not None:
            self.watcher.settle(self._recorder.current)
        return self._steps.left_open()

    def mark(self, name: str, value: Any) -> Any:
        """A value the user named inside a step: the same value, tagged."""
        watcher = self.watcher
        if watcher is None or not watcher.listening():
            return value
        found = [(slot, leaf) for slot, leaf in values_in(value, jax.Array) if watchable(leaf) and not _concrete(leaf)]
        marked = {
            id(leaf): tag(
                leaf,
                [Mark(watcher.number, name, "output", slot)] if watcher.wants_name(name, "output") else [],
                [Mark(watcher.number, name, "grad_output", slot)] if watcher.wants_name(name, "grad_output") else [],
                live=watcher.live,
            )
            for slot, leaf in found
        }
        return jax.tree.map(lambda leaf: marked.get(id(leaf), leaf), value) if marked else value

    def named(self, name: str, value: Any) -> bool:
        """A value the user named outside any traced function."""
        leaves = [leaf for _, leaf in values_in(value, jax.Array)]
        if any(not _concrete(leaf) for leaf in leaves):
            return True  # its tag tells
        plain = jax.tree.map(lambda leaf: np.asarray(leaf) if watchable(leaf) else leaf, value) if leaves else value
        return self._names.see(name, plain, self.current())

    def unseen(self) -> dict[str, str]:
        """What was wanted and never seen."""
        watcher = self.watcher
        if watcher is None:
            return {}
        ports = [port for port in watcher.ports.values() if port is not None and not port.seen]
        found = {f"{p.path}:{p.port}": p.note or watcher.notes.get(f"{p.path}:{p.port}", NEVER) for p in ports}
        return found | dict(self._unanswered(watcher))

    def find(self, arguments: Any) -> list[tuple[str, Any]]:
        """The parameters of the model among the arguments of a traced step; its layers get their names there."""
        for value in jax.tree.leaves(arguments, is_leaf=self._is_model):
            if self._is_model(value):
                if self.kind == "nnx":
                    carried.give(value)  # `signature` takes them again when the step is over
                return arrays_of(value)
        return []

    def refuse_constants(self, constants: Iterable[Any]) -> None:
        """A model of NNX that a step reads without being given it would be compiled in, as it is at first."""
        own = {id(value_of(parameter)) for parameter in self._parameters.values()} if self.kind == "nnx" else set()
        if any(id(constant) in own for constant in constants):
            name = self._class.__name__
            raise UnsupportedError(f"the step reads {name} without being given it; make it an argument: step(model, x)")

    def _is_model(self, value: Any) -> bool:
        if self.kind == "tree":
            return isinstance(value, self._class) and bool(jax.tree.structure(value) == self._structure)
        return type(value) is self._class and self.kind in ("nnx", "equinox")

    def _parameters_of(self, watcher: Watcher, step: OpenStep) -> None:
        """Of NNX, whose variables have their values also where no step was given them."""
        for path, parameter in self._parameters.items() if self.kind == "nnx" else ():
            port = watcher.ports.get((path, "param"))
            if port is not None and step.armed & port.bits and path not in watcher.given:
                watcher.observer.take_late(port, partial(_on_host, parameter), step)

    def _unanswered(self, watcher: Watcher) -> Iterable[tuple[str, str]]:
        """Patterns that chose nothing: names that nobody tapped, operations that nobody did."""
        ports: list[Port] = [port for port in watcher.ports.values() if port is not None]
        answered = {pattern for port in ports for pattern, _ in port.patterns}
        patterns = (pattern for probe in self._plan.probes for pattern in probe.patterns)
        names = set(self._names.unseen())
        for pattern in patterns:
            if pattern not in answered and (pattern.text in names or self.late or pattern.kind == "op"):
                yield pattern.text, _NO_OPERATION if pattern.kind == "op" else NO_VALUE

    def hint(self, watcher: Watcher) -> None:
        """After a first trace: say which patterns chose nothing, and what is near."""
        known = [path for path in watcher.seen_paths if path]
        for text, _ in self._unanswered(watcher) if self.late else ():
            near = nearest(text.partition(":")[0], known) or known[:5]
            said = f"{text!r} has matched nothing in this step. There are {', '.join(map(repr, near)) or 'no layers'}"
            self._recorder.counters.warn(f"late:{text}", said)


def _concrete(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def _on_host(parameter: Any) -> Any:
    return np.asarray(value_of(parameter))


def _size(module: Any) -> int:
    return sum(int(np.prod(value_of(p).shape)) for _, p in arrays_of(module))


def refuse_model(model: Any, probes: Iterable[Any]) -> None:
    """What holds no parameters is no model, and a model is no pattern, though it can be called like one."""
    holds = isinstance(model, (Mapping, list, tuple)) or any(isinstance(x, jax.Array) for x in jax.tree.leaves(model))
    if model is not None and kind_of(model) is None and not holds:
        raise UnsupportedError(
            f"watch_step() takes a model or its parameters second, not an object of type {type(model).__name__}: "
            "tensortap.watch_step(step, model, 'pattern'), or None for the model"
        )
    for probe in probes:
        if kind_of(probe) is not None:
            raise UnsupportedError(
                f"an object of type {type(probe).__name__} is no pattern; the model comes second: "
                "tensortap.watch_step(step, model, 'pattern')"
            )


def refuse(step: Any) -> None:
    """What is no function cannot be a step."""
    if not callable(step):
        raise UnsupportedError(
            f"watch_step() takes the function of a step first, not an object of type {type(step).__name__}: "
            "step = tensortap.watch_step(step_fn, model)"
        )
