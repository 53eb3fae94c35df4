"""Close every open writer when the process ends: at exit, and on SIGTERM where nobody else handles it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, Final, Protocol

from tensortap.portable import after_fork
from tensortap.record import serial

_PATIENCE: Final = 10.0  # seconds: the signal may have stopped the main thread where it holds a lock


class OpenWriter(Protocol):
    """What is closed when the process ends."""

    def close(self, timeout: float | None = None) -> None:
        """Write what is left, waiting at most `timeout` seconds."""

    def after_fork(self) -> None:
        """Let go of everything in a forked child: the files are the parent's."""


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False


def register(writer: OpenWriter) -> None:
    """Close this writer when the process ends."""
    _OPEN.add(writer)
    install()


def unregister(writer: OpenWriter) -> None:
    """Forget a writer that is closed; with the last one, give SIGTERM back."""
    _OPEN.discard(writer)
    if not _OPEN and _in_main_thread() and signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def install() -> None:
    """Handle the end of the process, and SIGTERM unless the user's script does."""
    global _installed
    if not _installed:
        _installed = True
        atexit.register(close_all)
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def close_all(timeout: float | None = None) -> None:
    """Close every open writer, each within `timeout` seconds."""
    for writer in list(_OPEN):
        with contextlib.suppress(Exception):  # counted already; the others are to be closed too
            writer.close(timeout)


def _terminated(number: int, frame: FrameType | None) -> None:
    """Write what is there, then end by the signal as the process would have without us."""

    def end() -> None:
        close_all(_PATIENCE)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    serial.run(end)  # a step that is just being closed is closed first


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _after_fork() -> None:
    for writer in list(_OPEN):
        writer.after_fork()
    _OPEN.clear()


after_fork(_after_fork)
