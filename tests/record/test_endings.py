"""Runs whose destination is gone, full or dead when the tap closes."""

from __future__ import annotations

import resource
import shutil
import signal
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import tensortap as tt


class DyingFileSystem(MemoryFileSystem):
    """A remote store whose connection can be cut."""

    protocol = "dying"
    dead = False

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        self._alive()
        return super()._open(*args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        self._alive()
        return super().pipe_file(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self._alive()
        return super().ls(*args, **kwargs)

    def info(self, *args: Any, **kwargs: Any) -> Any:
        self._alive()
        return super().info(*args, **kwargs)

    @classmethod
    def _alive(cls) -> None:
        if cls.dead:
            raise ConnectionResetError("the connection was reset")


fsspec.register_implementation("dying", DyingFileSystem, clobber=True)


@pytest.fixture
def remote() -> Iterator[str]:
    """The address of a run on a store that can die."""
    yield f"dying://runs/{uuid.uuid4().hex}"
    DyingFileSystem.dead = False


@contextmanager
def no_room() -> Iterator[None]:
    """While this lasts, no file can grow: as on a full disk, every write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def replaced(path: Path) -> None:
    """Put a file where the run's folder was."""
    shutil.rmtree(path)
    path.write_text("not a folder")


def steps(tap: tt.Tap, count: int) -> None:
    """Steps of one row each."""
    for _ in range(count):
        tt.tap(np.ones(8), "x")
        tap.step(loss=1.0)


def ends(tap: tt.Tap, *, strict: bool) -> None:
    """Close a tap whose destination is gone: without `strict` only counted and warned of."""
    if strict:
        with pytest.raises(OSError):
            tap.close()
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tap.close()
    assert tap.closed and tap.counts["sink_errors"] >= 1
    assert len({str(w.message) for w in said}) == len(said), "each is said once"


@pytest.mark.parametrize("strict", [False, True])
def test_a_folder_replaced_by_a_file_does_not_end_the_script(tmp_path: Path, strict: bool) -> None:
    """`tap.close()` counts that the run cannot be written any more; with `strict` it raises."""
    tap = tt.watch(to=tmp_path / "run", strict=strict)
    steps(tap, 3)
    replaced(tmp_path / "run")
    ends(tap, strict=strict)
    assert (tmp_path / "run").read_text() == "not a folder"


@pytest.mark.parametrize("strict", [False, True])
def test_a_disk_that_is_full_at_the_end_does_not_end_the_script(tmp_path: Path, strict: bool) -> None:
    """What could be written stays readable, and the rest is counted; with `strict` closing raises."""
    tap = tt.watch(to=tmp_path / "run", strict=strict)
    steps(tap, 3)
    with no_room():
        if not strict:
            with pytest.warns(tt.TensortapWarning, match="File too large"):
                steps(tap, 1)
        ends(tap, strict=strict)
    assert tt.open_run(tmp_path / "run").table(columns=["step"]).num_rows == 3
    assert strict or tap.counts["dropped_records"] == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_dead_connection_does_not_end_the_script(remote: str, strict: bool) -> None:
    """A remote store that is gone when the tap closes is counted; with `strict` closing raises."""
    tap = tt.watch(to=remote, strict=strict)
    steps(tap, 3)
    tap.flush()
    DyingFileSystem.dead = True
    ends(tap, strict=strict)


@pytest.mark.parametrize("destroy", [replaced, shutil.rmtree])
def test_steps_go_on_when_the_folder_is_gone(tmp_path: Path, destroy: Callable[[Path], Any]) -> None:
    """The user's loop runs to its end, whatever became of the folder meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(to=tmp_path / "run") as tap:
            steps(tap, 2)
            destroy(tmp_path / "run")
            steps(tap, 3)
    assert tap.recorder.current.number == 5
