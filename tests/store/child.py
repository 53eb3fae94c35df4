"""A template process for tests that kill: it imports everything once, then forks a child for every order it reads.

Every line of standard input is an order in JSON. The template answers `pid <n>`, the child writes the number of each
step after it was handed over, and when the child has ended, however it did, the template writes `end <code>`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.record import writer as writing
from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.step import Step
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import histogram, quantiles, rows, sample
from tensortap.select.probes import probe
from tensortap.select.triggers import every
from tensortap.store import folder, tail
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.types import Place

PLACES = (Place("stem"), Place("blocks.0.mlp", "input"), Place("blocks.0.mlp"), Place("head", "output", "[1]"))
DTYPES = (np.float32, np.float64, np.float16, np.int32)


def tensors(seed: int, step: int) -> Iterator[tuple[Place, np.ndarray[Any, Any]]]:
    """What a step sees: a pure function of seed and step."""
    rng = np.random.default_rng((seed, step))
    for place, dtype in zip(PLACES, DTYPES, strict=True):
        for _ in range(1 + (step + len(place.site)) % 2):
            x = rng.normal(size=(3, int(rng.integers(1, 40)))) * 10.0 ** rng.integers(-3, 4)
            x[0, 0] = rng.choice([0.0, np.nan, np.inf, 1.0]) if dtype is not np.int32 else 0.0
            yield place, x.astype(dtype)


def recorder_of(start: int, counters: Counters | None = None, rank: int = 0) -> Recorder:
    """A recorder with rows, histograms, numbers and small tensors; its clock stands still."""
    probes = [
        probe("**", keep=[histogram(), sample(3), rows([0])]),
        probe("**", keep=[quantiles(0.5), largest], when=every(2)),  # without numbers C appends the rows
    ]
    return Recorder(probes, start=start, counters=counters, clock=lambda: 1e9, rank=rank)


def largest(x: Any) -> float:
    return float(np.nanmax(np.where(np.isfinite(x), x, np.nan)))


def record(recorder: Recorder, seed: int) -> list[Step]:
    """One step of the recorder."""
    number = recorder.current.number
    for place, x in tensors(seed, number):
        recorder.observe(recorder.point(place, 3), buffer_of(x), x)
    return recorder.close({"loss": number / 3, "seed": seed}, phase="train")


def write(path: str, seed: int, start: int, stop: int, resume: bool, rank: int = 0, close: bool = True) -> None:
    """Record steps into a run, and say of each that it was handed over."""
    counters = Counters()
    recorder = recorder_of(start, counters, rank)
    run = RunFolder(path, resume=resume, counters=counters, rank=rank, launch="test")
    writer = Writer([run], counters=counters, release=recorder.release)
    for number in range(start, stop):
        for step in record(recorder, seed):
            writer.put(step)
        os.write(1, b"%d\n" % number)
    if close:
        writer.close()
    os._exit(0)


def train(path: str, start: int, stop: int, resume: bool) -> None:
    """Train a compiled model under a tap, and say of each step that it has returned."""
    import torch

    import tensortap as tt

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(compiled, tt.probe("**", keep=[histogram(), sample(3)]), to=path, resume=resume) as tap:
        for number in range(start, stop):
            loss = compiled(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tap.step(loss=float(loss.detach()))
            os.write(1, b"%d\n" % number)
    os._exit(0)


ORDERS: dict[str, Callable[..., None]] = {"write": write, "compact": lambda path: compact(path), "train": train}
VISIBLE = frozenset(("os.remove", "os.rename", "os.link"))
CHANGES = VISIBLE | {"os.mkdir", "os.rmdir", "os.chmod"}


def die_at(change: int, visible: bool) -> None:
    """Kill this process before its `change`-th change to any file: a rename, a removal, a new file, a write.

    Each write is two changes: before it, and after half of its bytes. With `visible` only renames and removals count:
    between two of them readers see the same files.
    """
    count, write_all = 0, os.write

    def reached() -> bool:
        nonlocal count
        count += 1
        return count == change

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (event in VISIBLE or (not visible and (event in CHANGES or opened))) and reached():
            os.kill(os.getpid(), signal.SIGKILL)

    def write_or_die(fd: int, data: Any) -> int:
        if fd > 2 and reached():
            os.kill(os.getpid(), signal.SIGKILL)
        if fd > 2 and reached():
            write_all(fd, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_all(fd, data)

    def write_parts(fd: int, parts: Any) -> int:
        return write_or_die(fd, b"".join(parts))

    def write_rows(file: Any, write: Callable[[bytearray, int], int], into: bytearray) -> None:
        write(into, -1)  # C makes the message, and would write it too
        file.write(into)

    if not visible:
        os.write, os.writev = write_or_die, write_parts
        tail.TailFile.write_by = write_rows  # type: ignore[method-assign]
    sys.addaudithook(hook)


def serve() -> None:
    """The template's life."""
    importlib.import_module("pyarrow.dataset")  # compaction needs it, and each child would import pandas with it
    folder.SEAL_ROWS = 40  # type: ignore[misc]
    writing._TICK_SECONDS = 0.002  # type: ignore[misc]
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            if change := order.pop("die_at", 0):
                die_at(change, order.pop("visible", False))
            ORDERS[order.pop("do")](**order)
            os._exit(0)
        os.write(1, b"pid %d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(1, b"end %d\n" % os.waitstatus_to_exitcode(status))


class Template:
    """The template process as a test sees it.

    `begin` gives an order, `lines` are what the child writes. An order with `die_at` ends before that change to a file.
    """

    def __init__(self, cwd: Path) -> None:
        self.exit_code = 0
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)  # noqa: PTH100
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip

    def begin(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """`pid <n>`, then step numbers, until the child has ended; then `exit_code` tells how."""
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline().strip()).startswith("end"):
            assert line, "the template process is gone"
            yield line
        self.exit_code = int(line.split()[1])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


if __name__ == "__main__":
    serve()
