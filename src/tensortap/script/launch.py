"""Run a script or a module as `python` would: arguments, `__main__`, `sys.path[0]`, exit code, traceback."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_PACKAGE: Final = str(Path(__file__).resolve().parent.parent) + os.sep
_REPLACED: Final[list[ModuleType]] = []  # a deleted module loses its globals, and ours are still in use


def launch(target: str, args: Sequence[str], *, module: bool = False) -> None:
    """Run a file, or with `module` what `python -m` would. Comes back, or raises, as the script ends.

    An uncaught error passes through here, so that Python ends the process as usual; the printed traceback has none of
    our frames.
    """
    sys.argv = [target, *args]
    _REPLACED.append(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"]).update(__builtins__=builtins, __annotations__={})
    try:
        (_run_module if module else _run_file)(target)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = _Pruned(sys.excepthook)
        raise


def _run_module(name: str) -> None:
    _first_on_path(str(Path.cwd()))
    sys.argv[0] = "-m"
    _as_main(name, True)


def _run_file(path: str) -> None:
    full = os.path.abspath(path)  # noqa: PTH100  # as python: without following links
    if Path(full).is_dir() or zipfile.is_zipfile(full):
        _first_on_path(full)
        _as_main("__main__", False)
        return
    _first_on_path(str(Path(full).resolve().parent))
    names = vars(sys.modules["__main__"])
    names.update(__file__=full, __cached__=None, __spec__=None, __loader__=SourceFileLoader("__main__", full))
    exec(compile(Path(full).read_bytes(), full, "exec", dont_inherit=True), names)


def _as_main(name: str, alter_argv: bool) -> None:
    """Call what `python -m` itself calls, so that errors, messages and exit codes are the same."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


class _Pruned:
    """An excepthook that hides the frames which would not be there without us, then does what the other one does."""

    def __init__(self, other: Excepthook) -> None:
        self.other = other

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for each in _related(error, set()):
            each.__traceback__ = _without_ours(each.__traceback__)
        self.other(kind, error, error.__traceback__)


def _related(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield the error, what caused it, what it happened in, and the members of groups."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *members):
        yield from _related(other, seen)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    entries = list(_entries(trace))
    started = [i for i, entry in enumerate(entries) if entry.tb_frame.f_code is launch.__code__]
    entries = entries[started[-1] + 1 :] if started else entries
    kept = [entry for entry in entries if not entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)]
    following = None
    for entry in reversed(kept):
        entry.tb_next = following
        following = entry
    return following


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
