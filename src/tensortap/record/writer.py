"""The writer: one background thread between the user's step and the sinks.

A closed step is handed over once. A journal (the run folder) appends it before the hand-over returns, so that the
step outlives the process; everything slower happens on the thread, behind a queue bounded in bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tensortap.record import at_exit
from tensortap.record.counters import Counters
from tensortap.record.sink import GuardedSinks, Sink
from tensortap.record.step import Step
from tensortap.types import WhenFull

QUEUE_BYTES: Final = 256 << 20
_TICK_SECONDS: Final = 1.0


class _QueuedStep(NamedTuple):
    step: Step
    sinks: list[Sink]
    size: int


class Writer:
    """Hand steps to sinks: to journals at once, to the others from one daemon thread.

    When the queue holds `queue_bytes`, `put` waits (`when_full="block"`) or drops the step and counts it
    (`"drop"`). A forked child writes nothing.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        counters: Counters | None = None,
        queue_bytes: int = QUEUE_BYTES,
        when_full: WhenFull = "block",
        release: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.counters = counters or Counters()
        self.guarded = GuardedSinks(sinks, self.counters)
        self._queue: deque[_QueuedStep] = deque()
        self._queued_bytes = 0
        self._most_bytes = queue_bytes
        self._block = when_full == "block"
        self._release = release
        self._make_lock()
        self._busy = False
        self._closing = False
        self._alive = True
        self._forked = False
        self._thread: threading.Thread | None = None
        self._started = False  # known sooner than whether the thread is alive
        at_exit.register(self)

    @property
    def sinks(self) -> list[Sink]:
        """Return the sinks, journals first."""
        return [*self.guarded.journals, *self.guarded.others]

    def put(self, step: Step) -> None:
        """Take a closed step over; return once journals have it. With `strict`, raise a sink's earlier error."""
        if not self._alive:
            self._refuse(step)
            return
        guarded = self.guarded
        if guarded.error is not None:
            guarded.raise_error()
        later = guarded.append(step)
        if not self._started:
            self._ensure_running()
        if later:
            self._enqueue(step, later)
        else:
            self._release(step)

    def flush(self) -> None:
        """Wait until everything handed over so far is written."""
        with self._lock:
            self._changed.wait_for(lambda: not (self._queue or self._busy) or not self._running())
        self.guarded.raise_error()

    def close(self, timeout: float | None = None) -> None:
        """Write everything, stop the thread and close every sink. A second call does nothing."""
        if not self._alive:
            return
        self._stop(timeout)
        self.guarded.close()
        self._alive = False
        at_exit.unregister(self)
        self.guarded.raise_error()

    def after_fork(self) -> None:
        """Write nothing in a forked child: the thread did not come along, and the files are the parent's."""
        self._alive = False
        self._forked = True
        self._queue.clear()
        self._make_lock()

    def _make_lock(self) -> None:
        # `with condition:` runs Python's own `__enter__`, which a KeyboardInterrupt can leave with the lock held for
        # ever; a lock's is one instruction.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def _refuse(self, step: Step) -> None:
        if not self._forked:
            self.guarded.lose(step)
            self.counters.warn("closed", f"step {step.number} ended after everything was closed, and is not written")
        self._release(step)

    def _enqueue(self, step: Step, sinks: list[Sink]) -> None:
        size = step.nbytes

        def fits() -> bool:  # a step larger than the queue goes through alone
            return not self._queued_bytes or self._queued_bytes + size <= self._most_bytes

        with self._lock:
            if not self._block and not fits():
                self._drop(step, sinks)
                return
            self._changed.wait_for(lambda: fits() or not self._running())
            self._queue.append(_QueuedStep(step, sinks, size))
            self._queued_bytes += size
            self._changed.notify_all()

    def _drop(self, step: Step, sinks: list[Sink]) -> None:
        """Count a step that the queue has no room for. Journals have its rows already, unless they are pending."""
        if step.pending or any(sink in self.guarded.others for sink in sinks):
            self.counters.add("dropped_steps")
        if step.pending:
            self.counters.add("dropped_records", step.table.rows)
        if any(sink in self.guarded.journals for sink in sinks):
            self.counters.add("dropped_tensors", len(step.table.tensors))
        self._release(step)

    def _start(self) -> None:
        at_exit.install()
        thread = threading.Thread(target=self._run, name="tensortap-writer", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: `close` writes what waits
            self.guarded.thread = thread
            thread.start()
            self._thread = thread
            self._started = True

    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _ensure_running(self) -> None:
        with self._lock:  # threads that hand over their first steps at once start one writer, not two
            if not self._running():
                self._start()

    def _stop(self, timeout: float | None) -> None:
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        # Nothing was ever started, the thread is gone, or it is the thread itself that closes.
        while self._queue and not (self._running() and self._thread is not threading.current_thread()):
            self._write_next()

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            self._started = False

    def _write_all(self) -> None:
        due = time.monotonic() + _TICK_SECONDS
        while True:
            with self._lock:
                if not self._queue and not self._closing:
                    self._changed.wait(max(0.0, due - time.monotonic()))
                if not self._queue and self._closing:
                    return
            if self._queue:
                self._write_next()
            if time.monotonic() >= due:
                self.guarded.tick()
                due = time.monotonic() + _TICK_SECONDS

    def _write_next(self) -> None:
        with self._lock:
            step, sinks, size = self._queue.popleft()
            self._busy = True
        self.guarded.write(step, sinks)
        self._release(step)
        with self._lock:
            self._queued_bytes -= size
            self._busy = False
            self._changed.notify_all()
