"""The writer: one background thread between the user's step and every place where steps go.

A step is handed over once. A journal (the run folder) appends it before the hand-over returns, so that it outlives
the process; everything slower happens on the thread, behind a queue bounded in bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NamedTuple, Protocol, runtime_checkable

from tensortap.record.counters import Counters
from tensortap.record.step import Step
from tensortap.types import WhenFull

QUEUE_BYTES: Final = 256 << 20
_TICK_SECONDS: Final = 1.0


class Sink(Protocol):
    """Where finished steps go. An error it raises is counted and warned of once; it never reaches the user's step."""

    def write(self, step: Step) -> None:
        """Take one step, on the writer's thread. The step's memory is used again afterwards: copy what you keep."""

    def close(self) -> None:
        """Write out what is left. Called once."""


@runtime_checkable
class Journal(Sink, Protocol):
    """A sink whose first half is done before `tap.step()` returns."""

    def append(self, step: Step) -> bool:
        """Make the step survive the process. True when `write` has more to do with it on the thread."""

    def tick(self) -> None:
        """Now and then, on the thread: seal, sync, bring counts up to date."""


class _Waiting(NamedTuple):
    step: Step
    sinks: list[Sink]
    size: int


class Writer:
    """Hands steps to sinks: journals at once, the rest from one daemon thread.

    When the queue holds `queue_bytes`, `put` waits (`when_full="block"`) or lets the step go and counts it
    (`"drop"`). A forked child neither has the thread nor writes.
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
        self._journals = [sink for sink in sinks if isinstance(sink, Journal)]
        self._others = [sink for sink in sinks if not isinstance(sink, Journal)]
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._most_bytes = queue_bytes
        self._block = when_full == "block"
        self._release = release
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._alive = True
        self._forked = False
        self._trouble: BaseException | None = None
        self._thread: threading.Thread | None = None
        _LIVE.add(self)
        _Exit.install()

    @property
    def sinks(self) -> list[Sink]:
        """Where steps go, journals first."""
        return [*self._journals, *self._others]

    def put(self, step: Step) -> None:
        """Take a finished step over. Returns once journals have it. With `strict`, a sink's earlier error is raised."""
        if not self._alive:
            self._refuse(step)
            return
        self._raise_trouble()
        late = step.pending  # then journals have to wait for its values, and that is for the thread
        later: list[Sink] = [sink for sink in self._journals if late or self._append(sink, step)]
        later += self._others if step.table.rows or step.metrics else []
        with self._changed:  # threads that hand over their first steps at once start one writer, not two
            if not self._running():
                self._start()
        if later:
            self._enqueue(step, later)
        else:
            self._release(step)

    def flush(self) -> None:
        """Wait until everything handed over so far is written."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._busy) or not self._running())
        self._raise_trouble()

    def close(self, timeout: float | None = None) -> None:
        """Write everything, stop the thread and close every sink. A second call does nothing."""
        if not self._alive:
            return
        self._stop(timeout)
        for sink in (*self._others, *self._journals):
            self._guard(_name(sink), sink.close)
        self._alive = False
        _LIVE.discard(self)
        if not _LIVE:
            _Exit.uninstall()
        self._raise_trouble()

    def _refuse(self, step: Step) -> None:
        if not self._forked:
            self._lose(step)
            self.counters.warn("closed", f"step {step.number} ended after everything was closed, and is not written")
        self._release(step)

    def _raise_trouble(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def _append(self, sink: Journal, step: Step) -> bool:
        try:
            return sink.append(step)
        except Exception as error:
            self._lose(step)
            self.counters.failed("sink_errors", _name(sink), error)
            return False

    def _enqueue(self, step: Step, sinks: list[Sink]) -> None:
        size = step.nbytes

        def fits() -> bool:  # a step larger than the queue goes through alone
            return not self._queued_bytes or self._queued_bytes + size <= self._most_bytes

        with self._changed:
            if not self._block and not fits():
                self._drop(step, sinks)
                return
            self._changed.wait_for(lambda: fits() or not self._running())
            self._queue.append(_Waiting(step, sinks, size))
            self._queued_bytes += size
            self._changed.notify_all()

    def _drop(self, step: Step, sinks: list[Sink]) -> None:
        """Journals have the rows already, unless they are late, and lose only the tensors left to the thread."""
        if step.pending or any(sink in self._others for sink in sinks):
            self.counters.add("dropped_steps")
        if step.pending:
            self.counters.add("dropped_records", step.table.rows)
        if any(sink in self._journals for sink in sinks):
            self.counters.add("dropped_tensors", len(step.table.tensors))
        self._release(step)

    def _start(self) -> None:
        _Exit.install()
        thread = threading.Thread(target=self._run, name="tensortap-writer", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: `close` writes what waits
            thread.start()
            self._thread = thread

    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _stop(self, timeout: float | None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        # Nothing was ever started, the thread is gone, or it is the thread itself that closes.
        while self._queue and not (self._running() and self._thread is not threading.current_thread()):
            self._write_next()

    def _run(self) -> None:
        due = time.monotonic() + _TICK_SECONDS
        while True:
            with self._changed:
                if not self._queue and not self._closing:
                    self._changed.wait(max(0.0, due - time.monotonic()))
                if not self._queue and self._closing:
                    return
            if self._queue:
                self._write_next()
            if time.monotonic() >= due:
                for journal in self._journals:
                    self._guard(_name(journal), journal.tick)
                due = time.monotonic() + _TICK_SECONDS

    def _write_next(self) -> None:
        with self._changed:
            step, sinks, size = self._queue.popleft()
            self._busy = True
        for sink in self._settled(step, sinks):
            self._guard(_name(sink), lambda sink=sink: sink.write(step))  # type: ignore[misc]
        self._release(step)
        with self._changed:
            self._queued_bytes -= size
            self._busy = False
            self._changed.notify_all()

    def _settled(self, step: Step, sinks: list[Sink]) -> list[Sink]:
        """Who is to write a step; late rows are waited for, and appended to journals, first."""
        if not step.pending:
            return sinks
        if not self._guard("waiting for a device", step.wait, "device_errors"):
            self._lose(step)
            return []
        return [sink for sink in sinks if not isinstance(sink, Journal) or self._append_late(sink, step)]

    def _append_late(self, sink: Journal, step: Step) -> bool:
        more: list[bool] = []
        if not self._guard(_name(sink), lambda: more.append(sink.append(step))):
            self._lose(step)
        return any(more)

    def _lose(self, step: Step) -> None:
        self.counters.add("dropped_steps")
        self.counters.add("dropped_records", step.table.rows)

    def _guard(self, what: str, call: Callable[[], None], count: str = "sink_errors") -> bool:
        """Call a sink. Its error is counted; with `strict` it comes out of the next `put`, `flush` or `close`."""
        try:
            call()
            return True
        except BaseException as error:  # even SystemExit must not end the thread
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                raise
            with contextlib.suppress(Warning):  # under `python -W error` the warning is one more exception
                self.counters.note(count, what, error)
            if self.counters.strict and self._trouble is None:
                self._trouble = error
            return False

    def _forget(self) -> None:
        """In a forked child: the thread did not come along, and the files are the parent's."""
        self._alive = False
        self._forked = True
        self._queue.clear()
        self._changed = threading.Condition()


def _name(sink: object) -> str:
    return f"writing to {sink}"


_LIVE: weakref.WeakSet[Writer] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in list(_LIVE):
        writer._forget()
    _LIVE.clear()


os.register_at_fork(after_in_child=_after_fork)


class _Exit:
    """Flushes at the end of the process and on SIGTERM, where nobody else has taken the signal."""

    PATIENCE: Final = 10.0  # a signal may find the main thread holding a lock that the writer wants
    installed = False

    @classmethod
    def install(cls) -> None:
        if not cls.installed:
            cls.installed = True
            atexit.register(cls.close_all)
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, cls.terminated)

    @classmethod
    def uninstall(cls) -> None:
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) == cls.terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @classmethod
    def close_all(cls, timeout: float | None = None) -> None:
        for writer in list(_LIVE):
            with contextlib.suppress(Exception):  # noted already; the others are to be closed too
                writer.close(timeout)

    @classmethod
    def terminated(cls, number: int, frame: FrameType | None) -> None:
        """Write what is there, then die of the signal as the process would have without us."""
        cls.close_all(cls.PATIENCE)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
