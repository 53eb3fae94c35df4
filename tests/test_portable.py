"""A run can be read where the modules and calls of POSIX are missing, as on Windows."""

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parent / "store" / "fixtures" / "v1"

READ = """
import os, signal, sys
for name in ("fcntl", "termios", "tty", "pwd", "grp", "resource", "syslog"):
    sys.modules[name] = None  # importing it raises ImportError
for name in ("register_at_fork", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "fork", "getuid", "pread"):
    delattr(os, name)
for name in ("SIGPIPE", "SIGKILL", "SIGHUP", "SIGUSR1"):
    delattr(signal, name)
import tensortap as tt
from tensortap.cli.app import run_command
run, there = tt.open_run(sys.argv[1]), sys.argv[2]
print(run.state, len(run.steps), run.table().num_rows)
for command in ("show", "check"):
    sys.argv[:] = ["tensortap", command, run.path]
    try:
        run_command()
    except SystemExit as ended:
        print(command, "ended with", ended.code)
try:
    tt.watch(to=there)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_run_is_read_without_posix(tmp_path):
    """`open_run`, `show` and `check` work, and writing says why it does not."""
    done = subprocess.run([sys.executable, "-c", READ, RUN, tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "crashed 9 298"
    assert "show ended with 0" in said and "check ended with 1" in said  # it holds a NaN
    assert said[-1].startswith("RunError runs can be read on this system, not written")
