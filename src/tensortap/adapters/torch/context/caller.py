"""The line of the user's code that is running."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from tensortap.context.caller import line_of_user

TORCH: Final = str(Path(torch.__file__).parent) + os.sep


def user_line(depth: int = 2) -> str:
    """Return `file:line` of the innermost frame that is neither PyTorch's nor ours; better still, in no library."""
    return line_of_user(depth + 1, (TORCH,))
