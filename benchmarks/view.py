"""How quickly the viewer answers, how much memory it takes under load, and how heavy its page is.

    python benchmarks/view.py             # 10 M records, a minute of load: four minutes, 1 GB of disk for a while
    python benchmarks/view.py --quick     # 500 k records, five seconds of load, for a look
    python benchmarks/view.py --keep DIR  # leave the runs there, and use them the next time

The server is a process of its own, started anew for every cold figure, and asked over HTTP as the page asks it. The run
is 2 000 sites × 5 000 steps, once as `compact` leaves it and once as training leaves it. Exits with 1 when a figure is
missed; on a busy machine the clock measures the other work too.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import tensortap as tt
from tensortap.store import segments as seal
from tensortap.store.catalog import PLAIN_METRICS, PLAIN_RECORDS
from tensortap.store.folder import RunFolder
from tensortap.store.names import new_id, segment_name
from tensortap.view.report.report import report
from tensortap.view.server.launch import STATIC, built

PARTS = ("norm", "attn.qkv", "attn.proj", "mlp.up", "mlp.down")
FOLDED_ROWS, SEALED_ROWS, GROUP = 500_000, 50_000, 16 * 1024  # as compact() and the writer have them
AT_ONCE = 50
REPORT_LIMIT, PAGE_LIMIT, MEMORY_LIMIT = 5e6, 300e3, 1200


class Figure(NamedTuple):
    """One measured figure and its limit."""

    what: str
    measured: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether it is within its limit."""
        return self.measured <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.met else "MISSED"
        return f"{self.what:<64} {self.measured:>12,.4g} ≤ {self.limit:>9,.4g} {self.unit:<4} {verdict}"


