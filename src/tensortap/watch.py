"""`watch` puts the line together, from what is seen to where it goes; `tap` names a value in your own code."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from tensortap import markup, text
from tensortap.adapters.nonfinite import NonFiniteMonitor, OnNonFinite
from tensortap.adapters.null import NullAdapter
from tensortap.adapters.protocol import (
    Adapter,
    Plan,
    adapter_for,
    check_operations,
    compiled_values,
    offered,
    part_for,
    world_now,
)
from tensortap.distributed.ranks import Ranks, World, records
from tensortap.errors import ProbeError, UnsupportedError
from tensortap.record.budget import Budget
from tensortap.record.cost import Cost
from tensortap.record.counters import Counters
from tensortap.record.global_stats import GlobalStats, Sharing, check
from tensortap.record.pending import PendingMetrics, PendingNumber
from tensortap.record.recorder import LOOKBACK_BYTES, OpenStep, Point, Recorder
from tensortap.record.sink import Sink
from tensortap.record.writer import QUEUE_BYTES, Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import Probe, as_probes, probe
from tensortap.select.sites import Candidate, Pattern
from tensortap.sinks.convert import as_sink
from tensortap.store.claim import launch_id
from tensortap.store.default_path import agreed_path, default_path
from tensortap.store.files import Files
from tensortap.store.folder import RunFolder
from tensortap.store.run import Run, open_run
from tensortap.types import Place, WhenFull

T = TypeVar("T")


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

    def __init__(
        self, recorder: Recorder, writer: Writer, folder: RunFolder | None, adapter: Adapter | None, plan: Plan,
        monitor: NonFiniteMonitor, sharing: Sharing | None = None, watched: str = "values",
    ) -> None:  # fmt: skip
        self.recorder = recorder
        self.watched = watched
        self.writer = writer
        self.path = None if folder is None else str(folder)
        self.explicit = False
        self._folder = folder
        self._adapter = adapter
        self._monitor = monitor
        self._sharing = sharing
        self._agreed: Callable[[], str | None] = lambda: None  # where other ranks write, when this one does not
        self._last = time.perf_counter()
        self._points: dict[str, Point | None] = {}
        self._closed = False
        self._compiled = compiled_values(self.see) if adapter is None else None
        if adapter is not None:
            adapter.attach(recorder, plan, self)
        if recorder.probes:
            _ACTIVE.add(self)

    def __repr__(self) -> str:
        return f"<Tap on {self.watched}: {self.summary()}>"

    def summary(self) -> str:
        """Whether it is open, its probes, the steps so far and where they go, in a line."""
        state = "closed" if self._closed else "paused" if self.recorder.paused else "open"
        counts = (len(self.recorder.probes), "probe"), (self.recorder.account.steps, "step")
        where = [str(s) if isinstance(s, RunFolder) else type(s).__name__ for s in self.writer.sinks]
        return ", ".join([state, *(text.counted(*count) for count in counts), f"to {' and '.join(where) or 'nowhere'}"])

    def _repr_html_(self) -> str:
        said = "closed" if self._closed else f"watching, step {self.recorder.current.number}"
        lost = "".join(f", {name.replace('_', ' ')} {count}" for name, count in self.counts.items())
        title = markup.line(markup.element("b", f"tap: {said}"), markup.coloured(lost, markup.WARN if lost else ""))
        cost = markup.line(f"cost: {str(self.cost).splitlines()[0]}")
        return markup.page(title, cost, *([] if self.path is None else [markup.Html(self.run._repr_html_())]))

    @property
    def run(self) -> Run:
        """What has been written so far."""
        self.path = self.path or self._agreed()
        if self.path is None:
            raise UnsupportedError("this tap writes to no run folder; give one: watch(..., to='runs/exp1')")
        return open_run(self.path)

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._closed

    @property
    def counts(self) -> dict[str, int]:
        """What was dropped, thinned, skipped or not seen so far."""
        return self.recorder.counters.counts()

    @property
    def cost(self) -> Cost:
        """What observing has cost so far, in all and by site."""
        return self.recorder.account.report(self.recorder.names)

    @property
    def global_stats(self) -> GlobalStats | None:
        """With `watch(global_stats=True)`: what all ranks together saw in the last observed step that was closed."""
        return None if self._sharing is None else self._sharing.latest

    def see(self, value: T, name: str) -> T:
        """Record a value under a name of your own, and give it back: in a traced step, with a tag on it."""
        try:
            value = getattr(self._adapter, "mark", _unmarked)(name, value)
            if self._adapter is not None and self._adapter.named(name, value):
                return value
            if self._compiled is not None and self._compiled(value, name):
                return value
            point = self._points.get(name, _UNKNOWN)
            if point is _UNKNOWN:
                point = self._points[name] = self._decide(name)
            step = self._current()
            if point is not None and step.armed & point.probes:
                self.recorder.observe(point, buffer_of(value), value, step=step)
        except Exception as error:
            self.recorder.counters.failed("skipped_values", f"recording {name!r}", error)
        return value

    def step(self, **metrics: Any) -> None:
        """Close the step. What its triggers want, given these metrics, is durable when this returns.

        From the first call on only this closes steps; before it they find themselves.
        """
        self.explicit = True
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._close_step(
            PendingMetrics(numbers) if any(isinstance(n, PendingNumber) for n in numbers.values()) else numbers
        )

    def advance(self, step: OpenStep | None = None) -> None:
        """Close the open step, or a thread's own: what adapters call when they find that one is over."""
        self._close_step({}, step)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function that is watched: `with watch(fn, "op:matmul") as tap: y = tap.call(x)`."""
        call = getattr(self._adapter, "call", None)
        if call is None:
            raise UnsupportedError("call() is for watch(function, ...): call the watched model itself")
        return call(*args, **kwargs)

    @contextlib.contextmanager
    def span(self, **labels: Any) -> Iterator[OpenStep]:
        """What the calling thread does inside is a step of its own: one request of many, served side by side."""
        step = self.recorder.open()
        step.labels = {name: str(value) for name, value in labels.items()}
        before = self._enter(step)
        try:
            yield step
        finally:
            self._enter(before)
            self._close_step({}, step)

    def _close_step(self, metrics: Mapping[str, float], step: OpenStep | None = None) -> None:
        begin = time.perf_counter()
        closing = step or self.recorder.current
        if self._adapter is not None:
            self._adapter.closing(closing)
        if self._sharing is not None and closing is self.recorder.current and not self._closed:
            self._sharing.share(closing, self.recorder.names)
        observed = closing.table.rows > 0
        origin = self._monitor.look(closing, self.recorder.names)
        for finished in self.recorder.close(metrics, step=step):
            self.writer.put(finished)
        self._arm()
        now = time.perf_counter()
        self.recorder.account.closed(now - begin, now - self._last, observed)
        self._last = now
        if origin is not None:
            self._monitor.tell(origin, closing.number)

    def _arm(self) -> None:
        if self._adapter is not None:
            self._adapter.arm()

    def _left_open(self) -> list[OpenStep]:
        return [] if self._adapter is None else self._adapter.left_open()

    def _current(self) -> OpenStep:
        return self.recorder.current if self._adapter is None else self._adapter.current()

    def _enter(self, step: OpenStep | None) -> OpenStep | None:
        if self._adapter is None:
            raise UnsupportedError("span() needs a model: tensortap.watch(model)")
        return self._adapter.enter(step)

    def pause(self) -> None:
        """Record nothing until `resume`."""
        self.recorder.pause()
        self._arm()

    def resume(self) -> None:
        """Record again, from the next step on. What went on in the pause is no step's time."""
        self.recorder.resume()
        self._last = time.perf_counter()

    def mute(self) -> None:
        """Record nothing until `unmute`; the open step waits and goes on then. For what is not part of it."""
        self.recorder.mute()
        self._arm()

    def unmute(self) -> None:
        """Go on with the open step."""
        self.recorder.unmute()
        self._arm()

    def flush(self) -> None:
        """Wait until everything recorded so far is written."""
        self.writer.flush()

    def close(self) -> None:
        """Close the open step if it saw anything, take the taps off, write everything. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _ACTIVE.discard(self)
        try:
            for step in self._left_open():
                self._close_step({}, step)
            if self.recorder.current.table.rows:
                self._close_step({})
        finally:  # a step that is not finite may raise, or a warning that is an error; the taps come off all the same
            try:
                self._report_unseen()
                if self._folder is not None:
                    self._folder.note(cost=self.cost._asdict())
            finally:
                if self._adapter is not None:
                    self._adapter.detach()
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
        """What was wanted and never seen is counted, and listed in `run.json`."""
        unseen = self._adapter.unseen() if self._adapter is not None else self._unseen_names()
        if unseen:
            self.recorder.counters.add("unseen", len(unseen))
            if self._folder is not None:
                self._folder.note(unseen=unseen)

    def _unseen_names(self) -> dict[str, str]:
        """Patterns for values that are named while running can only be judged at the end."""
        seen = [Candidate(name, (), ("output",)) for name in self._points]
        patterns = [pattern for p in self.recorder.probes for pattern in p.patterns]
        return {p.text: "no value of this name" for p in patterns if not any(p.matches(c, "output") for c in seen)}


def leaves(site: Candidate) -> bool:
    """Every module without children: what is watched when nothing else is said."""
    return site.leaf


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
    start: int = 0,
    ranks: Ranks = None,
    global_stats: bool = False,
    fast_path: Literal["keep", "leave"] = "keep",
    budget: float | None = None,
    on_nonfinite: OnNonFinite = None,
) -> Tap:
    """Observe a model, or without one the values that `tap(x, "name")` names, and write what is seen.

    Of a plain function the operations are seen that it does when it is called by `tap.call(...)`.

    `probes` are patterns or probes; none means the output of every leaf module. `to` is a path, a logger, a
    function, a sink or a list of them; none means a new folder under `runs/`. With `strict` an error of ours is
    raised instead of counted. `fast_path="leave"` looks inside layers that would run fused, whose results then
    differ by rounding. `budget=0.02` observes as many steps as keep the cost below 2 % of the step time.
    `start` is the first step's number; with `resume` it is at least the one after the run's last.
    `on_nonfinite` names the origin of a NaN or an infinity: "record" warns of it, "raise" ends the training, a
    function is called with it. Of several processes `ranks=0`, `ranks=[0, 2]` or `ranks=lambda rank, world: ...`
    chooses those that record; `global_stats=True` adds one all-reduce at the end of an observed step, whose result is
    `tap.global_stats`.
    """
    if isinstance(model, (str, Probe, Pattern)):
        model, probes = None, (model, *probes)
    if when_full not in ("block", "drop"):
        raise ProbeError(f"when_full={when_full!r} is neither 'block' nor 'drop'")
    counters = Counters(strict=strict)
    world = world_now() if rank is None else World(rank, max(world_now().size, rank + 1))
    monitor = NonFiniteMonitor(on_nonfinite, counters, f" on rank {world.rank}" if world.size > 1 else "")
    adapter = None if model is None else adapter_for(model, fast_path=fast_path, origins=on_nonfinite is not None)
    chosen = as_probes(probes) or (probe("**" if adapter is None else getattr(adapter, "default_sites", leaves)),)
    # A pattern that matches nothing raises before anything is made.
    wanted = _no_model(chosen) if adapter is None else offered(adapter, chosen)
    if global_stats:
        check(chosen, model=adapter is not None, all_ranks=ranks is None, budget=budget is not None)
    if not records(ranks, world):
        return _unrecorded_tap(NullAdapter(getattr(adapter, "function", None)), to, world, counters, monitor)
    about: dict[str, Any] = {"probes": [p.describe() for p in chosen]}
    if adapter is not None:
        about["model"] = adapter.describe()
    kind = about["model"]["class"] if adapter is not None else "values"
    sinks, folder = _sinks(to, kind, world, about, counters, resume, overwrite)
    recorder = Recorder(
        chosen, rank=world.rank, start=max(start, folder.start if resume and folder is not None else 0),
        lookback=lookback,
        lookback_bytes=lookback_bytes, counters=counters, budget=None if budget is None else Budget(budget),
    )  # fmt: skip
    writer = Writer(sinks, counters=counters, queue_bytes=queue_bytes, when_full=when_full, release=recorder.release)
    try:
        sharing = _sharing(model, chosen, wanted, world, counters) if global_stats else None
        return Tap(recorder, writer, folder, adapter, wanted, monitor, sharing, kind)
    except BaseException:
        writer.close()
        raise


def tap(value: T, name: str) -> T:
    """Name a value inside your own code, and give it back unchanged. Free when nobody watches."""
    if _ACTIVE.taps:
        for watching in _ACTIVE.taps:
            value = watching.see(value, name)
    return value


def _unmarked(name: str, value: T) -> T:
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
    to: Any, kind: str, world: World, about: Mapping[str, Any], counters: Counters, resume: bool, overwrite: bool
) -> tuple[list[Sink], RunFolder | None]:
    given: Iterable[Any] = to if isinstance(to, (list, tuple)) else [to]
    sinks: list[Sink] = []
    folder = None
    for item in given:
        if item is None or isinstance(item, (str, os.PathLike)):
            path = _default_path(kind, world) if item is None else item
            folder = RunFolder(
                path, rank=world.rank, about=about, resume=resume, overwrite=overwrite, counters=counters,
                launch=launch_id(world.size > 1), after=functools.partial(_next_step, path),
            )  # fmt: skip
            sinks.append(folder)
        else:
            sinks.append(as_sink(item))
    return sinks, folder


def _next_step(path: str | os.PathLike[str]) -> int:
    """The number after the last step that left anything: one that a crash cut short is not begun again."""
    return open_run(path).last_step + 1


_TURNS: Final = itertools.count()


def _default_path(kind: str, world: World) -> str:
    return default_path(kind, world.rank, turn=next(_TURNS), spawned=world.size > 1)


def _no_model(probes: tuple[Probe, ...]) -> Plan:
    check_operations(probes, None)
    return Plan({}, probes)


def _unrecorded_tap(adapter: NullAdapter, to: Any, world: World, counters: Counters, monitor: NonFiniteMonitor) -> Tap:
    """The tap of a rank that does not record: it works, costs nothing and writes nothing."""
    recorder = Recorder((), rank=world.rank, counters=counters)
    writer = Writer((), counters=counters, release=recorder.release)
    tap = Tap(recorder, writer, None, adapter, Plan({}), monitor, watched="nothing")
    for item in to if isinstance(to, (list, tuple)) else [to]:
        if isinstance(item, (str, os.PathLike)):
            tap.path = str(Files(item))
        elif item is None:
            tap._agreed = functools.partial(agreed_path, turn=next(_TURNS), spawned=world.size > 1)
    return tap


def _sharing(model: Any, probes: tuple[Probe, ...], plan: Plan, world: World, counters: Counters) -> Sharing | None:
    if world.size == 1:
        return Sharing(probes, plan.ports, world, lambda packed: packed, counters)
    return Sharing(probes, plan.ports, world, part_for(model, "world").summed, counters)


def _number(name: str, value: Any) -> Any:
    """The number in a metric; one on a device is not waited for."""
    try:
        if hasattr(value, "is_cpu"):
            return part_for(value, "metrics").number(value)
        return float(value)
    except (TypeError, ValueError, UnsupportedError) as error:
        raise ProbeError(f"the metric {name}={value!r} is no number ({error}); write step({name}=float(...))") from None


def _after_fork() -> None:
    """A forked child has the parent's taps but neither its thread nor its files: it records nothing."""
    for watching in _ACTIVE.taps:
        watching.recorder.pause()
    _ACTIVE.taps = ()


os.register_at_fork(after_in_child=_after_fork)
