"""What `tap.step()` takes: microseconds at the end of a step, by how many rows it has.

    python benchmarks/closing.py [--steps N] [--clock wall|cpu]

"alone" closes one step after the other, so that our code stays in the processor's caches. "in a training" closes after
a training step of 100 × (Linear 64 + ReLU), which has used the caches for itself meanwhile; the rows are filled in
before that, so that both columns close the same. Below each stands the floor: appending as many bytes to a file in the
same place. Printed are the median and the quartiles. `--clock cpu` counts the processor's time of the calling thread:
for a machine that other work shares. Exits with 1 when closing alone takes longer than promised.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from models import Workload, workload

import tensortap as tt

UNOBSERVED_LIMIT: Final = 20.0  # µs
LIMIT: Final = (60.0, 0.1)  # µs, and for each row
ROWS: Final = (1, 50, 200, 1000)
Between = Callable[[], None]
CLOCKS: Final[dict[str, Callable[[], int]]] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
clock = CLOCKS["wall"]


def spread(times: list[int]) -> str:
    """The median and the quartiles, in microseconds."""
    low, median, high = statistics.quantiles([time / 1e3 for time in times], n=4)
    return f"{median:7.1f} ({low:.1f} to {high:.1f})"


def timed(call: Callable[[], object], before: Callable[[], None], steps: int) -> list[int]:
    """Nanoseconds of each call, without the first ones."""
    times = []
    for _ in range(steps + 5):
        before()
        begin = clock()
        call()
        times.append(clock() - begin)
    return times[5:]


def observed(rows: int, between: Between, steps: int) -> tuple[list[int], int]:
    """Close steps of so many rows; also how many bytes one of them appends."""
    value = np.arange(64, dtype=np.float32)
    address = value.ctypes.data
    with (
        tempfile.TemporaryDirectory() as folder,
        tt.watch(tt.probe("**", keep=tt.stats()), to=f"{folder}/run") as watching,
    ):
        for i in range(rows):
            tt.tap(value, f"site/{i}")
        watching.step()

        def fill() -> None:
            record = watching.recorder.current.table.record
            for key in range(rows):
                record(key, 1, 0, 0, 1, address, value.shape, None)
            between()

        size = _tail_size(folder)
        fill()
        watching.step()
        size = _tail_size(folder) - size
        return timed(watching.step, fill, steps), size


def _tail_size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder, "run", "rank=0").glob("_tail-*.arrows"))


def unobserved(between: Between, steps: int) -> list[int]:
    """Close steps that no probe wants."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tt.watch(tt.probe("**", when=tt.at([10**9])), to=f"{folder}/run") as tap,
    ):
        return timed(tap.step, between, steps)


def unobserved_model(steps: int) -> list[int]:
    """The same for a tap on the model that is trained, where hooks come and go."""
    load = workload("tiny")
    train = training(load)
    with (
        tempfile.TemporaryDirectory() as folder,
        tt.watch(load.model, tt.probe("**", when=tt.at([10**9])), to=f"{folder}/run") as tap,
    ):
        return timed(tap.step, train, steps)


def appended(size: int, between: Between, steps: int) -> list[int]:
    """The floor: append as many bytes."""
    data = bytes(size)
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        return timed(lambda: os.write(file.fileno(), data), between, steps)


def training(load: Workload) -> Between:
    """A training step of a model."""
    optimizer = torch.optim.SGD(load.model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        load.loss(load.model).backward()
        optimizer.step()

    return step


def main() -> int:
    """Print the table; 1 when a limit is missed."""
    global clock
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    asked = parser.parse_args()
    steps, clock = asked.steps, CLOCKS[asked.clock]
    torch.set_num_threads(1)
    train, alone = training(workload("tiny")), lambda: None
    print(f"{'':34} {'alone':>26}   in a training", flush=True)
    times = unobserved(alone, steps)
    missed = statistics.median(times) / 1e3 > UNOBSERVED_LIMIT
    print(f"{'not observed':34} {spread(times):>26}   {spread(unobserved(train, steps))}", flush=True)
    print(f"{'not observed, a tap on the model':34} {'':26}   {spread(unobserved_model(steps))}", flush=True)
    for rows in ROWS:
        times, size = observed(rows, alone, steps)
        late = statistics.median(times) / 1e3 > LIMIT[0] + LIMIT[1] * rows
        missed |= late
        inside = spread(observed(rows, train, steps)[0])
        print(f"{f'{rows} rows':34} {spread(times):>26}   {inside}{'   MISSED' * late}", flush=True)
        floors = [spread(appended(size, between, steps)) for between in (alone, train)]
        print(f"{f'  floor: {size / 1e3:.1f} kB appended':34} {floors[0]:>26}   {floors[1]}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
