"""Single keys from the terminal, without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any, Self


class Keys:
    """While it is open, keys are read as they are pressed; where nobody can press any, it only waits.

    >>> with Keys() as keys:
    ...     keys.pressed(0.0)
    ''
    """

    def __init__(self) -> None:
        self._before: Any = None

    def __enter__(self) -> Self:
        if sys.stdin is not None and sys.stdin.isatty():
            self._fd = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None

    def pressed(self, seconds: float) -> str:
        """The key that is pressed within so many seconds; empty when none is."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        return os.read(self._fd, 1).decode(errors="replace") if ready else ""
