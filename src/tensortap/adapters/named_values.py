"""Values that users name with `tt.tap(x, "name")`: given to the adapter first, recorded as memory otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from tensortap import text
from tensortap.adapters.lookup import compiled_values
from tensortap.adapters.protocol import Adapter
from tensortap.errors import ProbeError
from tensortap.portable import after_fork
from tensortap.record.recorder import Point, Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.select.sites import Candidate
from tensortap.types import Place

T = TypeVar("T")


class _Silence(threading.local):
    on = False  # in this thread


_SILENT: Final = _Silence()
_UNDECIDED: Final = Point(Place(""), -1, 0, 0, 0)


def tap(value: T, name: str) -> T:
    """Name a value inside your own code, and return it unchanged. It costs nothing while no tap is open."""
    if ACTIVE.recorders and not _SILENT.on:
        for recorder in ACTIVE.recorders:
            value = recorder.see(value, name)
    return value


@contextmanager
def silent_names() -> Iterator[None]:
    """Record no named value of this thread in the block, in which a module is run again for a search."""
    before, _SILENT.on = _SILENT.on, True
    try:
        yield
    finally:
        _SILENT.on = before


class NamedValueRecorder:
    """Record named values for one tap."""

    def __init__(self, adapter: Adapter, recorder: Recorder) -> None:
        self._adapter = adapter
        self._recorder = recorder
        self._points: dict[str, Point | None] = {}
        self._compiled = compiled_values(self.see) if adapter.names_only else None

    def see(self, value: T, name: str) -> T:
        """Record a value and return it: in a traced step, with a tag on it."""
        try:
            if not isinstance(name, str):
                raise ProbeError(
                    f"the name of a tapped value must be text, got {text.a_kind(name)}: write tap(x, 'name')"
                )
            value = self._adapter.mark(name, value)
            if self._adapter.named(name, value) or (self._compiled is not None and self._compiled(value, name)):
                return value
            point = self._points.get(name, _UNDECIDED)
            if point is _UNDECIDED:
                point = self._points[name] = self._decide(name)
            step = self._adapter.steps.current()
            if point is not None and step.armed & point.probes:
                self._recorder.observe(point, buffer_of(value), value, step=step)
        except Exception as error:
            self._recorder.counters.failed("skipped_values", f"recording {_shown(name)}", error)
        return value

    def pause(self) -> None:
        """Record nothing."""
        self._recorder.pause()

    def use_probes(self) -> None:
        """Decide again which names are wanted: the recorder has other probes now."""
        self._points = {}

    def unseen(self) -> dict[str, str]:
        """Return the patterns that no name has matched, where patterns can only mean names."""
        if not self._adapter.names_only:
            return {}
        seen = [Candidate(name, (), ("output",)) for name in self._points]
        patterns = [pattern for probe in self._recorder.probes for pattern in probe.patterns]
        return {p.text: "no value of this name" for p in patterns if not any(p.matches(c, "output") for c in seen)}

    def _decide(self, name: str) -> Point | None:
        candidate = Candidate(name, (), ("output",))
        wanted = sum(
            1 << i
            for i, probe in enumerate(self._recorder.probes)
            if any(pattern.matches(candidate, "output") for pattern in probe.patterns)
        )
        return self._recorder.point(Place(name), wanted) if wanted else None


def _shown(name: object) -> str:
    """Return a value as a warning shows it; a tensor given in place of a name is not printed."""
    return repr(name) if isinstance(name, str) else "a value"


class _Active:
    """The taps that receive named values. The tuple is replaced as a whole, so that reading it needs no lock."""

    def __init__(self) -> None:
        self.recorders: tuple[NamedValueRecorder, ...] = ()
        self._lock = threading.RLock()  # a signal handler may come in between

    def add(self, recorder: NamedValueRecorder) -> None:
        with self._lock:
            self.recorders = (*self.recorders, recorder)

    def discard(self, recorder: NamedValueRecorder) -> None:
        with self._lock:
            self.recorders = tuple(other for other in self.recorders if other is not recorder)

    def after_fork(self) -> None:
        """Record nothing in a forked child: it has the parent's taps, but neither its thread nor its files."""
        for recorder in self.recorders:
            recorder.pause()
        self.recorders = ()


ACTIVE: Final = _Active()
after_fork(ACTIVE.after_fork)
