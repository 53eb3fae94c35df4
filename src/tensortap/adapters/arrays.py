"""Record, copy and capture values that are NumPy arrays: helpers for the adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.adapters.nested import values_in
from tensortap.adapters.plan import Plan, Port
from tensortap.adapters.protocol import Adapter
from tensortap.adapters.results import Captured
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.graph_rows import Reduced
from tensortap.select.sites import Candidate

Array = npt.NDArray[Any]
NO_ARRAY_OUT: Final = "returned no array"
NO_ARRAY_IN: Final = "was given no array"
NEVER: Final = "never ran in a step that was observed"
NO_VALUE: Final = "no value of this name was tapped"
# The length of a compiled loop is not known beforehand: this many iterations are kept, the others are counted.
MOST_LOOPS: Final = 64
_NO_NUMBERS: Final = frozenset("OSUTMm")


class _Kind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        if isinstance(value, (np.ndarray, np.generic)):
            return value.dtype.kind not in _NO_NUMBERS
        return _is_sparse(value) or _is_frame(value)


class Arrays(metaclass=_Kind):
    """What counts as an array: NumPy arrays and scalars, SciPy's sparse matrices, tables of numbers."""


def arrays_in(value: Any) -> list[tuple[str, Array]]:
    """Return every array in a nested value, with its slot. A sparse matrix is taken by its values.

    >>> arrays_in({"a": (np.zeros(2), "text")})
    [('.a[0]', array([0., 0.]))]
    """
    if type(value) is np.ndarray and value.dtype.kind not in _NO_NUMBERS:
        return [("", value)]
    return [(slot, as_array(found)) for slot, found in values_in(value, Arrays)]


def as_array(value: Any) -> Array:
    """Return one of `Arrays` as an array."""
    if _is_sparse(value):
        return value.data  # type: ignore[no-any-return]
    return np.asarray(value)


def _is_sparse(value: Any) -> bool:
    return hasattr(value, "nnz") and isinstance(getattr(value, "data", None), np.ndarray)


def _is_frame(value: Any) -> bool:
    """Return whether it is a table or column of pandas whose numbers all have one type."""
    return hasattr(value, "to_numpy") and hasattr(value, "iloc") and np.asarray(value).dtype.kind not in _NO_NUMBERS


class ArrayObserver:
    """Record arrays. Errors are counted and do not reach the user."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def take(self, point: Point, array: Array | Reduced, step: OpenStep, recomputed: bool = False) -> None:
        """Reduce an array into the step's table, or add a row that a graph has computed."""
        armed = step.armed & point.probes
        if not armed:
            return
        try:
            if isinstance(array, Reduced):
                counts = array.hist_counts if armed & step.hist else None
                place = (point.key, armed, recomputed, array.dtype, array.shape)
                row = step.table.insert(*place, array.row, array.hist_offset if counts is not None else 0, counts)
                if row < 0:  # another thread closed the step meanwhile
                    self.recorder.counters.add("late_records")
            else:
                self.recorder.observe(point, buffer_of(array), array, step=step, recomputed=recomputed)
        except Exception as error:
            self.recorder.counters.failed("skipped_tensors", f"recording {point.text}", error)

    def take_at_step_end(self, port: Port, read: Callable[[], Any], step: OpenStep) -> None:
        """Record values that can only be read when the step closes."""
        try:
            value = read()
        except Exception as error:
            self.recorder.counters.failed("skipped_tensors", f"reading {port.path}", error)
        else:
            self.take(port.point(""), value, step)

    def take_all(
        self, ports: Iterable[Port], found: Sequence[tuple[str, Array | Reduced]], step: OpenStep, why: str
    ) -> None:
        """Record an array under every name that its layer has."""
        for port in ports:
            if not found:
                port.note = port.note or why
            for slot, array in found:
                self.take(port.points.get(slot) or port.point(slot), array, step)


class ArrayCatcher(ArrayObserver):
    """Keep copies instead of reducing."""

    def __init__(self, recorder: Recorder, found: Captured) -> None:
        super().__init__(recorder)
        self.found = found

    def take(self, point: Point, array: Array | Reduced, step: OpenStep, recomputed: bool = False) -> None:
        """Copy an array under its site's name. One too large to leave its graph has only a row."""
        if isinstance(array, Reduced):
            self.recorder.counters.add("large_tensors")
        elif point.probes and not recomputed:
            self.found.put(point.text, np.array(array, copy=True))


class ArrayAdapter(Adapter):
    """An adapter that can be given its observer."""

    def attach(self, recorder: Recorder, plan: Plan, observer: ArrayObserver | None = None) -> None:
        """Put the taps on."""
        raise NotImplementedError


class NamedArrays:
    """Values that the user names with `tensortap.tap(x, "my/value")` while a model is watched."""

    def __init__(self, observer: ArrayObserver, plan: Plan) -> None:
        self._observer = observer
        self._plan = plan
        self._known: dict[str, Port | None] = {}

    def see(self, name: str, value: Any, step: OpenStep) -> bool:
        """Record the arrays in a value. False when there is none."""
        if name not in self._known:
            candidate = Candidate(name, (), ("output",))
            self._known[name] = self._plan.port_for_named_value(self._observer.recorder, candidate, "output")
        port, found = self._known[name], arrays_in(value)
        if port is not None and step.armed & port.bits:
            self._observer.take_all([port], found, step, NO_ARRAY_OUT)
        return bool(found)

    def unseen(self) -> Iterator[str]:
        """Return the patterns that can only match named values and matched none, each with the reason."""
        return (pattern.text for pattern in self._plan.waiting(self._known, ("output",)))


def unseen(ports: Iterable[Port], names: NamedArrays) -> dict[str, str]:
    """Return what was wanted and never seen, each with the reason."""
    found = {f"{port.path}:{port.port}": port.note or NEVER for port in ports if not port.seen}
    return found | dict.fromkeys(names.unseen(), NO_VALUE)


def same(a: Array, b: Array) -> bool:
    """Return whether two values are the same bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
