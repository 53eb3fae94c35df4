"""Run small scripts by `python` and by `tensortap run`."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tensortap as tt

SOURCE = str(Path(tt.__file__).parents[1])
OURS = "tensortap: "


class Scripts:
    """Scripts in a folder of their own."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, text, name="script.py"):
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def python(self, *words, **more):
        env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **more}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=self.folder, env=env)

    def observe(self, text, *options, **more):
        """Run a script's text under `tensortap run --to run`; the finished process, and the run."""
        done = self.python("-m", "tensortap", "run", "--to", "run", *options, self.write(text), **more)
        return done, tt.open_run(self.folder / "run") if (self.folder / "run").exists() else None


def ours(done):
    """The lines that tensortap printed."""
    return [line.removeprefix(OURS) for line in done.stderr.splitlines() if line.startswith(OURS)]


@pytest.fixture
def scripts(tmp_path):
    return Scripts(tmp_path)
