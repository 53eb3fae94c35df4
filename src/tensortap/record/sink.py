"""Sinks as the writer sees them, called so that no error of theirs reaches the user's step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tensortap.record.counters import Counters
from tensortap.record.step import Step


class Sink(Protocol):
    """A destination of closed steps. Its errors are counted and warned of once; they never reach the user's step."""

    def write(self, step: Step) -> None:
        """Write one step, on the writer's thread. The step's memory is reused afterwards: copy what you keep."""

    def close(self) -> None:
        """Write out what is left. Called once."""


@runtime_checkable
class Journal(Sink, Protocol):
    """A sink that makes a step durable before `tap.step()` returns."""

    def append(self, step: Step) -> bool:
        """Make the step outlive the process. Return True when `write` has more to do with it on the thread."""

    def tick(self) -> None:
        """Seal, sync and update counts; called about once a second on the thread."""


class GuardedSinks:
    """Call sinks and count their errors. With `strict` the first error is raised by `raise_error`.

    `thread` is the writer's thread, which not even SystemExit may end.
    """

    def __init__(self, sinks: Sequence[Sink], counters: Counters) -> None:
        self.journals = [sink for sink in sinks if isinstance(sink, Journal)]
        self.others = [sink for sink in sinks if not isinstance(sink, Journal)]
        self.thread: threading.Thread | None = None
        self._counters = counters
        self.error: BaseException | None = None

    def append(self, step: Step) -> list[Sink]:
        """Give a closed step to the journals; return the sinks that have more to do with it on the thread."""
        later: list[Sink] = []
        if step.table.pending or (step.metrics and step.pending):
            later += self.journals  # they have to wait for its values, which the thread does
        else:
            for sink in self.journals:
                try:
                    if sink.append(step):
                        later.append(sink)
                except Exception as error:
                    self.lose(step)
                    self._counters.failed("sink_errors", _name(sink), error)
        if self.others and (step.table.rows or step.metrics):
            later += self.others
        return later

    def write(self, step: Step, sinks: Sequence[Sink]) -> None:
        """Write a step on the thread. Its pending rows are waited for, and given to journals, first."""
        if step.pending:
            if not self.call("waiting for a device", step.wait, "device_errors"):
                self.lose(step)
                return
            sinks = [sink for sink in sinks if not isinstance(sink, Journal) or self._append_pending(sink, step)]
        for sink in sinks:
            self.call(_name(sink), lambda sink=sink: sink.write(step))  # type: ignore[misc]

    def tick(self) -> None:
        """Let every journal do what is due."""
        for journal in self.journals:
            self.call(_name(journal), journal.tick)

    def close(self) -> None:
        """Close every sink, journals last."""
        for sink in (*self.others, *self.journals):
            self.call(_name(sink), sink.close)

    def lose(self, step: Step) -> None:
        """Count a step that a journal does not have."""
        self._counters.add("dropped_steps")
        self._counters.add("dropped_records", step.table.rows)

    def raise_error(self) -> None:
        """Raise the first error since the last call, if `strict` asks for it."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def call(self, what: str, function: Callable[[], None], count: str = "sink_errors") -> bool:
        """Call a function of a sink; return whether it succeeded."""
        try:
            function()
            return True
        except BaseException as error:  # even SystemExit must not end the thread
            if not isinstance(error, Exception) and threading.current_thread() is not self.thread:
                raise
            with contextlib.suppress(Warning):  # under `python -W error` the warning is one more exception
                self._counters.note(count, what, error)
            if self._counters.strict and self.error is None:
                self.error = error
            return False

    def _append_pending(self, sink: Journal, step: Step) -> bool:
        more: list[bool] = []
        if not self.call(_name(sink), lambda: more.append(sink.append(step))):
            self.lose(step)
        return any(more)


def _name(sink: object) -> str:
    return f"writing to {sink}"
