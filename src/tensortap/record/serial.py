"""Run the calls that close and write steps one after another within a thread.

Python runs a signal handler between any two instructions of the main thread, also while a step is being closed. If
the handler closes a step too (preemption handlers do: call the model, `tap.step()`, `tap.close()`), it would find
locks held and files half written by the very call that it interrupts, which cannot go on before it returns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class _Deferred(threading.local):
    calls: deque[Callable[[], None]] | None = None  # None while this thread is inside no call


_DEFERRED = _Deferred()


def run(call: Callable[[], None]) -> None:
    """Make a call now; or, inside another one of this thread, as soon as that has ended.

    >>> run(lambda: (print("outer begins"), run(lambda: print("inner")), print("outer ends")))
    outer begins
    outer ends
    inner
    """
    if _DEFERRED.calls is not None:
        _DEFERRED.calls.append(call)
        return
    deferred: deque[Callable[[], None]] = deque()
    _DEFERRED.calls = deferred
    try:
        call()
    finally:
        _end(deferred)


def _end(deferred: deque[Callable[[], None]]) -> None:
    while True:
        try:
            while deferred:
                deferred.popleft()()
        finally:
            _DEFERRED.calls = None
        if not deferred:  # a handler may have come between the last look and the line above
            return
        _DEFERRED.calls = deferred
