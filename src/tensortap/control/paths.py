"""Where a rank listens: a socket in its folder, reached by a short path where the folder's own is too long."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOCKET: Final = "_control"
LONGEST: Final = 100  # bytes: a Unix socket's path has 108 on Linux, 104 on macOS
AVAILABLE: Final = hasattr(socket, "AF_UNIX")


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Give a path that `bind` and `connect` take: the socket's own, or one through a short link to its folder.

    The link is gone when the block ends; the socket lies where it was asked for.
    """
    path = path.absolute()
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="tt-", dir=_short_folder()) as folder:
        link = Path(folder) / "l"
        link.symlink_to(path.parent)
        yield str(link / path.name)


def _short_folder() -> str | None:
    """Return a folder for the link: the usual one unless that is long itself."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > LONGEST // 2 and os.access("/tmp", os.W_OK) else None
