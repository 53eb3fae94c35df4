"""How fast the recorder and the store are, and how much room they take.

    python benchmarks/store.py            # all of it: a few minutes, 3 GB of disk for a while
    python benchmarks/store.py --quick    # smaller, for a look
    python benchmarks/store.py --checksums  # only what checksums cost

One process on one CPU, the writer's thread included; sealing to Parquet is inside the measured time. On a quiet machine
rates are by the clock; where other work takes part of the CPU they are by seconds of CPU, all threads counted, and
those by the clock are printed beside them. Exits with 1 when a figure is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import Reducer, histogram, stats
from tensortap.reduce.statistics import STATISTICS
from tensortap.select.probes import probe
from tensortap.store import segments as seal
from tensortap.store.catalog import PLAIN_RECORDS
from tensortap.store.claim import describe_process
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.names import new_id, segment_name
from tensortap.store.run import open_run
from tensortap.store.tail import Tail
from tensortap.types import Buffer, Place

SITES = 250
SEGMENT, ROW_GROUP = 500_000, 16 * 1024  # as compact() has them
TURNS = 9
LAYERS = ("attn", "mlp", "norm", "proj", "act")


class Figure(NamedTuple):
    """One measured figure and its limit."""

    what: str
    measured: float
    limit: float
    unit: str
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it is within its limit."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        verdict = "ok" if self.met else "MISSED"
        return f"{self.what:<72} {self.measured:>12,.3g} {sign} {self.limit:>9,.3g} {self.unit:<9} {verdict}"


class Taken(NamedTuple):
    """Seconds from the first tensor until the run was sealed and closed: of the clock, and of the CPU."""

    clock: float
    cpu: float


def record(path: Path, buffers: list[Buffer], steps: int, keep: list[Reducer]) -> Taken:
    """Record steps into a run, all of it."""
    counters = Counters()
    recorder = Recorder([probe("**", keep=keep)], counters=counters)
    writer = Writer([RunFolder(path, counters=counters)], counters=counters, release=recorder.release)
    points = [recorder.point(Place(f"blocks.{i // 5}.{LAYERS[i % 5]}"), 1) for i in range(SITES)]
    groups = [buffers[i : i + SITES] for i in range(0, len(buffers), SITES)]
    observe, put = recorder.observe, writer.put
    begin, cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        for point, buffer in zip(points, groups[number % len(groups)], strict=True):
            observe(point, buffer)
        for step in recorder.close({"loss": 1.0}, phase="train"):
            put(step)
    writer.close()
    taken = Taken(time.perf_counter() - begin, time.process_time() - cpu)
    assert counters.counts() == {}, counters.counts()
    return taken


def windows(elements: int, count: int) -> list[Buffer]:
    """Tensors that are all different and yet in the processor's cache, as a layer's output is when it is tapped."""
    rng = np.random.default_rng(0)
    pool = rng.normal(size=max(1 << 16, 4 * elements)).astype(np.float32)
    starts = rng.integers(0, (pool.size - elements) // 16, count) * 16
    return [buffer_of(pool[start : start + elements]) for start in starts]


def throughput(work: Path, name: str, elements: int, records: int, keep: list[Reducer], limit: float) -> Figure:
    """Records a second, from the first tensor to the last sealed segment."""
    buffers, steps = windows(elements, 40 * SITES), records // SITES
    record(work / f"{name}-warm", buffers, steps // 10, keep)
    taken = record(work / name, buffers, steps, keep)
    what = f"{name}: {SITES} float32 tensors of {elements} elements a step"
    done = steps * SITES
    if not busy():
        return Figure(what, done / taken.clock, limit, "records/s", True)
    print(f"{name}: {done / taken.clock:,.0f} records/s by the clock, {done / taken.cpu:,.0f} a second of CPU")
    return Figure(what, done / taken.cpu, limit, "records/s", True)


def checksums(work: Path, name: str, elements: int, records: int, keep: list[Reducer]) -> Figure:
    """How much longer recording takes with checksums than without, in seconds of CPU, turn by turn."""
    buffers, taken = windows(elements, SITES), dict[bool, list[float]]({True: [], False: []})
    for turn in range(2 * TURNS):
        checked = turn % 2 == 0
        with contextlib.nullcontext() if checked else without_checksums():
            path = work / f"checks-{turn}"
            taken[checked].append(record(path, buffers, records // SITES, keep).cpu)
            shutil.rmtree(path)
    more = [with_ / without - 1 for with_, without in zip(taken[True], taken[False], strict=True)]
    print(f"({name}, turn by turn: {', '.join(f'{100 * one:+.1f} %' for one in more)})")
    return Figure(f"cost of checksums, {name}", 100 * statistics.median(more), 2, "%", at_least=False)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Write neither checksums of messages, nor of pages, nor of footers."""
    plain = functools.partial(pq.ParquetWriter, write_page_checksum=False)
    with (
        mock.patch.object(Tail, "write_checks", lambda tail: None),
        mock.patch.object(seal, "add_footer_checksum", lambda path: None),
        mock.patch.object(seal.pq, "ParquetWriter", lambda *given, **named: plain(*given, **_unchecked(named))),
    ):
        yield


