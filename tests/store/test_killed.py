"""kill -9 at any moment: every step that was handed over is there, bit for bit, once."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
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

KILLS = 24  # at random; `make kills` has 500 of them
KILLS_A_RUN = 4
BATCHES = 2
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[child.Template]:
    process = child.Template(tmp_path_factory.mktemp("cwd"))
    yield process
    process.close()


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder in memory, where there is one: sealing waits for a disk, and a kill asks nothing of it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


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
        row["numbers"] = sorted(row["numbers"] or [])
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


@pytest.mark.parametrize("batch", range(BATCHES))
def test_sigkill_loses_no_step_that_had_returned(batch: int, template: child.Template, fast_path: Path) -> None:
    """Killed at random points and resumed, the run holds every step handed over, bit for bit and once."""
    for number in range(KILLS // KILLS_A_RUN // BATCHES):
        seed = batch * 100 + number
        rng = random.Random(seed)
        path, start, promised = fast_path / f"run{number}", 0, set[int]()
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
    return str(table.to_pydict()), sorted(map(str, run.metrics().to_pylist())), tensors


def leftovers(path: Path) -> list[str]:
    return [p.name for p in path.rglob("*") if p.name.startswith(("_tail", "_compact", "."))]


@pytest.fixture(scope="module")
def origin(template: child.Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two launches that were not closed: segments and tails of all kinds."""
    path = tmp_path_factory.mktemp("origin") / "run"
    for start in (0, 5):
        order = {"do": "write", "path": str(path), "seed": 5, "start": start, "stop": start + 5}
        template.begin(**order, resume=start > 0, close=False)
        list(template.lines())
    return path


def test_a_kill_during_compaction_loses_and_doubles_nothing(
    template: child.Template, origin: Path, fast_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed before any rename and removal of a file, and done again, it leaves exactly what there was.

    Before every third of them, and in `make thorough` before every one.
    """
    wanted = snapshot(open_run(origin))
    every = 3 if request.config.option.markexpr == "not thorough" else 1
    for change in itertools.count(1, every):
        path = Path(shutil.copytree(origin, fast_path / f"run{change}"))
        template.begin(do="compact", path=str(path), die_at=change, visible=True)
        list(template.lines())
        assert template.exit_code in (0, KILLED) and snapshot(open_run(path)) == wanted
        result = compact(path)
        assert result.rows == open_run(path).table(columns=["step"]).num_rows
        assert snapshot(open_run(path)) == wanted
        assert len(list(path.glob("rank=0/seg-*.parquet"))) == 1 and leftovers(path) == []
        shutil.rmtree(path)
        if template.exit_code == 0:
            break
    assert change > 15  # so many places there are to be killed at


@pytest.mark.thorough  # `make kills` has 500, and the tests above the mechanism
def test_a_kill_before_any_change_to_a_file_loses_no_step(template: child.Template, fast_path: Path) -> None:
    """Killed before changes that recording, sealing and resuming make to files, whatever was handed over is there."""
    for change in range(1, 200, 13):
        path = fast_path / f"run{change}"
        order = {"do": "write", "path": str(path), "seed": change, "die_at": change}
        promised: list[int] = []
        for start, resume in ((0, False), (10, True)):
            template.begin(**order, start=start, stop=start + 10, resume=resume)
            promised += [int(line) for line in template.lines() if not line.startswith("pid")]
        if not (path / "run.json").exists():
            assert not promised
            continue
        run = open_run(path)
        assert set(promised) <= set(run.steps) and len(run.steps) - len(promised) <= 2
        compact(path)
        assert_whole(open_run(path), change, run.steps)
        assert leftovers(path) in ([], [".overwriting"])
