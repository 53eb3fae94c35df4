"""The thread that writes a harvest ends, whenever the user interrupts."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from tensortap.harvest.background import BackgroundWriter

ENTERED = threading.Condition.__enter__.__code__


def interrupt_behind_the_lock(frame: FrameType, event: str, arg: object) -> Any:
    """A tracer that raises as a signal handler does, between taking a condition's lock and the block."""
    if event == "return" and frame.f_code is ENTERED:
        raise KeyboardInterrupt
    return interrupt_behind_the_lock


@pytest.mark.parametrize("method", ["put", "wait", "close"])
def test_an_interrupt_leaves_no_lock_behind(method: str) -> None:
    """After an interrupt in any of its methods the thread still does its work and ends."""
    done: list[int] = []
    writer = BackgroundWriter()
    writer.put(lambda: done.append(1))
    writer.wait()
    given = [lambda: done.append(2)] if method == "put" else []
    before = sys.gettrace()
    sys.settrace(interrupt_behind_the_lock)
    try:
        getattr(writer, method)(*given)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive() and done[0] == 1
