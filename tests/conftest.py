"""Steps and runs made by the real recorder and writer."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_python import WarmPython
from xdist.scheduler import LoadScopeScheduling

from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.step import Step
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.select.probes import probe
from tensortap.store.folder import RunFolder
from tensortap.types import Place

# Before a framework is loaded. Tests run beside each other, and what is forked from a process whose OpenMP has threads
# waits for them for ever.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Virtual machines announce AMX and refuse it: a product of bfloat16 ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# XLA compiles hundreds of functions for tests that call each of them a few times: what it spends on each is kept low.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",
)

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


# What commands import without a framework.
COMMAND_MODULES = [
    "tensortap.cli.app", "pyarrow.parquet", "tensortap.watch", "tensortap.store.run", "tensortap.diagnose.check",
    "tensortap.script.launch", "tensortap.cli.check", "tensortap.cli.run",
]  # fmt: skip
# What a script of PyTorch under `tensortap run` imports, in an order that each may rely on.
SCRIPT_MODULES = ["torch", "sklearn.datasets", "torch._dynamo", "tensortap.adapters.torch.script.watcher"]


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Run `python WORDS` quickly: what scripts import has been executed, and they import it all the same.

    For what is compared with `python` itself, or is about imports or signals, start a process instead.
    """
    with WarmPython(*COMMAND_MODULES, hidden=SCRIPT_MODULES) as python:
        yield python


@pytest.fixture(autouse=True)
def no_width_from_outside(monkeypatch):
    """A terminal's width that the runner of the tests exports (xdist's workers do) must not decide what they see."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


# Folders whose tests share what takes long to make, so that one worker runs them all. Elsewhere it is a file.
TOGETHER = ("tests/web/", "tests/diagnose/")
# What runs scripts in the warm interpreter, which takes as long to start as thirty of them: one worker has it.
WARM = (
    "tests/script/", "tests/outside/", "tests/store/test_ranks.py", "tests/diagnose/test_examples.py",
    *(f"tests/adapters/torch/{name}" for name in (
        "distributed/", "script/", "samples/", "compile/test_compiled_values.py", "device/test_device_row.py",
        "test_memory.py", "test_same.py",
    )),
)  # fmt: skip
# What takes longest begins first, so that no worker is left with it at the end.
LONGEST_FIRST = (
    *WARM, "tests/harvest/test_ray.py", "tests/web/", "tests/adapters/keras/test_unchanged.py",
    "tests/adapters/torch/compile/", "tests/test_repository.py",
    "tests/adapters/keras/", "tests/diagnose/", "tests/store/test_fuzz.py", "tests/store/test_killed.py",
    "tests/test_examples.py", "tests/adapters/",
)  # fmt: skip


# What needs a framework besides PyTorch, or uses all of them: importing them takes a worker as long as fifty tests, so
# `make unit` has one worker for these and others for the rest, which never import them. Ray is there because it waits,
# as browsers do in the other half.
OTHER_FRAMEWORKS = (
    "tests/adapters/jax", "tests/adapters/keras", "tests/adapters/onnx", "tests/adapters/numpy", "tests/adapters/test_",
    "tests/diff/test_ports.py", "tests/harvest/test_frameworks.py", "tests/harvest/test_ray.py", "tests/integrations",
    "tests/test_docs.py", "tests/test_docstrings.py", "tests/test_examples.py", "tests/test_recipes.py",
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses one of the two halves of the suite."""
    parser.addoption("--half", choices=("torch", "others"), help="only tests without, or with, other frameworks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of the other half."""
    half = config.getoption("--half")
    if half is None or not collection_path.is_relative_to(ROOT):
        return None
    others = str(collection_path.relative_to(ROOT)).startswith(OTHER_FRAMEWORKS)
    left_out = others if half == "torch" else not others and collection_path.is_file()
    return True if left_out else None


def unit_of(nodeid: str) -> str:
    """Return what one worker runs as a whole: what is warm, or the folder or the file of a test."""
    path = nodeid.partition("::")[0]
    if path.startswith(WARM):
        return "warm"
    return next((folder for folder in TOGETHER if path.startswith(folder)), path)


class FileScheduling(LoadScopeScheduling):
    """Give each worker whole files, in the order of collection.

    `--dist loadgroup` and its marks would do, but pytest-xdist 3.8 loses them with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Schedule by file, in our order instead of by the number of tests."""
    config.option.loadscopereorder = False
    return FileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first."""

    def place(item: pytest.Item) -> int:
        return next((i for i, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start)), len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Take what the frameworks loaded out of the garbage collector's sight: it looked through all of it each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a twentieth of the suite went into looking for garbage


def pytest_configure() -> None:
    """Let the tests send Ctrl-C to their own processes, also when the suite runs in the background.

    A shell that is not interactive starts background jobs with SIGINT ignored, and every process that they start
    inherits that; one that has a handler is started with the default.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
