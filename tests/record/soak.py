"""Record 20,000 steps, and see whether memory, open files and the time of a step stay what they are.

    python tests/record/soak.py 20000        # `make soak`

A small PyTorch model is trained and watched with statistics, histograms and gradients, and its tails are sealed as in
any run. The quarters of the run are compared, the first left out for warming up. Exits with 1 when the last quarter
uses 5 % more memory than the second in the median, has more files open, or takes 25 % longer for the median step.
Memory goes up and down by a quarter while tails are sealed; so what it is at the end of a quarter, by which this was
judged before, is printed and decides nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import tensortap as tt

MORE_MEMORY = 1.05
LONGER = 1.25
BETWEEN = 20  # steps from one look at the memory to the next


class Quarter(NamedTuple):
    """What a quarter of the steps used: the median memory; memory, files and threads at its end; the median step."""

    median_megabytes: float
    megabytes: float
    files: int
    threads: int
    milliseconds: float


def used() -> tuple[float, int, int]:
    """Return the memory of this process in megabytes, its open files and its threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, files, threads


def soak(steps: int, path: str) -> list[Quarter]:
    """Train as many steps and return what each quarter used."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters())
    quarters, took, memory = list[Quarter](), list[float](), list[float]()
    keep = [tt.stats(), tt.histogram()]
    with tt.watch(model, tt.probe("**", keep=keep), tt.probe("**:grad", keep=keep), to=path) as tap:
        for step in range(steps):
            begin = time.perf_counter()
            loss = nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.randint(8, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.step(loss=loss)
            took.append(time.perf_counter() - begin)
            if step % BETWEEN == 0:
                memory.append(used()[0])
            if len(took) == steps // 4:
                quarters.append(Quarter(statistics.median(memory), *used(), statistics.median(took) * 1e3))
                print(f"step {step + 1}: {quarters[-1]}", flush=True)
                took, memory = [], []
    opened = tt.open(path)
    assert opened.steps == list(range(steps)) and opened.counts == {}, opened.counts
    return quarters


def main(steps: int) -> int:
    """Soak, and say what has grown."""
    with tempfile.TemporaryDirectory() as folder:
        _, second, _, last = soak(steps, f"{folder}/run")
    grown = [
        name
        for name, more in (
            ("memory", last.median_megabytes > MORE_MEMORY * second.median_megabytes),
            ("open files", last.files > second.files + 1),
            ("threads", last.threads > second.threads),
            ("the time of a step", last.milliseconds > LONGER * second.milliseconds),
        )
        if more
    ]
    print(f"grown: {', '.join(grown)}" if grown else f"{steps} steps, flat")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
