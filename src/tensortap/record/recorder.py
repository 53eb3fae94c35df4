"""The recorder: opens a step, takes rows, and at its end decides what is kept, held for look-back, or dropped."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.errors import TensortapError
from tensortap.record.budget import Budget
from tensortap.record.cost import Account
from tensortap.record.counters import Counters
from tensortap.record.lookback import LookBack, Split, split
from tensortap.record.pending import HostCopy
from tensortap.record.step import Step, summary_of
from tensortap.record.table import Kept, Names, StepTable, Value
from tensortap.reduce.buffers import array_of, buffer_of
from tensortap.reduce.reducers import Keeper
from tensortap.select.probes import Probe
from tensortap.select.triggers import Answer
from tensortap.types import Buffer, Place, StepOutcome

LOOKBACK_BYTES: Final = 256 << 20
_SPARE_TABLES: Final = 4
_SMALL_ARRAY: Final = 4096
_METRIC_PATIENCE: Final = 100  # steps without a metric that a trigger reads before that is said
_NO_ROWS: Final = StepTable(1)
_NOTHING_SEEN: Final = StepOutcome({}, 0)


class Point:
    """One place as an adapter holds it: its number and the probes that want it, decided once."""

    __slots__ = ("keeping", "key", "place", "probes", "text")

    def __init__(self, place: Place, key: int, probes: int, keeping: int) -> None:
        self.place = place
        self.key = key
        self.probes = probes
        self.keeping = keeping
        self.text = str(place)


class OpenStep:
    """A step being recorded. `armed` is the set of probes, as bits, that may want this step: 0 costs nothing."""

    __slots__ = (
        "armed", "calls", "closed", "hist", "idle", "labels", "maybe", "metrics", "number", "origin", "phase", "table",
    )  # fmt: skip

    def __init__(self, table: StepTable, number: int, armed: int, maybe: int, hist: int) -> None:
        self.table = table
        self.begin(number, armed, maybe, hist)
        self.origin: Any = None  # where its first non-finite value was born, if somebody looked
        self.phase = ""
        self.labels: Mapping[str, str] = {}
        self.closed = False
        self.calls: dict[Any, Any] = {}  # an adapter's count of calls, by whatever it counts

    def begin(self, number: int, armed: int, maybe: int, hist: int) -> None:
        """Be this step; after one that nobody wanted, the next, with nothing to be put away."""
        self.number = number
        self.armed = armed
        self.maybe = maybe
        self.hist = hist  # the probes that want histograms, unless the budget thins them
        self.idle = armed == 0
        self.metrics: dict[str, float] = {}  # what the adapter found; the user's own go before it


class Recorder:
    """Takes what adapters see, step by step, and emits what is to be written.

    `current` is the open step. Several may be open at once (one per request in a server): `open()` gives another.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        *,
        rank: int = 0,
        start: int = 0,
        lookback: int = 0,
        lookback_bytes: int = LOOKBACK_BYTES,
        counters: Counters | None = None,
        clock: Callable[[], float] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.probes = tuple(probes)
        self.account = Account(budget)
        self.rank = rank
        self.names = Names()
        self.counters = counters or Counters()
        self.paused = False
        self._muted: int | None = None  # what was armed before
        self._clock = clock
        self._numbers = itertools.count(start)
        self._points: dict[tuple[Place, int], Point] = {}
        self._all_probes = (1 << len(self.probes)) - 1
        self.histogram_probes = _bits(p.histogram for p in self.probes)
        plans = [(1 << i, p.keepers, p.customs) for i, p in enumerate(self.probes)]
        self._keeping_plans = [plan for plan in plans if plan[1] or plan[2]]
        self.keeping_probes = sum(bit for bit, _, _ in self._keeping_plans)
        self._quantiles = [(1 << i, p.quantiles) for i, p in enumerate(self.probes) if p.quantiles]
        self._ring = LookBack(lookback, lookback_bytes, self.counters)
        self._spare: deque[StepTable] = deque(maxlen=_SPARE_TABLES)
        self._closed_steps = 0
        self._metrics_seen: set[str] = set()
        self._metrics_read = {name for p in self.probes for name in p.when.metrics()}
        self._lock = threading.RLock()
        self.current = self.open()
        _RECORDERS.add(self)

    def point(self, place: Place, probes: int) -> Point:
        """The handle of a place for the probes (as bits) that matched it; the same one every time."""
        with self._lock:
            known = self._points.get((place, probes))
            if known is None:
                known = Point(place, self.names.key(place), probes, probes & self.keeping_probes)
                self._points[place, probes] = known
            return known

    def open(self) -> OpenStep:
        """Begin a step: ask every trigger before any data is touched. While muted, nobody wants it."""
        step = self._open()
        if self.muted:
            step.armed = 0
        return step

    def _open(self) -> OpenStep:
        with self._lock:
            table = self._spare.pop() if self._spare else StepTable()
            table.reset(int(self._clock() * 1e6) if self._clock else 0)
            return OpenStep(table, *self._foresee_all())

    def _foresee_all(self) -> tuple[int, int, int, int]:
        """The next step's number, and the probes that may want it, that cannot say yet, that take histograms."""
        number = next(self._numbers)
        armed = maybe = 0
        for i, probe in enumerate(self.probes):
            answer = self._foresee(probe, number)
            armed |= (answer is not Answer.NO) << i
            maybe |= (answer is Answer.MAYBE) << i
        armed, hist = self._afford(0 if self.paused else armed, maybe)
        return number, armed, maybe, hist

    def _afford(self, armed: int, maybe: int) -> tuple[int, int]:
        """What of the armed probes the budget allows, and which may take histograms. Triggers are never thinned."""
        budget, hist = self.account.budget, self.histogram_probes
        if budget is None or not armed & ~maybe:
            return armed, hist
        if not budget.allows():
            self.counters.add("thinned_steps")
            return armed & maybe, hist
        if hist & armed & ~maybe and not budget.histograms():
            self.counters.add("thinned_histograms")
            hist &= maybe
        return armed, hist

    def observe(
        self, point: Point, buffer: Buffer, value: Any = None, *, recomputed: bool = False, step: OpenStep | None = None
    ) -> int:
        """Record one tensor at a place; the row's number in its step, or −1 when no probe wants this step."""
        step = step or self.current
        armed = step.armed & point.probes
        if not armed:
            return -1
        table = step.table
        epoch = table.epoch
        address, dtype, shape, strides, _ = buffer
        want = 1 if armed & step.hist else 0
        row = table._append(point.key, armed, want, recomputed, dtype, address, shape, strides)
        if row < 0:
            row = table.record(point.key, armed, want, recomputed, dtype, address, shape, strides)
        if row < 0:  # another thread closed the step meanwhile
            self.counters.add("late_records")
        elif armed & point.keeping and table.epoch == epoch:
            self.keep(table, row, point, armed, buffer, value)
        return row

    def keep(self, table: StepTable, row: int, point: Point, armed: int, buffer: Buffer, value: Any) -> None:
        """Copy out of a recorded tensor what the armed probes' reducers want of its elements."""
        self.keep_by(
            table, row, point, armed,
            lambda keeper: keeper.pick(array_of(buffer), point.text),
            lambda function: function(array_of(buffer) if value is None else value),
        )  # fmt: skip

    def keep_by(
        self,
        table: StepTable,
        row: int,
        point: Point,
        armed: int,
        pick: Callable[[Keeper], npt.NDArray[Any] | None],
        ask: Callable[[Callable[[Any], Any]], Any],
    ) -> None:
        """As `keep`, where the adapter picks elements and calls the user's functions itself."""
        if row < 0:
            return
        tensors, values = table.tensors, table.values  # of this step, even if the table is used again meanwhile
        for bit, keepers, customs in self._keeping_plans:
            if not armed & bit:
                continue
            for keeper in keepers:
                try:
                    picked = pick(keeper)
                except Exception as error:
                    self.counters.failed("reducer_errors", f"{keeper} at {point.text}", error)
                    continue
                if picked is None:
                    self.counters.add("rows_absent")
                else:
                    tensors.append(Kept(row, keeper.kind, picked, bit))
            for custom in customs:
                try:
                    kept = _result(custom.name, ask(custom.function))
                except Exception as error:
                    self.counters.failed("reducer_errors", f"{custom.name}() at {point.text}", error)
                    continue
                if isinstance(kept, dict):
                    values.extend(Value(row, name, number, bit) for name, number in kept.items())
                else:
                    tensors.append(Kept(row, custom.name, kept, bit))

    def restart(self, step: OpenStep) -> None:
        """Forget what an open step has seen so far: it was not what the step is about."""
        with self._lock:
            step.table.reset(int(self._clock() * 1e6) if self._clock else 0)
            step.origin = None
            step.calls.clear()

    @property
    def looks_back(self) -> bool:
        """Whether steps that nobody wants yet are kept for a while."""
        return self._ring.steps > 0

    def pause(self) -> None:
        """Record nothing until `resume`."""
        self.paused = True
        self.current.armed = 0

    def resume(self) -> None:
        """Record again, from the next step on."""
        self.paused = False

    @property
    def muted(self) -> bool:
        """Whether what comes belongs to no step."""
        return self._muted is not None

    def mute(self) -> None:
        """Record nothing until `unmute`, and leave the open step as it is."""
        if self._muted is None:
            self._hold()

    def _hold(self) -> None:
        self._muted, self.current.armed = self.current.armed, 0

    def unmute(self) -> None:
        """Go on with the step that was open."""
        if self._muted is not None:
            self.current.armed, self._muted = 0 if self.paused else self._muted, None

    def close(
        self, metrics: Mapping[str, float] | None = None, *, phase: str = "", step: OpenStep | None = None
    ) -> list[Step]:
        """End a step: what is to be written now, oldest first. Without `step` the current one, and a new one opens."""
        with self._lock:
            closing = step or self.current
            if closing.closed:
                return []
            if closing.metrics:
                metrics = {**closing.metrics, **(metrics or {})}
            if closing.idle and closing is self.current and not metrics and not closing.labels and not self._ring.steps:
                self._ask(closing.number, _NOTHING_SEEN)
                closing.begin(*self._foresee_all())
                if self.muted:
                    self._hold()
                return []
            closing.armed, closing.closed = 0, True
            closing.table.close()
            self.account.take(closing.table)
            closing.table.start_copies()
            seen = _seen(metrics or {}, closing.table)
            steps = self._decide(closing, seen, phase or closing.phase)
            if closing is self.current:
                self.current = self._open()
                if self.muted:
                    self._hold()
            return steps

    def release(self, step: Step) -> None:
        """Take back the memory of a step that every sink has written."""
        if step.table is not _NO_ROWS:
            self._spare.append(step.table)

    def _decide(self, closing: OpenStep, seen: StepOutcome, phase: str) -> list[Step]:
        reasons = self._ask(closing.number, seen)
        self._check_metrics(seen)
        fired = sum(1 << i for i in reasons)
        late = fired & closing.maybe
        self._spare.extend(self._ring.expire(closing.number))
        earlier = list(self._ring.release(late)) if late else []
        waiting = closing.maybe & ~fired if self._ring.steps else 0
        step = Step(
            closing.number, phase, self.rank, self._now(), seen.metrics, closing.table, self.names,
            labels=closing.labels,
        )  # fmt: skip
        if fired == self._all_probes and closing.table.rows:
            part = Split(closing.table, None, None)
        else:
            part = split(closing.table, fired, waiting)
        for rest, written in ((part.held, False), (part.pending, True)):
            if rest is not None:
                # Its metrics are written now, whatever becomes of its rows.
                self._ring.hold(replace(step, table=rest, tensors_only=written, metrics={}, labels={}), waiting)
        if closing.table not in part:
            self._spare.append(closing.table)
        for old, others in earlier:
            self._finish(old, late, others, reasons, "lookback: ")
        now = step if part.kept is step.table else replace(step, table=part.kept or _NO_ROWS)
        self._finish(now, fired, waiting, reasons)
        return [*(old for old, _ in earlier), now]

    def _finish(self, step: Step, fired: int, waiting: int, reasons: Mapping[int, str], prefix: str = "") -> None:
        """Fill in what is known only now: the step's number and phase, the words, why each row is kept."""
        table = step.table
        if not table.rows:
            return
        table.columns["step"][: table.rows] = step.number
        probes = table.column("probes")
        words = (table.column("key").tobytes(), probes.tobytes(), fired, step.phase, prefix, tuple(reasons.items()))
        if table.filled != words:  # mostly these are the words of the step that used this table before
            table.filled = words
            rows = slice(table.rows)
            table.columns["phase"][rows] = self.names.phase(step.phase)
            self.names.fill(table)
            table.columns["reason"][rows] = self._reasons(probes & np.uint64(fired), reasons, prefix)
        table.tensors = [kept for kept in table.tensors if kept.probe & fired]
        # A row is written once, so the numbers go with it that only a later trigger may want.
        table.values = [value for value in table.values if value.probe & (fired | waiting)]
        if table.pending:
            table.when_copied.append(functools.partial(self._add_quantiles, table, fired))
        else:
            self._add_quantiles(table, fired)

    def _reasons(self, probes: npt.NDArray[Any], reasons: Mapping[int, str], prefix: str) -> npt.NDArray[Any] | int:
        """The number of each row's reason, or the one that they share."""
        alike = bool((probes == probes[0]).all())
        masks, which = ([probes[0]], 0) if alike else np.unique(probes, return_inverse=True)
        texts = ["; ".join(dict.fromkeys(r for i, r in reasons.items() if int(mask) >> i & 1)) for mask in masks]
        numbers = np.array([self.names.reason(prefix + text) for text in texts], np.int32)
        return numbers[which]

    def _add_quantiles(self, table: StepTable, fired: int) -> None:
        for bit, wanted in self._quantiles:
            if not bit & fired:
                continue
            for row in np.flatnonzero(table.column("probes") & np.uint64(bit)).tolist():
                summary = summary_of(table, row)
                table.values.extend(Value(row, f"q{q:g}", summary.quantile(q), bit) for q in wanted)

    def _foresee(self, probe: Probe, number: int) -> Answer:
        try:
            return probe.when.before(number)
        except Exception as error:
            self.counters.failed("trigger_errors", f"trigger {probe.when}", error)
            return Answer.MAYBE

    def _ask(self, number: int, seen: StepOutcome) -> dict[int, str]:
        """The probes that want the step, with their reasons. Every trigger is asked, for it may keep history."""
        reasons = {}
        for i, probe in enumerate(self.probes):
            try:
                reason = probe.when.after(number, seen)
            except Exception as error:
                self.counters.failed("trigger_errors", f"trigger {probe.when}", error)
                continue
            if reason is not None:
                reasons[i] = reason
        return reasons

    def _now(self) -> int:
        return int((self._clock or time.time)() * 1e6)

    def _check_metrics(self, seen: StepOutcome) -> None:
        self._metrics_seen.update(seen.metrics)
        self._closed_steps += 1
        if self._closed_steps != _METRIC_PATIENCE:
            return
        for name in sorted(self._metrics_read - self._metrics_seen):
            known = ", ".join(sorted(self._metrics_seen)) or "none"
            self.counters.add("metrics_missing")
            self.counters.warn(
                f"metric:{name}",
                f"a trigger reads the metric {name!r}, which no step has given so far (seen: {known}); "
                f"pass it as tap.step({name}=...)",
            )


