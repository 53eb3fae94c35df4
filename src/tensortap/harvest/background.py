"""A thread that writes while the model computes: work is done in order, and what waits for it is bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

MOST_WAITING: Final = 64_000_000  # bytes of rows that wait to be written

Work = Callable[[], object]


class BackgroundWriter:
    """Do work on another thread, in the order in which it was given.

    >>> done: list[int] = []
    >>> writer = BackgroundWriter()
    >>> for n in range(3):
    ...     writer.put(lambda n=n: done.append(n))
    >>> writer.wait(); done
    [0, 1, 2]
    >>> writer.close()

    `put` waits while more than `most_waiting` bytes are waiting. What the work raises is raised by the next `put` or
    `wait`, once; nothing that was given before that is done any more.
    """

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most = most_waiting
        self._waiting: deque[tuple[Work, int]] = deque()
        self._bytes = 0
        self._busy = False
        self._failure: BaseException | None = None
        # Python's own `__enter__` of a condition could be left by a KeyboardInterrupt with the lock held for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, work: Work, size: int = 0) -> None:
        """Give work that holds so many bytes until it is done."""
        with self._lock:
            self._changed.wait_for(lambda: self._failure or self._bytes + size <= self._most or not self._bytes)
            self._raise()
            self._waiting.append((work, size))
            self._bytes += size
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tensortap-harvest", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until everything is done."""
        with self._lock:
            self._changed.wait_for(lambda: self._failure or not (self._waiting or self._busy))
            self._raise()

    def close(self) -> None:
        """Drop what waits, let what is being done end, and end the thread."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._waiting.clear()
            self._bytes = 0
            raise failure

    def _run(self) -> None:
        while (found := self._next()) is not None:
            work, size = found
            failure: BaseException | None = None
            try:
                work()
            except BaseException as error:
                failure = error
            del work, found  # and with it the rows that it holds
            self._done(size, failure)

    def _next(self) -> tuple[Work, int] | None:
        with self._lock:
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._failure is None))
            if self._closed:
                return None
            self._busy = True
            return self._waiting.popleft()

    def _done(self, size: int, failure: BaseException | None) -> None:
        with self._lock:
            self._busy = False
            self._bytes = max(0, self._bytes - size)
            self._failure = failure
            self._changed.notify_all()
