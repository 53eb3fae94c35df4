"""The line of the user's code that is running."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

import torch

_TORCH: Final = str(Path(torch.__file__).parent) + os.sep
_OURS: Final = str(Path(__file__).parents[3]) + os.sep
_LIBRARIES: Final = tuple(
    {
        str(Path(path)) + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("purelib", "platlib", "stdlib")
    }
)
_MOST_FRAMES: Final = 60


def user_line(depth: int = 2) -> str:
    """Return `file:line` of the innermost frame that is neither PyTorch's nor ours; better still, in no library."""
    frame: FrameType | None = sys._getframe(depth)
    library = ""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OURS, "<frozen")):
            if not name.startswith(_LIBRARIES):
                return f"{_short(name)}:{frame.f_lineno}"
            library = library or f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def _short(name: str) -> str:
    here = str(Path.cwd()) + os.sep
    return name[len(here) :] if name.startswith(here) else name
