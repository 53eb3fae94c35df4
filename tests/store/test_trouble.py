"""Disks that fill up, folders that go away, files that are cut short: counted, never a traceback of pyarrow's."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.errors import RunError
from tensortap.record.counters import Counters, TensortapWarning
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import full
from tensortap.select.probes import probe
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.store.tail_reader import RECORD_ROWS, read_tail
from tensortap.types import Place

MakeRun = Callable[..., str]
Clock = Callable[[], float]


class Line:
    """A recorder, a writer and a run folder whose clock the test turns; the thread's work is done by `tick`."""

    def __init__(self, path: Path, keep: Any = None) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.recorder = Recorder([probe("**", keep=keep)], counters=self.counters)
        self.folder = RunFolder(path, counters=self.counters, clock=lambda: self.now)
        self.writer = Writer([self.folder], counters=self.counters, release=self.recorder.release)

    def step(self, elements: int = 4, **metrics: float) -> int:
        value = np.full(elements, self.recorder.current.number, np.float32)
        self.recorder.observe(self.recorder.point(Place("a"), 1), buffer_of(value))
        [step] = self.recorder.close(metrics)
        self.writer.put(step)
        return step.number

    def tick(self, seconds: float = 1.0) -> None:
        self.writer.flush()
        self.now += seconds
        self.writer.guarded.tick()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small disk takes root")
    yield mounted
    subprocess.run(["umount", "-l", mounted], capture_output=True, check=False)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return filler


def test_a_full_disk_is_survived(small_disk: Path) -> None:
    """Training goes on, one warning says it, the count is right, and with space writing goes on by itself."""
    line = Line(small_disk / "run")
    written = [line.step(loss=1.0) for _ in range(5)]
    filler = fill(small_disk)
    lost = []
    with pytest.warns(TensortapWarning, match="No space left on device") as caught:
        for _ in range(200):
            before = line.counters.counts().get("dropped_steps", 0)
            number = line.step(loss=1.0)
            (lost if line.counters.counts().get("dropped_steps", 0) > before else written).append(number)
        line.tick()
        lost.append(line.step())
        line.tick()
    assert len(caught) == 1 and len(lost) > 100
    assert line.counters.counts()["dropped_steps"] == line.counters.counts()["dropped_records"] == len(lost)
    assert open_run(small_disk / "run").steps == written
    filler.unlink()
    line.tick()
    written += [line.step(loss=1.0) for _ in range(5)]
    assert open_run(small_disk / "run").steps == written
    line.writer.close()
    run = open_run(small_disk / "run")
    assert run.steps == written and run.state == "finished"
    assert run.table()["mean"].to_pylist() == written
    assert run.counts["dropped_records"] == len(lost) and "damaged_segments" not in run.counts
    assert not [p for p in (small_disk / "run").rglob("*") if p.name.startswith(".") or "_tail" in p.name]


def test_large_tensors_on_a_full_disk_are_counted(small_disk: Path) -> None:
    """A tensor that does not fit on the disk is counted; the rows of its step are there."""
    line = Line(small_disk / "run", keep=full())
    with pytest.warns(TensortapWarning, match="No space left") as caught:
        line.step(1 << 19)
        line.writer.flush()
    line.step(10)
    line.writer.close()
    run = open_run(small_disk / "run")
    assert len(caught) == 1 and run.steps == [0, 1]
    assert run.counts == {"dropped_tensors": 1, "sink_errors": 1}
    assert [key.step for key, _ in run.tensors()] == [1]


