"""One tap on a JAX model: which of its calls are running, what it wants, and where values go."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any, Final

from tensortap.adapters.arrays import ArrayObserver
from tensortap.adapters.jax.results import PendingResults
from tensortap.adapters.jax.selection import JaxSelection
from tensortap.adapters.jax.tag import LISTENERS, Mark
from tensortap.adapters.plan import Plan
from tensortap.adapters.steps import CallStepDetector

_NUMBERS: Final = itertools.count(1)


class _TapThread(threading.local):
    """The state of a tap in one thread: whether it traces, the depth of calls, and the names of layers."""

    def __init__(self) -> None:
        self.tracing = False
        self.depth = 0
        self.layer_names: dict[int, tuple[str, ...]] = {}


class JaxTap:
    """The JAX side of one tap. `live` taps take values as they come, others when a step has run."""

    def __init__(
        self, plan: Plan, observer: ArrayObserver, steps: CallStepDetector, *, root: type | None, live: bool, late: bool
    ) -> None:
        self.number = next(_NUMBERS)
        self.live = live
        self.open = True
        self.steps = steps
        self.observer = observer
        self.recorder = observer.recorder
        self.selection = JaxSelection(plan, observer, late=late)
        self.results = PendingResults(self.number, self.selection, observer, self.failed)
        self.notes: dict[str, str] = {}  # sites that a trace could not show, with the reason
        self.given: set[str] = set()  # parameters that a step's arguments hold
        self.root = root
        self._thread = _TapThread()
        self._lock = threading.RLock()
        LISTENERS[self.number] = self

    def listening(self) -> bool:
        """Return whether calls of layers are to be tagged now, in this thread."""
        return self.open and (self.live or self._thread.tracing)

    def set_tracing(self, on: bool) -> None:
        """Set whether a step is being traced in this thread."""
        self._thread.tracing = on

    def is_root(self, module: Any) -> bool:
        """Return whether a call of a module may be the outermost one."""
        return type(module) is self.root

    def enter(self) -> bool:
        """Begin a call of the model; True when it is the outermost."""
        self._thread.depth += 1
        if self._thread.depth > 1:
            self._thread.depth -= 1
            return False
        if self.live:
            self.steps.begin()
        return True

    def set_layer_names(self, names: Mapping[int, tuple[str, ...]]) -> None:
        """Set the names of the layers of the object that is being called, by their ids."""
        self._thread.layer_names = dict(names)

    def leave(self) -> None:
        """End the outermost call."""
        self._thread.depth, self._thread.layer_names = 0, {}
        if self.live:
            self.steps.end()

    def layer_names(self, module: Any) -> tuple[str, ...]:
        """Return the names of a layer in the object that is being called."""
        return self._thread.layer_names.get(id(module), ())

    def receive(self, mark: Mark, value: Any) -> None:
        """Record the value of a live tag."""
        port = self.selection.port(mark)
        if port is not None and self.open:
            with self._lock:
                self.observer.take(port.point(mark.slot), value, self.steps.current())

    def failed(self, what: str, error: Exception) -> None:
        """Count an error of ours, and raise nothing."""
        self.recorder.counters.failed("skipped_tensors", what, error)
