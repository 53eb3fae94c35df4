"""How long reading a long run takes, and how much memory: 5 M records of 1,000 sites, and 64 ranks.

    python benchmarks/reading.py                    # a few minutes, 4 GB of disk for a while
    python benchmarks/reading.py --quick            # a tenth of it, for a look
    python benchmarks/reading.py --keep /tmp/runs   # leave the runs there, and use them the next time

Every command runs in a process of its own; the time is that of the clock from its start to its end, the memory its
peak. Where other work takes part of the CPUs the seconds of CPU are printed beside it. Exits with 1 when a figure is
missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import histogram, stats
from tensortap.select.probes import probe
from tensortap.store.folder import RunFolder
from tensortap.types import Place

SITES = 1000
RECORDS = 5_000_000
ELEMENTS = 64
RANKS = 64
MEGABYTES = 1000
LAYERS = ("attn", "mlp", "norm", "proj", "act")
NAMES = ("show", "check", "findings", "report", "diff", "copied", "other", "merged")
_TOOL = "import sys; from tensortap.cli.app import cli; cli(sys.argv[1:])"
_FINDINGS = "import sys, tensortap as tt; tt.open(sys.argv[1]).findings()"
_MERGED = "import sys, tensortap as tt; assert tt.open(sys.argv[1]).merged('ranks').num_rows"


class Reading(NamedTuple):
    """A way to read a run, and within how many seconds."""

    name: str
    code: str
    arguments: tuple[str, ...]
    seconds: float


class Taken(NamedTuple):
    """What a process took."""

    clock: float
    cpu: float
    megabytes: float


def record(path: Path, sites: int, steps: int, rank: int = 0, seed: int = 0) -> None:
    """Record steps of small tensors, with statistics and histograms, through the store's own writer."""
    counters = Counters()
    recorder = Recorder([probe("**", keep=[stats(), histogram()])], counters=counters, rank=rank)
    folder = RunFolder(path, counters=counters, rank=rank, launch="benchmark")
    writer = Writer([folder], counters=counters, release=recorder.release)
    points = [recorder.point(Place(f"blocks.{i // 5}.{LAYERS[i % 5]}"), 1) for i in range(sites)]
    rng = np.random.default_rng(seed)
    pool = rng.normal(size=1 << 16).astype(np.float32)
    buffers = [buffer_of(pool[start : start + ELEMENTS]) for start in range(0, pool.size - ELEMENTS, 16)]
    for number in range(steps):
        first = int(rng.integers(0, len(buffers) - sites))
        for point, buffer in zip(points, buffers[first : first + sites], strict=True):
            recorder.observe(point, buffer)
        for step in recorder.close({"loss": 1.0 / (number + 1)}, phase="train"):
            writer.put(step)
    writer.close()
    assert counters.counts() == {}, counters.counts()


def run_of(work: Path, name: str, sites: int, steps: int, ranks: int = 1, seed: int = 0) -> str:
    """Return a run of this size, recorded now unless it is there already."""
    path = work / f"{name}-{sites}-{steps}-{ranks}"
    if not path.exists():
        begin = time.perf_counter()
        for rank in range(ranks):
            record(path, sites, steps, rank, seed=seed + rank)
        print(
            f"({name}: {sites * steps * ranks:,} records recorded in {time.perf_counter() - begin:.0f} s)", flush=True
        )
    return str(path)


def copied(run: str, path: Path) -> str:
    """Return a copy of a run, made now unless it is there already: every row is equal, and nothing says so."""
    if not path.exists():
        shutil.copytree(run, path)
    return str(path)


def measure(code: str, arguments: tuple[str, ...]) -> Taken:
    """Run Python code in a process of its own."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1), f"{arguments}: {os.waitstatus_to_exitcode(status)}"
    return Taken(time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> int:
    """Record, read in every way, and hold the figures against what was promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records")
    parser.add_argument("--keep", metavar="FOLDER", help="where to leave the runs")
    parser.add_argument("--only", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    given = parser.parse_args()
    work = Path(given.keep or tempfile.mkdtemp(prefix="tensortap-reading-"))
    work.mkdir(parents=True, exist_ok=True)
    steps = RECORDS // SITES // (10 if given.quick else 1)
    met = True
    try:
        report = str(work / "report.html")
        long = "" if given.only == "merged" else run_of(work, "long", SITES, steps)
        readings = [
            Reading("show", _TOOL, ("show", long), 3),
            Reading("check", _TOOL, ("check", long), 15),
            Reading("findings", _FINDINGS, (long,), 15),
            Reading("report", _TOOL, ("report", long, "-o", report, "--overwrite"), 20),
            Reading("diff", _TOOL, ("diff", long, long), 20),
        ]
        if given.only in (None, "copied"):
            readings.append(Reading("copied", _TOOL, ("diff", long, copied(long, Path(f"{long}-copied"))), 20))
        if given.only in (None, "other"):
            other = run_of(work, "other", SITES, steps, seed=1)
            readings.append(Reading("other", _TOOL, ("diff", long, other), 20))
        if given.only in (None, "merged"):
            ranks = run_of(work, "ranks", 50, 100, RANKS)
            readings.append(Reading("merged", _MERGED, (ranks,), 2))
        for reading in readings:
            if given.only in (None, reading.name):
                met &= told(reading, measure(reading.code, reading.arguments))
    finally:
        if not given.keep:
            shutil.rmtree(work)
    return 0 if met else 1


def told(reading: Reading, taken: Taken) -> bool:
    """Print one figure, and whether it is within its limits."""
    met = taken.clock <= reading.seconds and taken.megabytes <= MEGABYTES
    busy = f"  ({taken.cpu:.1f} s of CPU)" if os.getloadavg()[0] > 1.5 else ""
    print(
        f"{reading.name:<10} {taken.clock:>8.1f} s ≤ {reading.seconds:>4.0f} s   {taken.megabytes:>8.0f} MB ≤ "
        f"{MEGABYTES} MB   {'ok' if met else 'MISSED'}{busy}",
        flush=True,
    )
    return met


if __name__ == "__main__":
    sys.exit(main())
