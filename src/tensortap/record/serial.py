"""Run the calls that close and write steps one after another within a thread.

Python runs a signal handler between any two instructions of the main thread, also while a step is being closed. If
the handler closes a step too (preemption handlers do: call the model, `tap.step()`, `tap.close()`), it would find
locks held and files half written by the very call that it interrupts, which cannot go on before it returns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Deferred(threading.local):
    calls: list[Callable[[], None]] | None = None  # None while this thread is inside no call


_DEFERRED = _Deferred()


def run(call: Callable[..., None], *args: Any) -> None:
    """Make a call now; or, inside another one of this thread, as soon as that has ended.

    >>> run(lambda: (print("outer begins"), run(lambda: print("inner")), print("outer ends")))
    outer begins
    outer ends
    inner
    """
    here = _DEFERRED
    if here.calls is not None:
        here.calls.append(functools.partial(call, *args))
        return
    deferred: list[Callable[[], None]] = []
    here.calls = deferred
    try:
        call(*args)
    finally:
        here.calls = None
        if deferred:  # asked for only now: a handler may have come just before the line above
            _make_deferred(deferred)


def _make_deferred(deferred: list[Callable[[], None]]) -> None:
    while deferred:
        _DEFERRED.calls = deferred
        try:
            while deferred:
                deferred.pop(0)()
        finally:
            _DEFERRED.calls = None
