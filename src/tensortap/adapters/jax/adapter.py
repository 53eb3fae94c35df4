"""The adapter for JAX models: calls of layers are tagged, and tagged values leave the step or are taken live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad

from tensortap.adapters.arrays import NEVER, NO_VALUE, ArrayAdapter, ArrayObserver, NamedArrays
from tensortap.adapters.jax import calls
from tensortap.adapters.jax.capabilities import CAPABILITIES
from tensortap.adapters.jax.intercept import INTERCEPTORS
from tensortap.adapters.jax.layers import kind_of, value_of
from tensortap.adapters.jax.model import JaxModel
from tensortap.adapters.jax.operations import GROUPS
from tensortap.adapters.jax.tag import Mark, tag, watchable
from tensortap.adapters.jax.tap import JaxTap
from tensortap.adapters.jax.trace_context import LIVE_TAPS
from tensortap.adapters.nested import values_in
from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import UnsupportedError, nearest
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.sites import Candidate, Pattern

_NO_LAYERS: Final = "are known only when they run; watch_step(step, model) with no pattern shows them"
_NO_OPERATION: Final = "no such operation ran in a step that was observed"


class JaxAdapter(ArrayAdapter):
    """Taps on one model. `live`: values are taken as they are made; otherwise `StepFunction` hands them over."""

    capabilities = CAPABILITIES
    groups = GROUPS
    steps: CallStepDetector

    def __init__(self, model: Any, *, live: bool = True) -> None:
        self.model = JaxModel(model)
        self.more_sites_later = self.model.late
        self.tap: JaxTap | None = None
        self.changes_in_calls = not live  # a step's program is chosen when the step has begun
        self._live = live

    def candidates(self) -> list[Candidate]:
        """Return every layer and every parameter that is known before the model runs."""
        return self.model.candidates()

    def untappable(self) -> dict[str, str]:
        """Return why layers of Linen and Haiku are not listed: they are not known beforehand."""
        return {"(its layers)": _NO_LAYERS} if self.model.kind in ("linen", "haiku") else {}

    def operations(self) -> set[str]:
        """Return the names of all operations: JAX's own, and those that were added to it."""
        known = (*vars(primitives).values(), *ad.primitive_jvps)
        return {str(primitive.name) for primitive in known if isinstance(primitive, Primitive)}

    def refuse(self, pattern: Pattern) -> None:
        """Refuse gradients of parameters that no model holds, and operations outside a whole step."""
        super().refuse(pattern)
        if self.more_sites_later and pattern.ports == {"grad"}:
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
        """Return the layers, for `run.json`."""
        return self.model.describe()

    def attach(self, recorder: Recorder, plan: Plan, observer: ArrayObserver | None = None) -> None:
        """Observe the calls of layers."""
        self._recorder, self._plan = recorder, plan
        observer, self.steps = observer or ArrayObserver(recorder), CallStepDetector(recorder)
        self._names = NamedArrays(observer, plan)
        root = self.model.cls if self.model.has_modules else None
        self.tap = JaxTap(plan, observer, self.steps, root=root, live=self._live, late=self.more_sites_later)
        for path, port in plan.ports:
            self.tap.selection.wants(path, port)
        self.tap.selection.seen_paths.clear()
        if root is not None:
            calls.add_tap(self.tap, self.model.get())
        if self._live:
            self.steps.call_is_all = False  # values of compiled code come by callbacks
            if root is None:
                INTERCEPTORS.add(self.tap)
            LIVE_TAPS.add(self.tap)

    def detach(self) -> None:
        """Restore the classes of layers, and the functions as they were traced before."""
        if self.tap is not None:
            self.tap.open = False
            calls.remove_tap(self.tap)
            INTERCEPTORS.remove(self.tap)
            if self._live:
                LIVE_TAPS.remove(self.tap)

    def change(self, recorder: Recorder, plan: Plan) -> None:
        """Replace the taps, after recording the values of the open step so far."""
        if self.tap is not None:
            if self._live:
                jax.effects_barrier()
            self.tap.results.record(recorder.current)
        super().change(recorder, plan)

    def collect(self, step: OpenStep) -> None:
        """Record the values of the step, and parameters that were in none of its arguments."""
        if self.tap is not None:
            if self._live:
                jax.effects_barrier()
            self.tap.results.record(step)
            self._record_parameters(self.tap, step)

    def left_open(self) -> list[OpenStep]:
        """Return steps that nothing has closed. Values of the open step are recorded, so that they count as seen."""
        if self.tap is not None:
            self.tap.results.record(self._recorder.current)
        return self.steps.left_open()

    def mark(self, name: str, value: Any) -> Any:
        """Return a value that the user named inside a step, tagged."""
        tap = self.tap
        if tap is None or not tap.listening():
            return value
        found = [(slot, leaf) for slot, leaf in values_in(value, jax.Array) if watchable(leaf) and not _concrete(leaf)]
        marked = {
            id(leaf): tag(
                leaf,
                [Mark(tap.number, name, "output", slot)] if tap.selection.wants_name(name, "output") else [],
                [Mark(tap.number, name, "grad_output", slot)] if tap.selection.wants_name(name, "grad_output") else [],
                live=tap.live,
            )
            for slot, leaf in found
        }
        return jax.tree.map(lambda leaf: marked.get(id(leaf), leaf), value) if marked else value

    def named(self, name: str, value: Any) -> bool:
        """Record a value that the user named outside any traced function; a traced one has its tag."""
        leaves = [leaf for _, leaf in values_in(value, jax.Array)]
        if any(not _concrete(leaf) for leaf in leaves):
            return True
        plain = jax.tree.map(lambda leaf: np.asarray(leaf) if watchable(leaf) else leaf, value) if leaves else value
        return self._names.see(name, plain, self.steps.current())

    def unseen(self) -> dict[str, str]:
        """Return what was wanted and never seen, with the reason."""
        tap = self.tap
        if tap is None:
            return {}
        ports = [port for port in tap.selection.ports.values() if port is not None and not port.seen]
        found = {f"{p.path}:{p.port}": p.note or tap.notes.get(f"{p.path}:{p.port}", NEVER) for p in ports}
        return found | dict(self._unanswered(tap))

    def warn_of_unmatched(self) -> None:
        """Warn, after the first trace, of patterns that matched nothing, with the nearest names."""
        known = [] if self.tap is None else [path for path in self.tap.selection.seen_paths if path]
        for text, _ in self._unanswered(self.tap) if self.more_sites_later and self.tap is not None else ():
            near = nearest(text.partition(":")[0], known) or known[:5]
            said = f"{text!r} has matched nothing in this step. There are {', '.join(map(repr, near)) or 'no layers'}"
            self._recorder.counters.warn(f"late:{text}", said)

    def _record_parameters(self, tap: JaxTap, step: OpenStep) -> None:
        """Record parameters of NNX: their variables have values even if no step took them as arguments."""
        for path, parameter in self.model.parameters.items() if self.model.kind == "nnx" else ():
            port = tap.selection.ports.get((path, "param"))
            if port is not None and step.armed & port.bits and path not in tap.given:
                tap.observer.take_at_step_end(port, partial(_on_host, parameter), step)

    def _unanswered(self, tap: JaxTap) -> Iterable[tuple[str, str]]:
        """Return patterns that matched nothing: names that were not tapped, operations that did not run."""
        ports: list[Port] = [port for port in tap.selection.ports.values() if port is not None]
        answered = {pattern for port in ports for pattern, _ in port.patterns}
        patterns = (pattern for probe in self._plan.probes for pattern in probe.patterns)
        names = set(self._names.unseen())
        for pattern in patterns:
            if pattern not in answered and (pattern.text in names or self.more_sites_later or pattern.kind == "op"):
                yield pattern.text, _NO_OPERATION if pattern.kind == "op" else NO_VALUE


def _concrete(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def _on_host(parameter: Any) -> Any:
    return np.asarray(value_of(parameter))


def refuse_model(model: Any, probes: Iterable[Any]) -> None:
    """Refuse a second argument of `watch_step` that holds no parameters, and a model given as a pattern."""
    holds = isinstance(model, (Mapping, list, tuple)) or any(isinstance(x, jax.Array) for x in jax.tree.leaves(model))
    if model is not None and kind_of(model) is None and not holds:
        raise UnsupportedError(
            "the second argument of watch_step() must be a model or its parameters, got an object of type "
            f"{type(model).__name__}: tensortap.watch_step(step, model, 'pattern'), or None for the model"
        )
    for probe in probes:
        if kind_of(probe) is not None:
            raise UnsupportedError(
                f"a pattern must be text, got an object of type {type(probe).__name__}; the model comes second: "
                "tensortap.watch_step(step, model, 'pattern')"
            )


def refuse_step(step: Any) -> None:
    """Refuse a first argument of `watch_step` that cannot be called."""
    if not callable(step):
        raise UnsupportedError(
            f"the first argument of watch_step() must be the function of a step, got an object of type "
            f"{type(step).__name__}: step = tensortap.watch_step(step_fn, model)"
        )
