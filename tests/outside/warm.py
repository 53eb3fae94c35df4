"""Run Python programs as forks of one interpreter that has imported the heavy packages already.

    with WarmPython("torch") as python:
        done = python.run(["train.py", "--fast"], folder)

A program starts in milliseconds instead of seconds and ends as `python` would end it: exit code, exit handlers,
threads waited for, traceback on stderr. Everything it changes ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PATIENCE = 120.0
TIMED_OUT = -1000


class Done(NamedTuple):
    """How a program ended."""

    code: int
    output: str
    errors: str


class WarmPython:
    """An interpreter that waits, and forks for every program."""

    def __init__(self, *packages: str, path: Sequence[str] | None = None) -> None:
        folders = os.pathsep.join(sys.path if path is None else path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outside.warm", *packages], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": folders},
        )  # fmt: skip

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its input, which ends it

    def run(self, command: Sequence[str], folder: str | Path = ".", patience: float = PATIENCE) -> Done:
        """Run `python COMMAND` in `folder`, without input; the code is TIMED_OUT where it took too long."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([list(command), str(Path(folder).absolute()), patience]) + "\n")
        self.process.stdin.flush()
        return Done(*json.loads(self.process.stdout.readline()))


def _serve(packages: Sequence[str]) -> None:
    for package in packages:
        importlib.import_module(package)
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)


def _run(command: list[str], folder: str, patience: float) -> Done:
    files = [os.memfd_create(name) for name in ("output", "errors")]
    child = os.fork()
    if not child:
        os.setsid()  # so that what it starts can be ended with it
        _become(files, folder)
        _python(command)
    code = _wait(child, patience)
    return Done(code, *(_text(file) for file in files))


def _become(files: Sequence[int], folder: str) -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    for place, file in enumerate([empty, *files]):
        os.dup2(file, place)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)


def _python(command: list[str]) -> NoReturn:
    code = 1
    try:
        _execute(command)
        code = 0
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def _execute(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).absolute().parent)
        runpy.run_path(command[0], run_name="__main__")


def _exit_code(code: Any) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _wait(child: int, patience: float) -> int:
    end = time.monotonic() + patience
    pause = 0.002
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT


def _text(file: int) -> str:
    with open(file, "rb") as opened:
        opened.seek(0)
        return opened.read().decode(errors="replace")


if __name__ == "__main__":
    _serve(sys.argv[1:])
