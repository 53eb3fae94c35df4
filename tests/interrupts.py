"""Interrupt code where a signal handler can: between taking the lock of a condition and the block that it guards."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_ENTERED = threading.Condition.__enter__.__code__


@contextlib.contextmanager
def interrupted_behind_locks() -> Iterator[None]:
    """Raise KeyboardInterrupt as soon as Python's own code has taken the lock of a condition, and swallow it."""
    before = sys.gettrace()
    sys.settrace(_interrupt)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def ends(close: Any, seconds: float = 20) -> bool:
    """Return whether a call ends, in a thread of its own."""
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(seconds)
    return not closing.is_alive()


def _interrupt(frame: FrameType, event: str, arg: object) -> Any:
    if event == "return" and frame.f_code is _ENTERED:
        raise KeyboardInterrupt
    return _interrupt