class _Late(StepOutcome):
    """What is known of a step with late rows: a trigger that asks for values waits for them, and no other."""

    table: StepTable

    @property
    def nonfinite(self) -> int:
        """How many tensors were non-finite."""
        self.table.wait()
        return self.table.nonfinite


def _seen(metrics: Mapping[str, float], table: StepTable) -> StepOutcome:
    if not table.pending:
        return StepOutcome(metrics, table.nonfinite)
    seen = _Late(metrics)
    seen.table = table
    return seen


def _result(name: str, result: Any) -> dict[str, float | HostCopy] | npt.NDArray[Any]:
    """What a user's function gave, as named numbers or as a small array of its own."""
    if result is None:
        return {}
    if isinstance(result, Mapping):
        return {f"{name}.{key}": _number(number) for key, number in result.items()}
    array = result.array if isinstance(result, HostCopy) else array_of(buffer_of(result))
    if array.ndim == 0:
        return {name: _number(result if isinstance(result, HostCopy) else array)}
    if array.size <= _SMALL_ARRAY:
        return array if isinstance(result, HostCopy) else np.array(array, copy=True)
    raise TensortapError(
        f"it returned {array.size} elements; a function keeps a number, a dict of numbers or an array of at "
        f"most {_SMALL_ARRAY}; to keep tensors use full(), rows() or sample()"
    )


def _number(number: Any) -> float | HostCopy:
    return number if isinstance(number, HostCopy) else float(number)


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child writes nothing, so it need not record; and a lock may be held by a thread that stayed behind."""
    for recorder in list(_RECORDERS):
        recorder._lock = threading.RLock()
        recorder.pause()


os.register_at_fork(after_in_child=_after_fork)


def _bits(flags: Iterable[bool]) -> int:
    return sum(1 << i for i, flag in enumerate(flags) if flag)
