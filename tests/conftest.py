"""Steps and runs made by the real recorder and writer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.step import Step
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import probe
from tensortap.store.folder import RunFolder
from tensortap.types import Place

Tensors = Mapping[str | Place, Any]


def as_place(name: str | Place) -> Place:
    if isinstance(name, Place):
        return name
    site, _, port = name.partition(":")
    return Place(site, port or "output")


def observe(recorder: Recorder, tensors: Tensors) -> None:
    for name, value in tensors.items():
        for array in value if isinstance(value, list) else [value]:  # a list is several calls
            recorder.observe(recorder.point(as_place(name), 1), buffer_of(np.asarray(array)))


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """A function that records arrays as one step."""

    def make(tensors: Tensors, *, number: int = 0, keep: Any = None, metrics: Any = None, rank: int = 0) -> Step:
        recorder = Recorder([probe("**", keep=keep)], rank=rank, start=number, clock=lambda: 1_700_000_000.0)
        observe(recorder, tensors)
        return recorder.close(metrics or {})[-1]

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., str]:
    """A function that writes a run of the given steps (arrays, metrics) and gives its path."""

    def make(
        steps: list[tuple[Tensors, dict[str, float]]],
        *,
        name: str = "run",
        keep: Any = None,
        rank: int = 0,
        launch: str = "test",
        counts: Mapping[str, int] | None = None,
        close: bool = True,
        about: Mapping[str, Any] | None = None,
    ) -> str:
        path, counters = str(tmp_path / name), Counters()
        recorder = Recorder([probe("**", keep=keep)], rank=rank, clock=lambda: 1_700_000_000.0, counters=counters)
        folder = RunFolder(path, rank=rank, about=about, launch=launch, counters=counters)
        writer = Writer([folder], counters=counters, release=recorder.release)
        for tensors, metrics in steps:
            observe(recorder, tensors)
            for step in recorder.close(metrics):
                writer.put(step)
        for what, count in (counts or {}).items():
            counters.add(what, count)
        writer.close()
        return path

    return make


@pytest.fixture(autouse=True)
def no_width_from_outside(monkeypatch):
    """A terminal's width that the runner of the tests exports (xdist's workers do) must not decide what they see."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def pytest_configure() -> None:
    """Let the tests send Ctrl-C to their own processes, also when the suite runs in the background.

    A shell that is not interactive starts background jobs with SIGINT ignored, and every process that they start
    inherits that; one that has a handler is started with the default.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
