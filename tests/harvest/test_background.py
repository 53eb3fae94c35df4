"""The thread that writes a harvest ends, whenever the user interrupts."""

from __future__ import annotations

import pytest
from interrupts import ends, interrupted_behind_locks

from tensortap.harvest.background import BackgroundWriter


@pytest.mark.parametrize("method", ["put", "wait", "close"])
def test_an_interrupt_leaves_no_lock_behind(method: str) -> None:
    """After an interrupt in any of its methods the thread still does its work and ends."""
    done: list[int] = []
    writer = BackgroundWriter()
    writer.put(lambda: done.append(1))
    writer.wait()
    given = [lambda: done.append(2)] if method == "put" else []
    with interrupted_behind_locks():
        getattr(writer, method)(*given)
    assert ends(writer.close) and done[0] == 1
