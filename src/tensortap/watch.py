"""`watch` puts the line together, from what is seen to where it goes; `tap` names a value in your own code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from tensortap.errors import ProbeError, UnsupportedError
from tensortap.ledger import Ledger
from tensortap.probes import Probe, as_probes, probe
from tensortap.recorder import LOOKBACK_BYTES, Point, Recorder
from tensortap.reduce.buffers import buffer_of
from tensortap.sinks.convert import as_sink
from tensortap.sites import Candidate, Pattern
from tensortap.store.folder import RunFolder
from tensortap.store.place import default_path
from tensortap.store.run import Run, open_run
from tensortap.types import Place, WhenFull
from tensortap.writer import QUEUE_BYTES, Sink, Writer

T = TypeVar("T")
_RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class Tap:
    """A running observation. Leave the `with` block, or call `close`, and it is gone without a trace.

    >>> import numpy as np, tensortap as tt
    >>> memory = tt.Memory()
    >>> with tt.watch(to=memory) as watching:
    ...     for loss in (0.5, 0.4):
    ...         _ = tt.tap(np.ones(3), "my/value")
    ...         watching.step(loss=loss)
    >>> [(record.step, record["mean"]) for record in memory.records]
    [(0, 1.0), (1, 1.0)]
    """

    def __init__(self, recorder: Recorder, writer: Writer, folder: RunFolder | None) -> None:
        self.recorder = recorder
        self.writer = writer
        self.path = None if folder is None else str(folder)
        self._points: dict[str, Point | None] = {}
        self._closed = False
        _ACTIVE.add(self)

    @property
    def run(self) -> Run:
        """What has been written so far."""
        if self.path is None:
            raise UnsupportedError("this tap writes to no run folder; give one: watch(..., to='runs/exp1')")
        return open_run(self.path)

    @property
    def counts(self) -> dict[str, int]:
        """What was dropped, thinned, skipped or not seen so far."""
        return self.recorder.ledger.counts()

    def see(self, value: Any, name: str) -> None:
        """Record a value under a name of your own."""
        point = self._points.get(name, _UNKNOWN)
        if point is _UNKNOWN:
            point = self._points[name] = self._decide(name)
        if point is None or not self.recorder.current.armed & point.probes:
            return
        try:
            self.recorder.observe(point, buffer_of(value), value)
        except Exception as error:
            self.recorder.ledger.failed("skipped_values", f"recording {name!r}", error)

    def step(self, **metrics: Any) -> None:
        """Close the step. What its triggers want, given these metrics, is durable when this returns."""
        for step in self.recorder.close({name: _number(name, value) for name, value in metrics.items()}):
            self.writer.put(step)

    def pause(self) -> None:
        """Record nothing until `resume`."""
        self.recorder.pause()

    def resume(self) -> None:
        """Record again, from the next step on."""
        self.recorder.resume()

    def flush(self) -> None:
        """Wait until everything recorded so far is written."""
        self.writer.flush()

    def close(self) -> None:
        """Close the open step if it saw anything, write everything, and stop. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _ACTIVE.discard(self)
        self._report_unseen()
        if self.recorder.current.table.rows:
            self.step()
        self.writer.close()

    def __enter__(self) -> Tap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decide(self, name: str) -> Point | None:
        candidate = Candidate(name, (), ("output",))
        wanted = sum(
            1 << i
            for i, p in enumerate(self.recorder.probes)
            if any(pattern.matches(candidate, "output") for pattern in p.patterns)
        )
        return self.recorder.point(Place(name), wanted) if wanted else None

    def _report_unseen(self) -> None:
        """Patterns for values that are named while running can only be judged at the end."""
        seen = [Candidate(name, (), ("output",)) for name in self._points]
        for p in self.recorder.probes:
            for pattern in p.patterns:
                if not any(pattern.matches(candidate, "output") for candidate in seen):
                    self.recorder.ledger.add("unseen_patterns")


def watch(
    model: Any = None,
    *probes: Probe | str | Pattern | Callable[[Candidate], bool],
    to: Any = None,
    lookback: int = 0,
    lookback_bytes: int = LOOKBACK_BYTES,
    queue_bytes: int = QUEUE_BYTES,
    when_full: WhenFull = "block",
    strict: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    rank: int | None = None,
) -> Tap:
    """Observe a model, or without one the values that `tap(x, "name")` names, and write what is seen.

    `probes` are patterns or probes; none means everything. `to` is a path, a logger, a function, a sink or a list
    of them; none means a new folder under `runs/`. With `strict` an error of ours is raised instead of counted.
    """
    if isinstance(model, (str, Probe, Pattern)):
        model, probes = None, (model, *probes)
    if model is not None:
        raise UnsupportedError(
            f"a {type(model).__name__} cannot be watched yet: no adapter knows it. Name values instead: "
            'with tensortap.watch(): tensortap.tap(x, "name")'
        )
    if when_full not in ("block", "drop"):
        raise ProbeError(f"when_full={when_full!r} is neither 'block' nor 'drop'")
    ledger = Ledger(strict=strict)
    chosen = as_probes(probes) or (probe("**"),)
    own_rank = _rank() if rank is None else rank
    sinks, folder = _sinks(to, chosen, own_rank, ledger, resume, overwrite)
    recorder = Recorder(
        chosen, rank=own_rank, start=_next_step(folder) if resume else 0, lookback=lookback,
        lookback_bytes=lookback_bytes, ledger=ledger,
    )  # fmt: skip
    writer = Writer(sinks, ledger=ledger, queue_bytes=queue_bytes, when_full=when_full, release=recorder.release)
    return Tap(recorder, writer, folder)


def tap(value: T, name: str) -> T:
    """Name a value inside your own code, and give it back unchanged. Free when nobody watches."""
    if _ACTIVE.taps:
        for watching in _ACTIVE.taps:
            watching.see(value, name)
    return value


class _Active:
    """The taps that named values go to. A tuple that is replaced, so that reading it needs no lock."""

    def __init__(self) -> None:
        self.taps: tuple[Tap, ...] = ()
        self._lock = threading.Lock()

    def add(self, watching: Tap) -> None:
        with self._lock:
            self.taps = (*self.taps, watching)

    def discard(self, watching: Tap) -> None:
        with self._lock:
            self.taps = tuple(t for t in self.taps if t is not watching)


_ACTIVE = _Active()
_UNKNOWN: Final = Point(Place(""), -1, 0, 0)


def _sinks(
    to: Any, probes: Sequence[Probe], rank: int, ledger: Ledger, resume: bool, overwrite: bool
) -> tuple[list[Sink], RunFolder | None]:
    given: Iterable[Any] = to if isinstance(to, (list, tuple)) else [to]
    about = {"probes": [p.describe() for p in probes]}
    sinks: list[Sink] = []
    folder = None
    for item in given:
        if item is None or isinstance(item, (str, os.PathLike)):
            path = default_path("values", rank) if item is None else item
            folder = RunFolder(path, rank=rank, about=about, resume=resume, overwrite=overwrite, ledger=ledger)
            sinks.append(folder)
        else:
            sinks.append(as_sink(item))
    return sinks, folder


def _rank() -> int:
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def _next_step(folder: RunFolder | None) -> int:
    steps = open_run(str(folder)).steps if folder is not None else []
    return steps[-1] + 1 if steps else 0


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ProbeError(f"the metric {name}={value!r} is no number ({error}); write step({name}=float(...))") from None