def _unchecked(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name != "write_page_checksum"}


def busy() -> bool:
    """Whether other work takes part of the CPUs."""
    return os.getloadavg()[0] > 1.5


def room(work: Path, steps: int) -> Figure:
    """Bytes a record with histogram: activations, ReLU outputs, gradients and weights of 2 k to 256 k elements."""
    rng = np.random.default_rng(1)
    pool = rng.normal(size=1 << 20).astype(np.float32)
    heavy = (pool * rng.exponential(size=pool.size)).astype(np.float32)
    sizes, scales = 2.0 ** rng.uniform(11, 18, SITES), 10.0 ** rng.uniform(-2, 1, SITES)
    recorder = Recorder([probe("**", keep=[stats(), histogram()])])
    writer = Writer([RunFolder(work / "room")], release=recorder.release)
    for number in range(steps):
        for i in range(SITES):
            start = int(rng.integers(0, pool.size - int(sizes[i])))
            x = (heavy if i % 4 == 2 else pool)[start : start + int(sizes[i])]
            x = x * np.float32(scales[i] * (1 + 0.02 * rng.normal())) + np.float32(0.1 * (i % 7) + number / 1000)
            x = np.maximum(x, 0) if i % 4 == 1 else x
            recorder.observe(recorder.point(Place(f"blocks.{i // 5}.{LAYERS[i % 5]}"), 1), buffer_of(x))
        for step in recorder.close({"loss": 1.0}, phase="train"):
            writer.put(step)
    writer.close()
    size = sum(p.stat().st_size for p in (work / "room").rglob("*") if p.is_file())
    what = "room on disk: a record with histogram, tensors of 2 k to 256 k elements"
    return Figure(what, size / steps / SITES, 260, "bytes", False)


def opening(work: Path, records: int) -> list[Figure]:
    """Seconds to open a compacted run and read one site's series, from a cold start of the reader."""
    path = work / "large"
    build(path, records)
    begin = time.perf_counter()
    run = open_run(path)
    series = run.series("blocks.7.attn", "std")
    taken = time.perf_counter() - begin
    assert len(series.steps) == records // SITES
    begin = time.perf_counter()
    run.series("blocks.9.mlp", "mean")
    again = time.perf_counter() - begin
    what = f"open a compacted run of {records / 1e6:.3g} M records, read one site's series"
    return [Figure(what, taken, 1.0, "s", False), Figure("… another site of it", again, 1.0, "s", False)]


