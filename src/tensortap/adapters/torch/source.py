"""Find the running line of the user's code: the innermost that is neither PyTorch's nor ours."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Final

import torch

TORCH: Final = str(Path(torch.__file__).parent)
OURS: Final = str(Path(__file__).parents[2])
_FOREIGN: Final = (TORCH, OURS, "<frozen", "<__array_function__")


def current_line() -> str:
    """Return the user's running line as `file:line  code`; empty when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        frame = frame.f_back
    return "" if frame is None else _text(frame.f_code.co_filename, frame.f_lineno)


def _text(file: str, line: int) -> str:
    return f"{file}:{line}  {linecache.getline(file, line).strip()}".rstrip()
