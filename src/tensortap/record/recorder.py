"""The recorder: adapters write rows into its open step; closing the step returns what is to be written.

The jobs around it have files of their own: `arming` asks triggers, `elements` keeps elements of tensors, `decision`
splits a closed step, `lookback` holds what may be wanted later.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tensortap.context.events import EventLog
from tensortap.portable import after_fork
from tensortap.record.arming import ProbeTriggers
from tensortap.record.budget import Budget
from tensortap.record.cost import Account
from tensortap.record.counters import Counters
from tensortap.record.decision import NO_ROWS, StepDecision
from tensortap.record.elements import ElementReducers
from tensortap.record.lookback import LookBack
from tensortap.record.numbers import StepNumbers
from tensortap.record.open_step import OpenStep, Point
from tensortap.record.replicas import ReplicaMonitor
from tensortap.record.step import Step
from tensortap.record.table import Names, StepTable
from tensortap.reduce import kernel as kernels
from tensortap.select.probes import Probe
from tensortap.types import Buffer, Place, StepOutcome

__all__ = ["LOOKBACK_BYTES", "OpenStep", "Point", "Recorder"]
LOOKBACK_BYTES: Final = 256 << 20
_SPARE_TABLES: Final = 4
_NOTHING_SEEN: Final = StepOutcome({}, 0)


class Recorder(kernels.RecorderState):
    """Take what adapters observe, step by step, and return what is to be written.

    An adapter asks for a `point` for each place once, then calls `observe(point, buffer)` whenever it has a tensor.
    `current` is the open step. Several may be open at once (one per request in a server): `open()` returns another,
    and `close(step=…)` ends it. `per_thread` tells that some thread has a step of its own, so that whoever looks one up
    must ask whose it is. Whoever has written a step gives its memory back with `release(step)`.
    """

    current: OpenStep

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
        self.rank = rank
        self.names = Names()
        self.counters = counters or Counters()
        self.account = Account(budget)
        self.lookback = LookBack(lookback, lookback_bytes, self.counters)
        self.replicas: ReplicaMonitor | None = None  # set where a trigger compares replicas
        self.paused = False
        self._budget = budget
        self._armed_before_mute: int | None = None
        self._paused_in: OpenStep | None = None  # it stays unrecorded, also when recording goes on
        self._unwanted = 0  # steps after the open one that no probe will want
        self._clock = clock
        self._numbers = StepNumbers(start)
        self._points: dict[tuple[Place, int], Point] = {}
        self._spare: deque[StepTable] = deque(maxlen=_SPARE_TABLES)
        self._lock = threading.RLock()
        self.use_probes(probes)
        self.current = self.open()
        self.events = EventLog(lambda: self.current.number, lambda n: self.counters.add("dropped_events", n))
        _RECORDERS.add(self)

    def use_probes(self, probes: Sequence[Probe]) -> None:
        """Use these probes from the next step on. Those that stay keep their position, which is their bit."""
        with self._lock:
            self.probes = tuple(probes)
            self.elements = ElementReducers(self.probes, self.counters)
            self.triggers = ProbeTriggers(self.probes, self._budget, self.counters)
            self.histogram_probes = self.triggers.histogram_probes
            self.hash_probes = self.triggers.hash_probes
            self._decision = StepDecision(self.probes, self.names, self.lookback, self._spare.append)
            self._points.clear()  # of a point it is known which of its probes keep elements
            self._unwanted = 0

    def point(self, place: Place, probes: int) -> Point:
        """Return the point of a place for the probes (as bits) that matched it; the same one every time."""
        with self._lock:
            known = self._points.get((place, probes))
            if known is None:
                elements = self.elements
                keeping, whole = probes & elements.probes, probes & elements.whole
                known = Point(place, self.names.key(place), probes, keeping, whole)
                self._points[place, probes] = known
            return known

    def open(self, phase: str = "", *, before_current: bool = False) -> OpenStep:
        """Begin a step: ask every trigger before any data is touched. While muted, no probe wants it.

        With `before_current` it takes the number of the current step, which has the next one then, if nothing was seen
        in that: a server that only opens steps of its own begins with step 0.
        """
        with self._lock:
            step = self._open(phase)
            if self.muted:
                step.armed = 0
            elif before_current and self.current.is_untouched and self.current is not self._paused_in:
                self.current.exchange(step)
            return step

    def observe(
        self, point: Point, buffer: Buffer, value: Any = None, *, recomputed: bool = False, step: OpenStep | None = None
    ) -> int:
        """Record one tensor; return the row's number in its step, or −1 when no probe wants this step."""
        step = step or self.current
        armed = step.armed & point.probes
        if not armed:
            return -1
        table = step.table
        epoch = table.epoch
        address, dtype, shape, strides, _ = buffer
        want = 1 if armed & step.hist else 0
        row = table.record_if_room(point.key, armed, want, recomputed, dtype, address, shape, strides)
        if row < 0:
            row = table.record(point.key, armed, want, recomputed, dtype, address, shape, strides)
        if row < 0:  # another thread closed the step meanwhile
            self.counters.add("late_records")
        elif armed & point.keeping and table.epoch == epoch:
            self.elements.keep(table, row, point, armed, buffer, value)
        return row

    def restart(self, step: OpenStep) -> None:
        """Forget what an open step has recorded so far."""
        with self._lock:
            step.table.reset(0 if self._clock is None else _microseconds(self._clock))
            step.origin = None
            step.calls.clear()

    def pause(self) -> None:
        """Record nothing until `resume`."""
        self.paused = True
        self.current.armed = 0
        self._paused_in = self.current

    def resume(self) -> None:
        """Record again, from the next step on."""
        self.paused = False
        self._paused_in = self.current

    @property
    def muted(self) -> bool:
        """Return whether what is computed now belongs to no step."""
        return self._armed_before_mute is not None

    def mute(self) -> None:
        """Record nothing until `unmute`, and leave the open step as it is."""
        if self._armed_before_mute is None:
            self._armed_before_mute, self.current.armed = self.current.armed, 0

    def unmute(self) -> None:
        """Go on with the step that was open."""
        if self._armed_before_mute is not None:
            self.current.armed, self._armed_before_mute = 0 if self.paused else self._armed_before_mute, None

    def number_by_phase(self) -> None:
        """Number the steps of each phase apart, from the first one on."""
        self._numbers.by_phase = True

    def enter_phase(self, phase: str) -> bool:
        """Number the open step in a phase of its own, and ask the triggers again; False when it is there already.

        For adapters that learn what a step is only when it has begun, or when it ends: evaluation is then numbered
        apart from training. Rows that were recorded before stay.
        """
        with self._lock:
            if self._numbers.phase == phase:
                return False
            step, number = self.current, self._numbers.move(self.current.number, phase)
            self._unwanted = 0
            if step.table.rows:
                step.number = number
            else:
                step.begin(self.triggers.arm(number, self.paused))
                self._mute_again()
            step.phase = phase
            return True

    def close(
        self, metrics: Mapping[str, float] | None = None, *, phase: str = "", step: OpenStep | None = None
    ) -> list[Step]:
        """End a step and return what is to be written now, oldest first.

        Without `step` the current one ends, and a new one opens. A step that is closed already returns nothing.
        """
        with self._lock:
            closing = step or self.current
            if closing.closed:  # by another thread, at the same moment
                if metrics:
                    self.counters.add("late_metrics", len(metrics))
                return []
            if closing.metrics:
                metrics = {**closing.metrics, **(metrics or {})}
            if closing.idle and closing is self.current and not (metrics or closing.labels or self.lookback.steps):
                triggers = self.triggers
                if triggers.keep_history:
                    triggers.fired(closing.number, _NOTHING_SEEN)
                closing.begin(triggers.arm(self._numbers.take(), self.paused))
                self._unwanted = triggers.unwanted_after(closing.number) if closing.idle else 0
                if self._armed_before_mute is not None:
                    self._mute_again()
                return []
            return self._close(closing, metrics or {}, phase)

    def pass_by(self) -> bool:
        """End a step that no probe wants, where the next is known to be like it; False where `close` has to do it.

        A step costs most where it finds nothing in the processor's caches, so this looks at little. It calls nothing:
        so no signal handler and no other thread comes in between.
        """
        step = self.current
        if self._unwanted <= 0 or not step.idle or step.metrics or step.labels or self.events.waiting:
            return False
        self._unwanted -= 1
        self._numbers.ahead += 1
        self.account.steps += 1
        step.number += 1
        return True

    def release(self, step: Step) -> None:
        """Take back the memory of a step that every sink has written."""
        if step.table is not NO_ROWS:
            self._spare.append(step.table)

    def _open(self, phase: str = "") -> OpenStep:
        self._unwanted = 0  # it takes a number
        table = self._spare.pop() if self._spare else StepTable()
        table.reset(0 if self._clock is None else _microseconds(self._clock), self.hash_probes)
        return OpenStep(table, self.triggers.arm(self._numbers.take(phase), self.paused))

    def _close(self, closing: OpenStep, metrics: Mapping[str, float], phase: str) -> list[Step]:
        # It stays armed: a tensor that comes now, from another thread or a signal handler, is refused and counted.
        table = closing.table
        closing.closed = True
        table.close()
        if table.pending:
            table.start_copies()
        triggers = self.triggers
        reasons = triggers.always
        if closing.number not in triggers.known:
            reasons = triggers.fired(closing.number, _outcome(metrics, closing, self.names, self.replicas))
            triggers.check_metrics(metrics)
        if closing is self.current:
            self.current = self._open()
            if self._armed_before_mute is not None:
                self._mute_again()
        self.account.take(table)
        now = int((self._clock or time.time)() * 1e6)
        step = Step(
            closing.number,
            phase or closing.phase,
            self.rank,
            now,
            metrics,
            table,
            self.names,
            labels=closing.labels if closing.armed else {},  # of a request that nobody records there is nothing to find
            owner=closing.owner,
            numbered_by_phase=self._numbers.by_phase,
        )
        return self._decision.decide(step, closing.armed, closing.maybe, reasons)

    def _mute_again(self) -> None:
        if self._armed_before_mute is not None:
            self._armed_before_mute, self.current.armed = self.current.armed, 0


def _microseconds(clock: Callable[[], float]) -> int:
    return int(clock() * 1e6)


class _LazyOutcome(StepOutcome):
    """What is known of a step when somebody asks: a trigger that asks for values waits for pending rows, no other."""

    table: StepTable
    look: Callable[[], str] | None

    @property
    def nonfinite(self) -> int:
        self.table.wait()
        return self.table.nonfinite

    @property
    def unequal_replicas(self) -> str:
        return "" if self.look is None else self.look()


def _outcome(
    metrics: Mapping[str, float], step: OpenStep, names: Names, replicas: ReplicaMonitor | None
) -> StepOutcome:
    table = step.table
    if not table.pending and replicas is None:
        return StepOutcome(metrics, table.nonfinite)
    outcome = _LazyOutcome(metrics)
    outcome.table = table
    look = functools.partial(replicas.look, step.number, table, names) if replicas is not None else None
    outcome.look = look and functools.cache(look)  # several triggers may ask
    return outcome


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child writes nothing, so it need not record; and a lock may be held by a thread that stayed behind."""
    for recorder in list(_RECORDERS):
        recorder._lock = threading.RLock()
        recorder.pause()


after_fork(_after_fork)
