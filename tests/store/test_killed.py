"""kill -9 at any moment: every step that was handed over is there, bit for bit, once."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import child

from tensortap.reduce.statistics import STATISTICS
from tensortap.store.compact import compact
from tensortap.store.run import Run, open_run
from tensortap.store.tensors import tensors_of

KILLS = 200
KILLS_A_RUN = 4


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[child.Template]:
    process = child.Template(tmp_path_factory.mktemp("cwd"))
    yield process
    process.close()


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def killed(template: child.Template, rng: random.Random, after: int, **order: Any) -> list[int]:
    """Run an order, kill it a random moment after so many steps; the steps that had been handed over."""
    template.begin(**order)
    pid, alive, done = 0, True, []
    for line in template.lines():
        if line.startswith("pid"):
            pid = int(line.split()[1])
        else:
            done.append(int(line))
        if pid and alive and len(done) >= after:
            spin(rng.choice([0, 1e-4, 1e-3, 4e-3]) * rng.random())
            os.kill(pid, signal.SIGKILL)
            alive = False
    return done


def bits(value: Any) -> Any:
    """Values that are equal exactly when all their bits are."""
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


@functools.cache
def expected(seed: int, number: int) -> tuple[list[dict[str, Any]], list[tuple[str, bytes]]]:
    """The rows and the tensors of a step, computed anew from the seed."""
    rows = []
    [step] = child.record(child.recorder_of(number), seed)
    for record in step.records():
        row = dict(record) | {"numbers": sorted(record.numbers.items()), "shape": list(record["shape"])}
        row |= {"hist_counts": record["hist_counts"].tolist(), "time": record.time}
        rows.append({name: bits(value) for name, value in row.items()})
    return rows, [(stored.name, stored.array.tobytes()) for stored in tensors_of(step)]


def rows_of(run: Run) -> list[dict[str, Any]]:
    rows = run.table().to_pylist()
    for row in rows:
        row["numbers"] = sorted(row["numbers"])
        row["time"] = round(row["time"].timestamp() * 1e6)
        for name in STATISTICS:
            row[name] = float("nan") if row[name] is None else row[name]
    return [{name: bits(value) for name, value in row.items()} for row in rows]


def assert_whole(run: Run, seed: int, steps: list[int]) -> None:
    """The run holds exactly these steps' rows, with their metrics and tensors, in every bit, and nothing twice."""
    assert run.steps == steps
    assert rows_of(run) == [row for step in steps for row in expected(seed, step)[0]]
    metrics = [(row["step"], row["name"], row["value"]) for row in run.metrics().to_pylist()]
    assert len(metrics) == len(set(metrics))
    assert {(step, "loss", step / 3) for step in steps} <= set(metrics)
    tensors = [(key.name(), array.tobytes()) for key, array in run.tensors()]
    assert len(tensors) == len(dict(tensors))
    assert {tensor for step in steps for tensor in expected(seed, step)[1]} <= set(tensors)


@pytest.mark.parametrize("batch", range(10))
def test_sigkill_loses_no_step_that_had_returned(batch: int, template: child.Template, tmp_path: Path) -> None:
    """Killed at random points and resumed, the run holds every step handed over, bit for bit and once."""
    for number in range(KILLS // KILLS_A_RUN // 10):
        seed = batch * 100 + number
        rng = random.Random(seed)
        path, start, promised = tmp_path / f"run{number}", 0, set[int]()
        for life in range(KILLS_A_RUN):
            order = {"do": "write", "path": str(path), "seed": seed, "start": start, "stop": start + 25}
            promised.update(killed(template, rng, rng.randint(0, 12), **order, resume=life > 0))
            if not path.exists() or not (path / "run.json").exists():
                assert not promised  # killed before the run began
                continue
            run = open_run(path)
            present = run.steps
            assert promised <= set(present) and run.state in ("crashed", "finished")
            assert len(present) - len(promised) <= life + 1  # at most the step that was being handed over
            start = run.last_step + 1
        assert_whole(run, seed, present)
        if number % 2:
            compact(path)
        else:
            template.begin(do="write", path=str(path), seed=seed, start=start, stop=start + 3, resume=True)
            present += [int(line) for line in template.lines() if not line.startswith("pid")]
            assert open_run(path).state == "finished"
        assert not list(path.rglob("*.arrows"))
        assert_whole(open_run(path), seed, present)


def snapshot(run: Run) -> Any:
    table = run.table(columns=["step", "rank", "seq", "site", "mean", "hist_counts"])
    tensors = sorted((key.name(), array.tobytes()) for key, array in run.tensors())
    return bits(list(table.to_pydict().values())), sorted(map(str, run.metrics().to_pylist())), tensors


def test_a_kill_during_compaction_loses_and_doubles_nothing(template: child.Template, tmp_path: Path) -> None:
    """Compaction killed at random times, and then done again, leaves exactly the rows there were."""
    origin = tmp_path / "origin"
    for start in (0, 40):
        order = {"do": "write", "path": str(origin), "seed": 5, "start": start, "stop": start + 40}
        template.begin(**order, resume=start > 0, close=False)  # tails are left behind
        list(template.lines())
    wanted = snapshot(open_run(origin))
    rng, undisturbed = random.Random(1), 0.0
    shutil.copytree(origin, tmp_path / "timed")
    begin = time.perf_counter()
    compact(tmp_path / "timed")
    undisturbed = time.perf_counter() - begin
    for attempt in range(12):
        path = tmp_path / f"run{attempt}"
        shutil.copytree(origin, path)
        for _ in range(2):
            template.begin(do="compact", path=str(path))
            for line in template.lines():
                spin(rng.random() * undisturbed * 1.5)
                with contextlib.suppress(ProcessLookupError):  # it was quicker than the signal
                    os.kill(int(line.split()[1]), signal.SIGKILL)
            assert snapshot(open_run(path)) == wanted
        result = compact(path)
        assert result.rows == open_run(path).table(columns=["step"]).num_rows
        assert snapshot(open_run(path)) == wanted
        assert len(list(path.glob("rank=0/seg-*.parquet"))) == 1
        assert not [p for p in path.rglob("*") if p.name.startswith("_tail") or p.name == "_compact"]
        shutil.rmtree(path)
