"""How cost grows: the exponent of seconds against modules, parameters, steps, records and ranks.

    python benchmarks/scaling.py [--what NAME]… [--quick]

Each row is measured at several sizes, in CPU seconds, so that other processes disturb it little; the smallest of
several repetitions counts. Steps with and without taps take turns, small models more often, and what taps add is the
median of the differences: it is a tenth of a step, and the smallest of each do not belong together. What was there
before is frozen (`gc.freeze`): otherwise one full collection, of whatever the process has imported, makes a jump
between two sizes. The exponent is the slope of a line through the logarithms: 1 is linear. Exits with 1 when one is
above 1.15.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import nn

import tensortap as tt

LIMIT: Final = 1.15
BLOCKS: Final = (250, 500, 1000, 2000)
STEPS: Final = (100, 200, 400, 800)
RANKS: Final = (4, 8, 16, 32)
ROUNDS: Final = 12  # of a step with taps and one without, in turn, for the largest model
Measure = Callable[[int], float]


class Block(nn.Module):
    """Three modules and two parameters: a linear layer, its activation, and the block around them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        out: torch.Tensor = self.act(self.fc(x))
        return out


def model_of(blocks: int) -> nn.Sequential:
    """A chain of blocks."""
    return nn.Sequential(*(Block() for _ in range(blocks)))


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    gc.collect()
    gc.freeze()
    begin = time.process_time()
    function()
    return time.process_time() - begin


def attach(blocks: int) -> float:
    """Put taps on every module and take them off."""
    model = model_of(blocks)
    return min(seconds(lambda: tt.watch(model, "**:*", to=tt.Memory()).close()) for _ in range(3))


def training_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return what trains a model by one step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def a_step(*patterns: str) -> Measure:
    """What observing adds to a training step."""

    def measure(blocks: int) -> float:
        observed, bare, x = model_of(blocks), model_of(blocks), torch.randn(2, 4)
        step_observed, step_bare = training_step(observed, x), training_step(bare, x)
        added = []
        with tt.watch(observed, *patterns, to=tt.Memory()) as tap:
            for _ in range(ROUNDS * BLOCKS[-1] // blocks):  # a machine that is slow for a while is slow for both
                with_taps = seconds(lambda: (step_observed(), tap.step(), tap.flush()))  # the writer's part too
                added.append(with_taps - seconds(step_bare))
        return max(statistics.median(added), 1e-6)

    return measure


def record_steps(steps: int) -> float:
    """Record a run of so many steps to disk."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds(lambda: _write(f"{folder}/run", steps, 50))


def read_steps(steps: int) -> float:
    """Open such a run and read all of it, and one site's series."""
    with tempfile.TemporaryDirectory() as folder:
        _write(f"{folder}/run", steps, 50)
        return min(seconds(lambda: _read(f"{folder}/run")) for _ in range(3))


def read_records(sites: int) -> float:
    """Open a run of few steps and many sites, and read all of it."""
    with tempfile.TemporaryDirectory() as folder:
        _write(f"{folder}/run", 20, sites)
        return min(seconds(lambda: _read(f"{folder}/run")) for _ in range(3))


def merge_ranks(ranks: int) -> float:
    """Merge the rows of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            _write(f"{folder}/run", 5, 50, rank=rank)
        return min(seconds(lambda: tt.open_run(f"{folder}/run").merged("ranks")) for _ in range(3))


def _write(path: str, steps: int, sites: int, rank: int = 0) -> None:
    values = [np.full(8, i, np.float32) for i in range(sites)]
    with tt.watch("**", to=path, rank=rank, resume=rank > 0) as watching:
        for _ in range(steps):
            for i, value in enumerate(values):
                tt.tap(value, f"site/{i}")
            watching.step(loss=1.0)


def _read(path: str) -> None:
    run = tt.open_run(path)
    run.table()
    run.series("site/1", "mean")


MEASURES: Final[dict[str, tuple[Measure, Sequence[int]]]] = {
    "attach, by modules": (attach, BLOCKS),
    "a step with outputs, by modules": (a_step("**"), BLOCKS),
    "a step with :grad_output, by modules": (a_step("**:grad_output"), BLOCKS),
    "a step with :param, by parameters": (a_step("**:param"), BLOCKS),
    "a step with :grad, by parameters": (a_step("**:grad"), BLOCKS),
    "a step with :update, by parameters": (a_step("**:update"), BLOCKS),
    "recording, by steps": (record_steps, STEPS),
    "reading, by steps": (read_steps, STEPS),
    "reading, by records a step": (read_records, BLOCKS),
    "merging, by ranks": (merge_ranks, RANKS),
}


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of the costs over the sizes, both as logarithms."""
    return float(np.polyfit([math.log(size) for size in sizes], [math.log(cost) for cost in costs], 1)[0])


def main() -> int:
    """Print the table; return 1 when a cost grows faster than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", action="append", choices=list(MEASURES))
    parser.add_argument("--quick", action="store_true", help="three smaller sizes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    print(f"{'what':40} {'exponent':>8}   milliseconds at each size")
    for name in asked.what or MEASURES:
        measure, sizes = MEASURES[name]
        sizes = sizes[:3] if asked.quick else sizes
        measure(sizes[0])  # what is done once only
        gc.collect()
        costs = [measure(size) for size in sizes]
        slope = exponent(sizes, costs)
        bad += slope > LIMIT
        shown = "  ".join(f"{size}: {cost * 1e3:.1f}" for size, cost in zip(sizes, costs, strict=True))
        print(f"{name:40} {slope:8.2f}{' !' if slope > LIMIT else '  '} {shown}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
