"""The line of the user's code that is running."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

_OURS: Final = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES: Final = tuple(
    {
        str(Path(path)) + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("purelib", "platlib", "stdlib", "scripts")
    }
)
# Packages lie elsewhere too: in the user's folder, below a virtual environment, or where Debian puts them.
_PACKAGES: Final = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_LAUNCHER: Final = f"{_OURS}script{os.sep}launch.py"  # outside of it there is no user code
_MOST_FRAMES: Final = 60


def line_of_user(depth: int = 1, without: tuple[str, ...] = ()) -> str:
    """Return `file:line` of the innermost frame that is not ours and in no folder of `without`; best, in no library."""
    frame: FrameType | None = sys._getframe(depth)
    library = ""
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code.co_filename == _LAUNCHER:
            break
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, "<frozen", *without)):
            if not _is_installed(name):
                return f"{shortened_path(name)}:{frame.f_lineno}"
            library = library or f"{shortened_path(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def in_library(file: str) -> bool:
    """Return whether a file is ours or belongs to an installed package."""
    return file.startswith((_OURS, "<frozen")) or _is_installed(file)


def _is_installed(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _PACKAGES)


def frames_of_caller(depth: int = 1) -> list[FrameType]:
    """Return the frames that are running, the innermost first, up to where `tensortap run` runs a script."""
    frame: FrameType | None = sys._getframe(depth)
    found: list[FrameType] = []
    while frame is not None and len(found) < _MOST_FRAMES and frame.f_code.co_filename != _LAUNCHER:
        found.append(frame)
        frame = frame.f_back
    return found


def shortened_path(name: str) -> str:
    """Return a path relative to the working directory, where it lies in it."""
    here = str(Path.cwd()) + os.sep
    return name[len(here) :] if name.startswith(here) else name
