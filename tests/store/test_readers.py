"""Readers beside a writer see whole steps, and never fewer than before, through rotation, sealing and compaction."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tensortap.record import writer as writing
from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import histogram, sample
from tensortap.select.probes import probe
from tensortap.store import folder
from tensortap.store.compact import compact
from tensortap.store.run import open_run
from tensortap.types import Place

ROWS = 5
STEPS = 150

READER = """
import json, sys
from collections import Counter
from tensortap.store.run import open_run
path, steps, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
run, seen, looks = None, 0, 0
print("ready", flush=True)
while seen < steps:
    try:
        run = open_run(path) if run is None or looks % 3 == 0 else run
    except FileNotFoundError:
        continue
    table = run.table(columns=["step", "seq", "mean"])
    counted = Counter(table["step"].to_pylist())
    assert set(counted.values()) <= {rows}, counted
    assert sorted(counted) == list(range(len(counted))), sorted(counted)
    assert len(counted) >= seen, (len(counted), seen)
    assert all(m == s for s, m in zip(table["step"].to_pylist(), table["mean"].to_pylist()))
    seen = len(counted)
    assert len(run.steps) >= seen and len(run.sites) in (0, rows)
    metrics = run.metrics()["step"].to_pylist()
    assert len(metrics) == len(set(metrics)) >= seen
    looks += 1
print(json.dumps({"looks": looks, "counts": run.counts}), flush=True)
"""


def test_readers_see_whole_steps_and_never_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes and a thread read while steps are written, sealed and compacted: every look is consistent."""
    monkeypatch.setattr(folder, "SEAL_ROWS", 80)
    monkeypatch.setattr(writing, "_TICK_SECONDS", 0.01)
    path = tmp_path / "run"
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(path), str(STEPS), str(ROWS)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    counters = Counters()
    recorder = Recorder([probe("**", keep=[histogram(), sample(2)])], counters=counters)
    writer = Writer([folder.RunFolder(path, counters=counters)], counters=counters, release=recorder.release)
    looks, tensors = Counter[str](), 0
    stop = threading.Event()
    failed: list[BaseException] = []

    def look() -> None:
        nonlocal tensors
        try:
            while not (stop.is_set() and looks["looks"]):
                run = open_run(path)
                rows = run.sql("select step, count(*) n from records group by step").to_pydict()
                assert set(rows["n"]) <= {ROWS}
                kept = Counter(key.step for key, _ in run.tensors())
                assert set(kept.values()) <= {ROWS} and len(kept) >= tensors
                tensors = len(kept)
                looks["looks"] += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(STEPS):
        for site in range(ROWS):
            value = np.full(10 + site, number, np.float32)
            recorder.observe(recorder.point(Place(f"layer{site}"), 1), buffer_of(value))
        for step in recorder.close({"loss": 1.0}):
            writer.put(step)
        if number % 50 == 49:
            compact(path)
    stop.set()
    thread.join()
    writer.close()
    for reader in readers:
        printed, _ = reader.communicate(timeout=120)
        assert reader.returncode == 0
        assert json.loads(printed)["looks"] and json.loads(printed)["counts"] == {}
    assert not failed and looks["looks"] and counters.counts() == {}
    run = open_run(path)
    assert run.table().num_rows == STEPS * ROWS and len(list(run.tensors())) == STEPS * ROWS
