"""An instrumented copy of a session, which outputs the wanted tensors besides the user's outputs, for one tap."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensortap.adapters.arrays import NO_ARRAY_IN, NO_ARRAY_OUT, Array, ArrayCatcher, ArrayObserver, arrays_in, same
from tensortap.adapters.onnx.graph import OnnxGraph, row_of
from tensortap.adapters.plan import Port, bits_of
from tensortap.adapters.steps import CallStepDetector
from tensortap.errors import NonFiniteError, UnsupportedError
from tensortap.reduce import graph_rows

INEXACT: Final = (
    "this session and its copy with more outputs need not give equal bits (an operation draws random numbers, or an "
    "optimisation was not repeated): an observed step runs both; you get the session's outputs, the records are of the "
    "copy"
)
_READABLE: Final = frozenset(
    f"tensor({kind})"
    for kind in ("float", "double", "float16", "bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))
)


class OnnxSite(NamedTuple):
    """One tensor of the graph: the ports that want its node's inputs and the tensor itself."""

    given: tuple[str, ...]
    gives: str
    inputs: list[Port]
    outputs: list[Port]


class InstrumentedRun(NamedTuple):
    """The result of a run of the copy: the user's outputs, all tensors by name, and rows by name; or the error."""

    outputs: list[Any]
    tensors: dict[str, Any]
    rows: dict[str, Any]
    error: Exception | None = None