def test_a_disk_that_goes_away_is_not_written_around(small_disk: Path, tmp_path: Path) -> None:
    """Unmounted, nothing is written into the empty mount point; mounted again, the run goes on where it was."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "--bind", small_disk, mounted], check=True)
    line = Line(mounted / "run")
    line.step()
    line.tick(40)  # sealed: no tail is open
    subprocess.run(["umount", "-l", mounted], check=True)
    with pytest.warns(TensortapWarning, match="unmounted"):
        line.step()
    assert list(mounted.iterdir()) == []
    subprocess.run(["mount", "--bind", small_disk, mounted], check=True)
    line.now += 2
    line.step()
    line.writer.close()
    run = open_run(mounted / "run")
    subprocess.run(["umount", "-l", mounted], check=False)
    assert open_run(small_disk / "run").steps == [0, 2]
    assert run.info == open_run(small_disk / "run").info
    assert open_run(small_disk / "run").counts == {"dropped_records": 1, "dropped_steps": 1, "sink_errors": 1}


@pytest.mark.parametrize("parents", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_folder_deleted_underneath_is_noticed(tmp_path: Path, parents: bool, sealed: bool) -> None:
    """The loss is counted and said once, the folder becomes a run again, and later steps are in it."""
    path = tmp_path / "runs" / "exp1"
    line = Line(path)
    for _ in range(3):
        line.step(loss=1.0)
    if sealed:
        line.tick(40)
    shutil.rmtree(path.parent if parents else path)
    with pytest.warns(TensortapWarning, match="was deleted while it was written") as caught:
        if not sealed:
            line.step(loss=1.0)  # goes to the file that is gone
        line.tick()
        for _ in range(2):
            line.step(loss=1.0)
    assert len(caught) == 1
    assert open_run(path).state == "live"
    line.writer.close()
    run = open_run(path)
    assert run.steps == ([3, 4] if sealed else [4, 5]) and run.state == "finished"
    assert run.counts["vanished_folders"] == 1
    assert run.counts.get("dropped_records", 0) == (0 if sealed else 4)


def test_a_closed_tail_that_was_deleted_is_counted(tmp_path: Path) -> None:
    """Rows that waited to be sealed in a deleted file are counted as dropped."""
    line = Line(tmp_path / "run")
    line.step()
    line.now += 40
    line.step()  # the tail is old now, and closed
    for tail in (tmp_path / "run").rglob("_tail-*"):
        tail.unlink()
    line.tick()
    line.writer.close()
    assert open_run(tmp_path / "run").counts["dropped_records"] == 2


TAIL: dict[str, Any] = {}


def tail_of_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int], list[Any]]:
    """A tail's bytes, its length after each step, and the rows of each step. Sites are named anew in every step."""
    if not TAIL:
        path = tmp_path_factory.mktemp("torn") / "run"
        recorder = Recorder([probe("**")], clock=lambda: 1e9)
        run = RunFolder(path)
        lengths = []
        for number in range(8):
            for site in range(3):
                value = np.full(5, number + site, np.float32)
                recorder.observe(recorder.point(Place(f"layer{number % 5}.{site}"), 1), buffer_of(value))
            [step] = recorder.close()
            run.append(step)
            [tail] = path.glob("rank=0/_tail-*.arrows")
            lengths.append(tail.stat().st_size)
        TAIL["all"] = (tail.read_bytes(), lengths, read_tail(tail, RECORD_ROWS).table.to_pylist())
        run.close()
    return TAIL["all"]  # type: ignore[no-any-return]


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_a_tail_torn_at_any_byte_keeps_its_whole_steps(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut anywhere, a tail gives exactly the steps that were whole by then."""
    content, lengths, rows = tail_of_steps(tmp_path_factory)
    cut = data.draw(
        st.one_of(st.sampled_from([n + d for n in lengths for d in (-1, 0, 1)]), st.integers(0, len(content)))
    )
    torn = tmp_path_factory.getbasetemp() / "torn.arrows"
    torn.write_bytes(content[:cut])
    whole = sum(length <= cut for length in lengths)
    table = read_tail(torn, RECORD_ROWS).table
    assert (table.to_pylist() if table is not None else []) == rows[: 3 * whole]


def test_a_torn_run_opens_and_resumes(make_run: MakeRun, tmp_path: Path) -> None:
    """A run whose tail is torn is opened, resumed and compacted."""
    path = tmp_path / "run"
    line = Line(path)
    for _ in range(4):
        line.step()
    [tail] = path.glob("rank=0/_tail-*.arrows")
    crashed = tmp_path / "crashed"
    shutil.copytree(path, crashed)
    line.writer.close()
    [tail] = crashed.glob("rank=0/_tail-*.arrows")
    os.truncate(tail, tail.stat().st_size - 7)
    assert open_run(crashed).steps == [0, 1, 2] and open_run(crashed).state == "crashed"
    RunFolder(crashed, resume=True).close()
    assert open_run(crashed).steps == [0, 1, 2] and not list(crashed.rglob("_tail-*"))


def test_a_run_that_is_being_written_is_not_taken(tmp_path: Path) -> None:
    """Neither resume nor overwrite takes a run from a process that is still writing it."""
    line = Line(tmp_path / "run")
    line.step()
    for more in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(RunError, match="is being written by a process that is still running"):
            RunFolder(tmp_path / "run", **more)  # type: ignore[arg-type]
    line.step()
    line.writer.close()
    assert open_run(tmp_path / "run").steps == [0, 1]
