"""Run Python programs as forks of one interpreter that has imported the heavy packages already.

    with WarmPython("tensortap.cli.app", hidden=["torch"]) as python:
        done = python.run(["train.py", "--fast"], folder)

A program starts in milliseconds instead of seconds and ends as `python` would end it: exit code, exit handlers,
threads waited for, traceback on stderr. Everything it changes ends with it.

A hidden package is imported by the program itself, through the import system and its hooks, as if for the first
time; only its execution is skipped. Until then it is not in `sys.modules`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

PATIENCE = 120.0
TIMED_OUT = -1000


class Done(NamedTuple):
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str


class WarmPython:
    """An interpreter that waits, and forks for every program."""

    def __init__(self, *packages: str, hidden: Sequence[str] = (), path: Sequence[str] | None = None) -> None:
        folders = os.pathsep.join(sys.path if path is None else path)
        words = [sys.executable, __file__, json.dumps(packages), json.dumps(hidden)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": folders},
        )  # fmt: skip

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its input, which ends it

    def run(
        self,
        command: Sequence[object],
        folder: str | Path = ".",
        patience: float = PATIENCE,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Done:
        """Run `python COMMAND` in `folder`; the code is TIMED_OUT where it took too long.

        `env` adds variables to the environment. A program that ends by a signal has its negative number as code.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        task = Task([str(word) for word in command], str(Path(folder).absolute()), patience, dict(env or {}), stdin)
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return Done(*json.loads(self.process.stdout.readline()))


class Task(NamedTuple):
    """One program to run."""

    command: list[str]
    folder: str
    patience: float
    env: dict[str, str]
    stdin: str


class HiddenModules(MetaPathFinder, Loader):
    """Modules that were executed already, and are found as if they were not.

    Each group is what one import brought into `sys.modules`. Importing a module brings back what its group holds of
    the same distribution: what `import torch` would not have loaded stays away.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.groups: dict[str, int] = {}
        self.modules: dict[str, ModuleType] = {}
        before = set(sys.modules)
        for number, name in enumerate(names):
            importlib.import_module(name)
            self.groups |= dict.fromkeys(set(sys.modules) - before, number)
            before = set(sys.modules)
        for name in self.groups:
            self.modules[name] = sys.modules.pop(name)
        if self.modules:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a hidden module, with this object as its loader."""
        module = self.modules.get(fullname)
        if module is None:
            return None
        old = module.__spec__
        spec = ModuleSpec(fullname, _Again(self), origin=old.origin if old else None)
        spec.submodule_search_locations = old.submodule_search_locations if old else None
        spec.has_location = bool(old and old.has_location)
        return spec

    def bring_back(self, name: str) -> None:
        """Put into `sys.modules` what importing this module put there."""
        top, group = name.partition(".")[0], self.groups[name]
        for other in [each for each, number in self.groups.items() if number == group]:
            if other.partition(".")[0] == top and other in self.modules:
                sys.modules[other] = self.modules.pop(other)


class _Again(Loader):
    """Load one hidden module; hooks may replace `exec_module` of this object."""

    def __init__(self, hidden: HiddenModules) -> None:
        self.hidden = hidden

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.hidden.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        self.hidden.bring_back(module.__name__)


def _serve(packages: Sequence[str], hidden: Sequence[str]) -> None:
    for package in packages:
        importlib.import_module(package)
    HiddenModules(hidden)
    gc.freeze()  # what was imported is no garbage: a fork that looks through it would copy all of its memory
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # PyTorch's take its operators out of its tables, one by one
    for line in sys.stdin:
        print(json.dumps(_run(Task(*json.loads(line)))), flush=True)
    os._exit(0)  # there is nothing to tidy up, and modules take seconds to do it


def _run(task: Task) -> Done:
    files = [os.memfd_create(name) for name in ("input", "output", "errors")]
    os.write(files[0], task.stdin.encode())
    os.lseek(files[0], 0, os.SEEK_SET)
    child = os.fork()
    if not child:
        os.setsid()  # so that what it starts can be ended with it
        _become(files, task)
        _python(task.command)
    code = _wait(child, task.patience)
    os.close(files[0])
    return Done(code, *(_text(file) for file in files[1:]))


def _become(files: Sequence[int], task: Task) -> None:
    for place, file in enumerate(files):
        os.dup2(file, place)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(task.env)
    os.chdir(task.folder)


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
    _serve(*map(json.loads, sys.argv[1:3]))
