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

    def __init__(self, folder, warm):
        self.folder = folder
        self.warm = warm

    def write(self, text, name="script.py"):
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def python(self, *words, **more):
        env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **more}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=self.folder, env=env)

    def command(self, *words, **more):
        """Run `tensortap WORDS` in an interpreter that has imported PyTorch already."""
        return self.warm.run(["-m", "tensortap", *words], self.folder, env=more)

    def observe(self, text, *options, process=False, **more):
        """Run a script's text under `tensortap run --to run`; how it ended, and the run.

        With `process`, in a new interpreter.
        """
        words = ["run", "--to", "run", *options, self.write(text)]
        done = self.python("-m", "tensortap", *words, **more) if process else self.command(*words, **more)
        return done, tt.open_run(self.folder / "run") if (self.folder / "run").exists() else None


def ours(done):
    """The lines that tensortap printed."""
    return [line.removeprefix(OURS) for line in done.stderr.splitlines() if line.startswith(OURS)]


@pytest.fixture
def scripts(tmp_path, warm_python):
    return Scripts(tmp_path, warm_python)
