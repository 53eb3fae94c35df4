"""One tap on a model of JAX: which layers are called what, which ports are wanted, and where values go."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from tensortap.adapters.arrays import ArrayObserver, Catcher
from tensortap.adapters.jax import kernel, rows
from tensortap.adapters.jax.harvest import Export, Item
from tensortap.adapters.jax.operations import GROUPS
from tensortap.adapters.jax.tag import LISTENERS, Mark
from tensortap.adapters.protocol import MOST_LOOPS, Plan, Port
from tensortap.adapters.steps import CallStepDetector
from tensortap.record.recorder import OpenStep
from tensortap.reduce import packed as words
from tensortap.select.sites import Candidate
from tensortap.types import DTYPE_CODE

MOST_BYTES: Final = 1 << 28  # of one tensor that leaves a step as it is
_NUMBERS: Final = itertools.count(1)


class _Local(threading.local):
    def __init__(self) -> None:
        self.tracing = False
        self.depth = 0
        self.known: dict[int, tuple[str, ...]] = {}
        self.root: Any = None


class Watcher:
    """What a tap wants, and what it has got. `live` ones take values as they come, others when a step has run."""

    def __init__(
        self, plan: Plan, observer: ArrayObserver, steps: CallStepDetector, *, root: type | None, live: bool, late: bool
    ) -> None:
        self.number = next(_NUMBERS)
        self.live = live
        self.open = True
        self.steps = steps
        self.observer = observer
        self.ports: dict[tuple[str, str], Port | None] = {}
        self.recorder = observer.recorder
        self.operations = [p for probe in plan.probes for p in probe.patterns if p.is_op]
        self.has_layers = False  # calls of modules were seen
        self.seen_paths: dict[str, None] = {}
        self.notes: dict[str, str] = {}
        self.given: set[str] = set()  # parameters that a step's arguments hold
        self._plan = plan
        self._root = root
        self.late = late
        self._local = _Local()
        self._pending: list[tuple[OpenStep, Sequence[Item], Sequence[Any]]] = []
        self._lock = threading.RLock()
        LISTENERS[self.number] = self

    def listening(self) -> bool:
        """Whether calls of layers are to be tagged now, in this thread."""
        return self.open and (self.live or self._local.tracing)

    def trace(self, on: bool) -> None:
        """A step is being traced, in this thread."""
        self._local.tracing = on

    def is_root(self, module: Any) -> bool:
        """Whether a call of a module may be the outermost one."""
        return type(module) is self._root

    def enter(self) -> bool:
        """A call that may be the outermost begins; True when it is."""
        self._local.depth += 1
        if self._local.depth > 1:
            self._local.depth -= 1
            return False
        if self.live:
            self.steps.begin()
        return True

    def know(self, names: Mapping[int, tuple[str, ...]], root: Any) -> None:
        """The layers of the object that is being called."""
        self._local.known, self._local.root = dict(names), root

    def leave(self) -> None:
        """The outermost call is over."""
        self._local.depth, self._local.known, self._local.root = 0, {}, None
        if self.live:
            self.steps.end()

    def names(self, module: Any) -> tuple[str, ...]:
        """The names of a layer in the object that is being called."""
        return self._local.known.get(id(module), ())

    def wants(self, path: str, port: str, types: tuple[str, ...] = (), leaf: bool = True) -> bool:
        """Whether any probe wants a port of a layer, or of a parameter."""
        key = (path, port)
        if key not in self.ports:
            self.seen_paths[path] = None
            found = self._plan.of(self.recorder, path, port)
            if found is None and self.late:
                found = self._plan.port_for_named_value(self.recorder, Candidate(path, types, (port,), leaf), port)
            self.ports[key] = found
        return self.ports[key] is not None

    def wants_name(self, name: str, port: str) -> bool:
        """Whether any probe wants a value that the user named, or its cotangent."""
        key = (name, port)
        if key not in self.ports:
            self.ports[key] = self._plan.port_for_named_value(self.recorder, Candidate(name, (), (port,)), port)
        return self.ports[key] is not None

    def wants_scope(self, path: str) -> Sequence[int]:
        """Its own number if a probe wants a name scope. Modules open scopes too: where there are any, they are it."""
        if self.has_layers:
            return ()
        self.seen_paths[path] = None
        return (self.number,) if self.wants_name(path, "output") else ()

    def wants_operation(self, path: str, name: str, number: int, port: str) -> Sequence[int]:
        """Its own number if a probe wants an operation."""
        key = (f"{path}/{name}#{number}", port)
        if key not in self.ports:
            chosen = [
                (pattern, 1 << i)
                for i, probe in enumerate(self._plan.probes)
                for pattern in probe.patterns
                if pattern.is_op and pattern.matches_op(path, name, number, port, GROUPS)
            ]
            self.ports[key] = Port(self.recorder, key[0], port, chosen, name) if chosen else None
        return (self.number,) if self.ports[key] is not None else ()

    def exports(self, value: Any, mark: Mark, looping: bool) -> str:
        """How a value is to leave a compiled step: as it is, as a row, or as a row with a histogram."""
        port = self.ports.get((mark.path, mark.port))
        if port is None:
            return ""
        small = value.size * value.dtype.itemsize * (MOST_LOOPS if looping else 1) <= MOST_BYTES
        if small and (port.point(mark.slot).keeping or isinstance(self.observer, Catcher)):
            return "raw"
        return "histogram" if port.bits & self.recorder.histogram_probes else "row"

    def hear(self, mark: Mark, value: Any) -> None:
        """The value of a live tag."""
        port = self.ports.get((mark.path, mark.port))
        if port is not None and self.open:
            with self._lock:
                self.observer.take(port.point(mark.slot), value, self.steps.current())

    def pend(self, step: OpenStep, items: Sequence[Item], arrays: Sequence[Any]) -> None:
        """What a step gave, to be taken when it closes."""
        self._pending.append((step, items, arrays))

    def settle(self, step: OpenStep | None = None) -> None:
        """Take what is pending, of one step or of all."""
        waiting, self._pending = self._pending, []
        for each in waiting:
            if step is not None and each[0] is not step:
                self._pending.append(each)
                continue
            try:
                self._settle(*each)
            except Exception as error:
                self.failed("reading a step's statistics", error)

    def _settle(self, step: OpenStep, items: Sequence[Item], arrays: Sequence[Any]) -> None:
        for item, own in kernel.unpacked(items, arrays):
            mine = [mark for mark in item.marks if mark.listener == self.number]
            if not mine:
                continue
            try:
                self._take(step, item, mine, own)
            except Exception as error:  # it takes no other with it
                self.failed(f"reading the statistics of {mine[0].path}", error)

    def _take(self, step: OpenStep, item: Item, marks: Sequence[Mark], arrays: list[Any]) -> None:
        if item.kind == "iterations":
            self._count(int(arrays[0].max()) - MOST_LOOPS)
            return
        flags = arrays.pop() if item.flagged else None
        for entry in np.ndindex(arrays[0].shape[: item.loops]) if item.loops else ((),):
            if flags is None or flags[entry]:
                for mark in marks:
                    self._record(step, item, mark, [array[entry] for array in arrays])

    def _record(self, step: OpenStep, item: Item, mark: Mark, arrays: list[Any]) -> None:
        port = self.ports[mark.path, mark.port]
        point = None if port is None else port.point(mark.slot)
        if point is None or not step.armed & point.probes:
            return
        if item.kind == "raw":
            value: Any = np.asarray(arrays[0])
        elif item.kind in kernel.WORDS:
            value = words.read(arrays[0], DTYPE_CODE[item.dtype], item.shape)
        else:
            row, offset, counts = rows.read(tuple(arrays), int(np.prod(item.shape, dtype=np.int64)))
            value = words.Reduced(row, offset, counts, DTYPE_CODE[item.dtype], item.shape)
        if item.kind != "raw" and point.keeping & step.armed:
            self.recorder.counters.add("large_tensors")
        self.observer.take(point, value, step, item.recomputed)

    def _count(self, more: int) -> None:
        if more > 0:
            self.recorder.counters.add("unseen_iterations", more)

    def failed(self, what: str, error: Exception) -> None:
        """Something of ours went wrong: it is counted and goes no further."""
        self.recorder.counters.failed("skipped_tensors", what, error)


def export(watchers: Mapping[int, Watcher]) -> Any:
    """How the harvest lets a value leave, for all who want it."""

    def choose(value: Any, marks: tuple[Mark, ...], looping: bool) -> Export:
        ways = {watchers[m.listener].exports(value, m, looping) for m in marks if m.listener in watchers}
        if "raw" in ways:
            return Export("raw", (value,))
        if rows.ON_HOST and jax.default_backend() == "cpu" and kernel.available():
            return kernel.row_of(value, "histogram" in ways)
        return Export("row", rows.row_of(value, "histogram" in ways))

    return choose