def build(path: Path, sites: int, steps: int, *, folded: bool = True, seed: int = 0) -> None:
    """A finished run of sites × steps records, laid out as `compact` lays it out, or as training does.

    One that is there already is used.
    """
    if path.exists():
        return
    rng = np.random.default_rng(seed)
    RunFolder(path).close()
    places = [(f"layers.{i // 10}.{PARTS[i // 2 % 5]}", ("output", "grad_output")[i % 2]) for i in range(sites)]
    per_file = max(1, (FOLDED_ROWS if folded else SEALED_ROWS) // sites)
    for first in range(0, steps, per_file):
        write_records(path / "rank=0", places, first, min(per_file, steps - first), folded, rng)
    loss = 2.0 / np.sqrt(1 + np.arange(steps)) + 0.05 * rng.normal(size=steps)
    write_metrics(path / "metrics" / "rank=0", loss)


def write_records(
    folder: Path, places: list[tuple[str, str]], first: int, steps: int, folded: bool, rng: np.random.Generator
) -> None:  # fmt: skip
    """One segment: by site then step when folded, by step then site when not."""
    order = sorted(range(len(places)), key=lambda i: (*places[i], i)) if folded else range(len(places))
    site = np.repeat(order, steps) if folded else np.tile(order, steps)
    step = first + (np.tile(np.arange(steps), len(places)) if folded else np.repeat(np.arange(steps), len(places)))
    rows = _records(site, step, places, rng)
    said = seal.outline(rows)
    said |= {seal.REPLACES: json.dumps([new_id()]).encode(), **seal.says_by_place(rows)} if folded else {}
    with seal.segment_writer(folder / segment_name(new_id()), rows.schema) as writer:
        writer.add_key_value_metadata(said)
        writer.write_table(rows, row_group_size=GROUP if folded else len(rows))


def _records(site: Any, step: Any, places: list[tuple[str, str]], rng: np.random.Generator) -> pa.Table:
    schema = PLAIN_RECORDS.remove(PLAIN_RECORDS.get_field_index("rank"))
    count, numel = len(site), 4096
    std = (0.5 + (site % 17) / 8) * (1 + 0.2 * rng.normal(size=count)) * np.exp(-step / 20_000)
    std = np.abs(std)
    mean = 0.1 * rng.normal(size=count)
    known = {
        "step": pa.array(step, pa.int64()),
        "seq": pa.array(site, pa.int32()),
        "numel": pa.array(np.full(count, numel)),
        "zeros": pa.array(rng.integers(0, numel // 2, count)),
        "min": pa.array(mean - 3.5 * std), "max": pa.array(mean + 3.5 * std), "mean": pa.array(mean),
        "std": pa.array(std), "l1": pa.array(0.8 * std * numel), "l2": pa.array(np.hypot(std, mean) * 64),
        "time": pa.array(1_790_000_000_000_000 + step * 100_000).cast(schema.field("time").type),
        "shape": pa.array([[32, 128]]).take(pa.array(np.zeros(count, np.int32))),
    }  # fmt: skip
    words = {"site": [p[0] for p in places], "port": [p[1] for p in places], "phase": ["train"], "slot": [""],
             "op": [""], "dtype": ["float32"], "reason": ["every(1)"]}  # fmt: skip
    for name, values in words.items():
        code = site if len(values) > 1 else np.zeros(count, np.int64)
        known[name] = pa.array(values).take(pa.array(code))
    for name in ("nan", "posinf", "neginf", "call"):
        known[name] = pa.array(np.zeros(count, np.int64)).cast(schema.field(name).type)
    known["recomputed"] = pa.array(np.zeros(count, bool))
    columns = [known.get(field.name, pa.nulls(count, field.type)) for field in schema]
    return pa.table(columns, schema=schema)


def write_metrics(folder: Path, loss: Any) -> None:
    """One segment of one metric."""
    schema = PLAIN_METRICS.remove(PLAIN_METRICS.get_field_index("rank"))
    folder.mkdir(parents=True, exist_ok=True)
    known = {"step": pa.array(np.arange(len(loss))), "name": pa.array(["loss"] * len(loss)), "value": pa.array(loss)}
    columns = [known.get(field.name, pa.nulls(len(loss), field.type)) for field in schema]
    seal.write_segment(folder / segment_name(new_id()), pa.table(columns, schema=schema))


class Server:
    """A `tensortap view` of its own."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tensortap", "view", str(path), "--no-open"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = next(line for line in self.process.stdout if "http://" in line)
        self.port = int(re.search(r":(\d+)/", said)[1])  # type: ignore[index]

    def get(self, path: str) -> bytes:
        """An answer; raises when it is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {data[:200]!r}")
        return data

    def timed(self, path: str) -> float:
        """Seconds until an answer has come."""
        begin = time.perf_counter()
        self.get(path)
        return time.perf_counter() - begin

    @property
    def memory(self) -> float:
        """The most memory the process has taken, in MB."""
        said = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", said)[1]) / 1024  # type: ignore[index]


@contextmanager
def serving(path: Path) -> Iterator[Server]:
    """A server, ended afterwards."""
    server = Server(path)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(10)


def answers(path: Path, kind: str, steps: int) -> Iterator[Figure]:
    """The first heat map from a cold server, and zooms, each at a place not looked at before."""
    with serving(path) as server:
        cold = server.timed("/api/heat?stat=std&width=1200")
        yield Figure(f"first heat map, cold server, {kind}", cold, 1.5, "s")
        spans = [(steps // 10 * i, steps // 10 * i + steps // w) for i, w in enumerate((2, 3, 4, 8, 16), 1)]
        taken = [server.timed(f"/api/heat?stat=std&width=1200&from={a}&to={b}") for a, b in spans]
        yield Figure(f"a zoom, the slowest of {len(spans)}, {kind}", 1e3 * max(taken), 150, "ms")


_PAINT = """() => { const heat = document.querySelector(".heat"); return heat && +heat.dataset.drawn > 0; }"""


def painted(path: Path, kind: str) -> Iterator[Figure]:
    """Seconds from opening the page until the heat map is drawn, of a cold server, in a browser that is open."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None or not built():
        print("(no browser: the first paint was not measured)")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto("about:blank")
        with serving(path) as server:
            begin = time.perf_counter()
            page.goto(f"http://127.0.0.1:{server.port}/")
            page.wait_for_function(_PAINT, polling=10)
            yield Figure(f"first paint of the overview, cold server, {kind}", time.perf_counter() - begin, 1.5, "s")
        browser.close()


def compared(work: Path, sites: int, steps: int) -> Iterator[Figure]:
    """The first comparison of two recorded runs with histograms, that differ everywhere, by a cold server."""
    from reading import record  # tests load this file alone

    for seed, name in enumerate("ab"):
        if not (work / "pair" / name).exists():
            record(work / "pair" / name, sites, steps, seed=seed)
    with serving(work / "pair") as server:
        taken = server.timed("/api/diff?a=a&b=b")
    yield Figure(f"diff of two runs of {sites * steps:,} records, cold server", taken, 2.0, "s")


def load(path: Path, steps: int, seconds: float) -> Iterator[Figure]:
    """Fifty requests at a time: every one answered, memory bounded."""
    stats = ("std", "mean", "zeros", "l2", "min", "max")
    asked, failed, taken = [0], [0], []
    with serving(path) as server:
        until = time.monotonic() + seconds

        def ask(number: int) -> None:
            rng = np.random.default_rng(number)
            while time.monotonic() < until:
                first = int(rng.integers(0, steps))
                span = f"from={first}&to={first + int(rng.integers(1, steps))}&width=800"
                kind = rng.integers(0, 10)
                site = f"site=layers.{rng.integers(0, 20)}.norm%3Aoutput&{span}"
                path = f"/api/site?{site}" if kind == 0 else f"/api/heat?stat={rng.choice(stats)}&{span}&rows=0:500"
                begin = time.perf_counter()
                try:
                    server.get("/api/run" if kind == 1 else path)
                except Exception as error:
                    failed[0] += 1
                    print("failed:", error)
                taken.append(time.perf_counter() - begin)
                asked[0] += 1

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"({asked[0]} requests, median {1e3 * float(np.median(taken)):.0f} ms, slowest {max(taken):.1f} s)")
        yield Figure(f"{AT_ONCE} requests at a time for {seconds:.0f} s: failed", failed[0], 0, "")
        yield Figure("… the most memory the server took", server.memory, MEMORY_LIMIT, "MB")


def reported(work: Path, sites: int, steps: int) -> Iterator[Figure]:
    """The size of a report of a recorded run with histograms, and how long it takes to write: said, not judged."""
    if not (work / "recorded").exists():
        record_site_by_site(work / "recorded", sites, steps)
    if built():
        begin = time.perf_counter()
        done = report(str(work / "recorded"), str(work / "report.html"), overwrite=True)
        print(f"(report: {done.sites} of {done.of} sites in {time.perf_counter() - begin:.1f} s)")
        yield Figure(f"a report of {sites} sites × {steps} steps", done.bytes / 1e6, REPORT_LIMIT / 1e6, "MB")


def record_site_by_site(path: Path, sites: int, steps: int) -> None:
    """Record a run of larger tensors through `watch`, with histograms."""
    rng = np.random.default_rng(0)
    pool = rng.normal(size=1 << 16).astype(np.float32)
    with tt.watch(tt.probe("**", keep=tt.histogram()), to=path) as watching:
        for step in range(steps):
            for i in range(sites):
                start, scale = int(rng.integers(0, pool.size - 2048)), (1 + i % 7) * (1 + 0.1 * np.sin(step / 50 + i))
                tt.tap(pool[start : start + 2048] * np.float32(scale), f"layers.{i // 5}.{PARTS[i % 5]}")
            watching.step(loss=float(np.exp(-step / 300)))


def page() -> Iterator[Figure]:
    """What a browser fetches, compressed."""
    if not built():
        print("(the page is not built: make page)")
        return
    files = [file for file in STATIC.rglob("*") if file.is_file() and file.suffix != ".map"]
    weight = sum(len(gzip.compress(file.read_bytes(), 9)) for file in files)
    yield Figure("the page's weight, gzip", weight / 1e3, PAGE_LIMIT / 1e3, "kB")


def figures(work: Path, quick: bool) -> Iterator[Figure]:
    """Everything, one after the other."""
    sites, steps, seconds = (500, 1000, 5.0) if quick else (2000, 5000, 60.0)
    yield from page()
    yield from reported(work, *((40, 200) if quick else (200, 1000)))
    yield from compared(work, *((100, 1000) if quick else (500, 2000)))
    for kind, folded in (("compacted", True), ("as written", False)):
        build(work / kind, sites, steps, folded=folded)
        yield from answers(work / kind, kind, steps)
        yield from painted(work / kind, kind)
    yield from load(work / "compacted", steps, seconds)


def main() -> int:
    """Measure, print, and say with the exit code whether every figure was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small version, for a look")
    parser.add_argument("--keep", metavar="FOLDER", help="where to leave the runs")
    given = parser.parse_args()
    if os.getloadavg()[0] > 1:
        print(f"the load is {os.getloadavg()[0]:.1f}: other work takes part of the CPU, so these are upper bounds")
    work = Path(given.keep or tempfile.mkdtemp(prefix="tensortap-view-"), "quick" if given.quick else "whole")
    work.mkdir(parents=True, exist_ok=True)
    met = True
    try:
        for figure in figures(work, given.quick):
            print(figure, flush=True)
            met &= figure.met
    finally:
        if not given.keep:
            shutil.rmtree(work.parent)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