class InstrumentedSession:
    """The copy that runs instead of the session in observed steps. It is built in the first one."""

    def __init__(
        self,
        graph: OnnxGraph,
        observer: ArrayObserver,
        steps: CallStepDetector,
        sites: Sequence[OnnxSite],
        root: OnnxSite,
    ) -> None:
        self.counters = observer.recorder.counters
        self._graph = graph
        self._observer = observer
        self._steps = steps
        self._sites = sites
        self._root = root
        self._bits = bits_of(port for site in (*sites, root) for port in (*site.inputs, *site.outputs))
        recorder = observer.recorder
        self._histograms, self._hashes = recorder.histogram_probes, recorder.hash_probes
        self._elements = -1 if isinstance(observer, ArrayCatcher) else recorder.elements.probes
        self._session: Any = None
        self._names: list[str] = []  # of the tensors that it gives as they are
        self._rows: dict[str, bool] = {}  # and of those that it reduces itself, to a row with or without histogram
        self._exact: bool | None = None  # not known before the first run

    def begin(self) -> None:
        """Begin a step."""
        self._safely("step_errors", "beginning a step", self._steps.begin)

    def end(self) -> None:
        """End the run."""
        self._safely("step_errors", "ending a step", self._steps.end)

    def observe(self, names: Sequence[str], feed: Mapping[str, Any], options: Any) -> InstrumentedRun | None:
        """Run the copy, if a probe may want the step."""
        if not self._steps.current().armed & self._bits:
            return None
        try:
            session = self._session or self._build()
            wanted = [*names, *(name for name in self._names if name not in names)]
            values = session.run([*wanted, *map(row_of, self._rows)], dict(feed), options)
        except Exception as error:
            return InstrumentedRun([], {}, {}, error)  # the user's own, when the session fails too
        tensors = {**feed, **dict(zip(wanted, values, strict=False))}
        return InstrumentedRun(values[: len(names)], tensors, dict(zip(self._rows, values[len(wanted) :], strict=True)))

    def trusted(self, found: InstrumentedRun) -> list[Any] | None:
        """Return the copy's outputs, after a run has shown that they equal the session's."""
        return found.outputs if self._exact and found.error is None else None

    def record(self, found: InstrumentedRun, outputs: Sequence[Any]) -> None:
        """Compare the copy with the session the first time, and record the tensors."""
        if found.error is not None:  # the copy failed and the session did not
            self.counters.failed("skipped_tensors", "running the session with more outputs", found.error)
            return
        if self._exact is None:
            self._exact = not self._graph.random and all(map(_same, found.outputs, outputs))
            if not self._exact:
                self.counters.warn("inexact", INEXACT)
        self._safely("skipped_tensors", "recording a run", lambda: self._record(found, outputs))

    def _record(self, found: InstrumentedRun, outputs: Sequence[Any]) -> None:
        step, tensors = self._steps.current(), found.tensors
        seen = tensors | {name: self._read(name, row) for name, row in found.rows.items()}
        self._observer.take_all(self._root.inputs, _named(self._root.given, tensors), step, NO_ARRAY_IN)
        for site in self._sites:
            self._observer.take_all(site.inputs, _named(site.given, seen), step, NO_ARRAY_IN)
            self._observer.take_all(site.outputs, _arrays(seen.get(site.gives)), step, NO_ARRAY_OUT)
        names = [name for name in self._root.gives.split("\n") if name in tensors]
        self._observer.take_all(self._root.outputs, _named(names, tensors), step, NO_ARRAY_OUT)

    def _read(self, name: str, row: Any) -> graph_rows.Reduced | None:
        """Read a row. The others are recorded nevertheless if one cannot be read."""
        try:
            return graph_rows.read_all(row)
        except Exception as error:
            self.counters.failed("skipped_tensors", f"reading the row of {name}", error)
            return None

    def _build(self) -> Any:
        """Build the copy; one that reduces tensors as they are made, where no probe keeps their elements."""
        wanted = self._probes_by_tensor()
        made = {name: wanted[name] for node in self._graph.nodes for name in node.gives if name in wanted}
        rows = {name: bool(bits & self._histograms) for name, bits in made.items() if not bits & self._elements}
        if rows and self._graph.can_reduce:
            with contextlib.suppress(UnsupportedError):  # something there is not a tensor
                hashed = [name for name in rows if made[name] & self._hashes]
                others = [name for name in made if name not in rows]
                self._session = self._graph.instrumented_session(others, rows, hashed)
                self._rows = rows
        if self._session is None:
            self._session = self._graph.instrumented_session([*made])
        self._choose_readable([name for name in made if name not in self._rows])
        return self._session

    def _probes_by_tensor(self) -> dict[str, int]:
        """Return the probes that want each tensor, in any port."""
        wanted: dict[str, int] = {}
        for site in self._sites:
            for names, ports in ((site.given, site.inputs), ((site.gives,), site.outputs)):
                for name, port in itertools.product(names, ports):
                    wanted[name] = wanted.get(name, 0) | port.bits
        return wanted

    def _choose_readable(self, names: Sequence[str]) -> None:
        """Choose those whole tensors that Python can read."""
        kinds = {output.name: output.type for output in self._session.get_outputs()}
        self._names = [name for name in names if kinds[name] in _READABLE or not kinds[name].startswith("tensor(")]
        for site in self._sites:
            if site.gives in names and site.gives not in self._names:
                for port in site.outputs:
                    port.note = f"is a {kinds[site.gives]}, which cannot be read from Python"

    def _safely(self, name: str, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except NonFiniteError:  # the user asked for it
            raise
        except Exception as error:
            self.counters.failed(name, what, error)


def _arrays(value: Any) -> Sequence[tuple[str, Array | graph_rows.Reduced]]:
    return [("", value)] if isinstance(value, graph_rows.Reduced) else arrays_in(value)


def _named(names: Sequence[str], tensors: Mapping[str, Any]) -> Sequence[tuple[str, Array | graph_rows.Reduced]]:
    """Return tensors with their names as slots; a single one needs none."""
    found = [(f".{name}{slot}", array) for name in names for slot, array in _arrays(tensors.get(name))]
    return [("", found[0][1])] if len(found) == 1 else found


def _same(a: Any, b: Any) -> bool:
    one, other = arrays_in(a), arrays_in(b)
    return len(one) == len(other) and all(same(x, y) for (_, x), (_, y) in zip(one, other, strict=True))
