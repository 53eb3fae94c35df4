"""Let the contenders of benchmarks/harvest.py take turns, and print how they compare with the bare forward pass."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Run = Callable[[Path], object]


def compare(taking_part: dict[str, Run], rounds: int, tokens: int) -> None:
    """Print the throughput of contenders relative to the bare forward pass, which runs before and after each."""
    bare = taking_part.pop("bare forward")
    found: dict[str, list[tuple[float, Seconds]]] = {each: [] for each in taking_part}
    for _ in range(rounds):
        before = seconds_of(bare)
        for each, run in list(taking_part.items()):
            try:
                own = seconds_of(run)
            except Exception as error:
                print(f"{each} failed and is left out: {type(error).__name__}: {str(error)[:100]}")
                del taking_part[each], found[each]
                continue
            after = seconds_of(bare)
            ratio = Seconds((before.wall + after.wall) / 2 / own.wall, (before.cpu + after.cpu) / 2 / own.cpu)
            found[each].append((own.wall, ratio))
            print(f"    {each:<26} {own.wall:6.2f} s, bare {before.wall:.2f} and {after.wall:.2f} s", flush=True)
            before = after
    for each, runs in found.items():
        rate = tokens / statistics.median(own for own, _ in runs)
        line = f"{told([ratio.wall for _, ratio in runs])} of the bare forward"
        print(f"  {each:<27} {rate:>7,.0f} tokens/s {line}; of its CPU time {told([ratio.cpu for _, ratio in runs])}")


def told(ratios: list[float]) -> str:
    """The median, and all of them."""
    return f"{statistics.median(ratios):5.2f} ({' '.join(f'{ratio:.2f}' for ratio in ratios)})"


class Seconds(NamedTuple):
    """By the clock, and of the processors."""

    wall: float
    cpu: float


def seconds_of(run: Run) -> Seconds:
    """How long a contender takes, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        begun, worked = time.perf_counter(), time.process_time()
        run(Path(folder) / "acts")
        return Seconds(time.perf_counter() - begun, time.process_time() - worked)


def warm_up(taking_part: dict[str, Run]) -> None:
    """Run every contender once with little data: it imports and compiles what it needs."""
    for run in taking_part.values():
        with contextlib.suppress(Exception):  # it is told of when it is measured
            seconds_of(run)
