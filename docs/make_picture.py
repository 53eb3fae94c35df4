"""Draws docs/show.svg: what `tensortap show` says of the run that examples/numpy_mlp.py makes.

`make picture` runs it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
RUN, WIDTH = "runs/digits", 100
FONTS = "'DejaVu Sans Mono', 'Liberation Mono', Menlo, Consolas, monospace"


def screen(folder: str) -> str:
    """What the command prints on a terminal, with its colours."""
    train = runpy.run_path(str(HERE.parent / "examples" / "numpy_mlp.py"))["train"]
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        train(to=RUN)
    env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    words = [sys.executable, "-m", "tensortap", "show", RUN]
    return subprocess.run(words, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


def picture(text: str) -> str:
    """The screen as SVG. Rich's own frame names a font to download; this one uses what is there."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), ("tensortap show " + RUN, "bold")))
    console.print(Text.from_ansi(text.rstrip()))
    frame = re.sub(r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    frame = frame.replace("font-family: Fira Code, monospace", f"font-family: {FONTS}")
    svg = console.export_svg(title="tensortap", code_format=frame, unique_id="show")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (HERE / "show.svg").write_text(picture(screen(folder)), encoding="utf-8")
