"""What operating systems do differently: locks on files, callbacks after a fork, flags of `os.open`.

Recording is built for Linux. On macOS and Windows a run can be read; what is missing there is guarded here, once.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from typing import Final

from tensortap.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    HAS_FILE_LOCKS = False
else:
    HAS_FILE_LOCKS = True

# No link is followed, nobody waits for the other end of a pipe, and no child inherits the file.
CAREFUL: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
SIGPIPE: Final = 13  # Windows does not name it


def after_fork(callback: Callable[[], object]) -> None:
    """Call back in a child process after a fork, where processes can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)


def wait_for_lock(fd: int) -> None:
    """Lock an open file or folder until it is closed, after whoever has it locked now; OSError where that cannot be."""
    if HAS_FILE_LOCKS:
        fcntl.flock(fd, fcntl.LOCK_EX)


def lock_now(fd: int) -> None:
    """Lock an open file until it is closed or the process ends; OSError when another process has it locked."""
    if not HAS_FILE_LOCKS:
        raise RunError("runs can be read on this system, not written: it has no POSIX locks. Record on Linux")
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_is_held(fd: int) -> bool:
    """Return whether another process has an open file locked; False where that cannot be asked."""
    if not HAS_FILE_LOCKS:
        return False
    # struct flock: Linux has type and whence first, macOS start and length.
    form, at = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi", 0)
    asked = [0] * 5
    asked[at : at + 2] = [fcntl.F_WRLCK, os.SEEK_SET]
    answer = struct.unpack(form, fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(form, *asked)))
    return bool(answer[at] != fcntl.F_UNLCK)