def build(path: Path, records: int) -> None:
    """A run of so many records, laid out as `compact` lays it out: segments sorted by site, then by step."""
    rng = np.random.default_rng(2)
    record(path, windows(2048, 40 * SITES), 40, [stats(), histogram()])
    places = sorted(open_run(path).places)
    [small] = path.glob("rank=0/seg-*.parquet")
    schema = PLAIN_RECORDS.remove(PLAIN_RECORDS.get_field_index("rank"))
    steps = records // SITES
    block = open_run(path).table().select(schema.names)
    block = block.take(pa.array(rng.integers(0, len(block), steps))).combine_chunks()
    for first in range(0, steps, SEGMENT // SITES):
        part = block.slice(first, SEGMENT // SITES)
        rows = pa.concat_tables([of_site(part, place, first, rng) for place in places])
        said = {
            seal.PLACES: json.dumps([[*place, 0, len(part)] for place in places]).encode(),
            seal.STEPS: json.dumps([(first, first + len(part) - 1, 1)]).encode(),
        }
        with seal.segment_writer(small.with_name(segment_name(new_id())), schema) as writer:
            writer.add_key_value_metadata(said)
            writer.write_table(rows, row_group_size=ROW_GROUP)
    small.unlink()


def of_site(block: pa.Table, place: Place, first: int, rng: np.random.Generator) -> pa.Table:
    """The records of one site over some steps, with statistics of its own."""
    count = len(block)
    columns = {
        "step": pa.array(first + np.arange(count)),
        "site": pa.array([place.site]).take(pa.array(np.zeros(count, int))),
    }
    for name in STATISTICS:
        columns[name] = pa.array(block[name].to_numpy() * (1 + 0.01 * rng.normal(size=count)))
    for name, column in columns.items():
        block = block.set_column(block.schema.get_field_index(name), name, column)
    return block


def folding(work: Path, records: int) -> str:
    """How long compaction takes: said, not judged."""
    path = work / "many"
    record(path, windows(2048, 40 * SITES), records // SITES, [stats(), histogram()])
    begin = time.perf_counter()
    result = compact(path)
    return f"(compact: {result.rows:,} records in {result.before_files} files, {time.perf_counter() - begin:.1f} s)"


def main() -> int:
    """Measure, print, and say with the exit code whether every figure was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small version, for a look")
    parser.add_argument("--checksums", action="store_true", help="only what checksums cost")
    given = parser.parse_args()
    quick = given.quick
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if busy():
        print(f"the load is {os.getloadavg()[0]:.1f}: other work takes part of the CPU, so figures are lower bounds")
    work = Path(tempfile.mkdtemp(prefix="tensortap-bench-"))
    scale = 10 if quick else 1
    parts: list[Callable[[], Figure | list[Figure]]] = [
        lambda: throughput(work, "without histogram", 64, 2_000_000 // scale, [stats()], 300_000),
        lambda: throughput(work, "with histogram", 2048, 500_000 // scale, [stats(), histogram()], 80_000),
        lambda: checksums(work, "without histogram", 64, 300_000 // scale, [stats()]),
        lambda: checksums(work, "with histogram", 2048, 100_000 // scale, [stats(), histogram()]),
        lambda: room(work, 200 // scale),
        lambda: opening(work, 10_000_000 // scale),
    ]
    figures: list[Figure] = []
    try:
        for part in parts[2:4] if given.checksums else parts:
            measured = part()
            for figure in measured if isinstance(measured, list) else [measured]:
                print(figure, flush=True)
                figures.append(figure)
        if not given.checksums:
            print(folding(work, 400_000 // scale), flush=True)
    finally:
        shutil.rmtree(work)
    print(platform_line())
    return 0 if all(figure.met for figure in figures) else 1


def platform_line() -> str:
    """What it was measured on."""
    known = describe_process()
    return f"{known['platform']}, Python {known['python']}, pyarrow {known['versions'].get('pyarrow')}"


if __name__ == "__main__":
    sys.exit(main())
