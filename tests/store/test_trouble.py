"""Disks that fill up, folders that go away, files that are cut short: counted, never a traceback of pyarrow's."""

from __future__ import annotations

import contextlib
import json
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

from tensortap.errors import NotARunError, RunError, RunExistsError, SchemaError
from tensortap.record.counters import Counters, TensortapWarning
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import full
from tensortap.select.probes import probe
from tensortap.store.compact import compact
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


STEPS = [({"a": np.arange(6.0), "b:input": np.ones(2)}, {"loss": float(n)}) for n in range(3)]


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_segment_is_counted_and_skipped(make_run: MakeRun, cut: int) -> None:
    """A segment without its end is left out and counted; everything else is read."""
    path = Path(make_run(STEPS))
    [segment] = path.glob("rank=0/seg-*.parquet")
    other = segment.with_name(f"seg-{'0' * 32}.parquet")
    other.write_bytes(segment.read_bytes()[: cut if cut >= 0 else segment.stat().st_size - 1])
    run = open_run(path)
    assert run.table().num_rows == 6 and run.steps == [0, 1, 2]
    assert run.counts == {"damaged_segments": 1}
    assert run.sql("select count(*) n from records")["n"].to_pylist() == [6]
    compact(path)
    assert open_run(path).table().num_rows == 6


def test_a_segment_damaged_inside_is_counted_and_skipped(make_run: MakeRun) -> None:
    """A segment whose end is whole but whose pages are not is left out too."""
    path = Path(make_run(STEPS))
    [segment] = path.glob("rank=0/seg-*.parquet")
    other = segment.with_name(f"seg-{'0' * 32}.parquet")
    data = bytearray(segment.read_bytes())
    data[4 : len(data) // 3] = os.urandom(len(data) // 3 - 4)
    other.write_bytes(data)
    run = open_run(path)
    assert run.table().num_rows == 6
    assert run.counts == {"damaged_segments": 1}


def test_a_truncated_tensor_file_is_counted_and_skipped(make_run: MakeRun) -> None:
    """A file of tensors that is cut short is left out and counted."""
    path = Path(make_run(STEPS, keep=full()))
    [file] = path.glob("rank=0/tensors/*.safetensors")
    file.with_name(f"step-000000000-000000002-{'0' * 32}.safetensors").write_bytes(file.read_bytes()[:50])
    run = open_run(path)
    assert len(list(run.tensors())) == 6 and run.counts == {"damaged_tensors": 1}


def test_what_is_no_run_is_named(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, an empty one and one with other files are each an error that says so and names runs nearby."""
    make_run(STEPS, name="exp1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotARunError, match="no such folder; runs nearby: exp1"):
        open_run(tmp_path / "exp2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARunError, match=r"holds no run: it has no run\.json"):
        open_run(tmp_path / "empty")
    (tmp_path / "empty" / "model.pt").write_bytes(b"")
    with pytest.raises(NotARunError):
        open_run(tmp_path / "empty")
    with pytest.raises(RunError, match="cannot use the path"):
        open_run("nosuchprotocol://x")
    (tmp_path / "acts").mkdir()
    (tmp_path / "acts" / "harvest.json").write_text("{}")
    with pytest.raises(NotARunError, match=r"holds a harvest, not a run: open it with tt\.open_harvest"):
        open_run(tmp_path / "acts")
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(NotARunError, match="is a file; a run is a folder"):
        open_run(tmp_path / "model.onnx")


def test_a_run_is_found_where_runs_go_by_default(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`show exp1` beside `runs/exp1` says which path is meant."""
    make_run(STEPS, name="runs/exp1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotARunError, match=r"no such folder; did you mean runs/exp1\?"):
        open_run("exp1")


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b"{", RunError, "cannot be read"),
        (b"", RunError, "cannot be read"),
        (b"\xff\xfe", RunError, "cannot be read"),
        (b"[]", NotARunError, "names no schema"),
        (b'{"model": 1}', NotARunError, "names no schema"),
        (json.dumps({"schema": 99, "tensortap": "9.1"}).encode(), SchemaError, "schema 99 by tensortap 9.1"),
    ],
)
def test_a_run_json_of_another_kind(make_run: MakeRun, content: bytes, error: type[Exception], text: str) -> None:
    """A damaged, foreign or newer run.json is an error that says which, for readers and for compact."""
    path = Path(make_run(STEPS))
    (path / "run.json").write_bytes(content)
    for use in (open_run, compact, lambda p: RunFolder(p, resume=True)):
        with pytest.raises(error, match=text):
            use(path)


def test_a_run_is_never_overwritten_unasked(make_run: MakeRun) -> None:
    """The error names another path that is free, resume=True and overwrite=True."""
    path = make_run(STEPS)
    with pytest.raises(RunExistsError) as caught:
        RunFolder(path)
    for part in (f"to='{path}-2'", "resume=True", "overwrite=True"):
        assert part in str(caught.value)
    assert open_run(path).steps == [0, 1, 2]
    with pytest.raises(RunError, match="exclude each other"):
        RunFolder(path, resume=True, overwrite=True)


def test_overwrite_begins_anew_and_spares_what_is_not_ours(make_run: MakeRun) -> None:
    """Overwriting deletes the run, not the user's own files beside it."""
    path = Path(make_run(STEPS, keep=full(), name="exp"))
    (path / "checkpoint.pt").write_bytes(b"precious")
    RunFolder(path, overwrite=True).close()
    run = open_run(path)
    assert run.steps == [] and run.metrics().num_rows == 0 and not list(run.tensors())
    assert (path / "checkpoint.pt").read_bytes() == b"precious"


def test_overwrite_twice_within_one_launch(tmp_path: Path) -> None:
    """A launch that looks like the one before, as with a fixed port, can overwrite its run."""
    for _ in range(2):
        RunFolder(tmp_path / "run", overwrite=True, launch="same").close()


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


def test_a_folder_with_other_files_is_not_taken(tmp_path: Path) -> None:
    """A folder that holds something else is refused, with a better place; dot files and emptiness are fine."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".gitkeep").touch()
    RunFolder(tmp_path / "empty").close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.pt").touch()
    for more in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(RunError, match=r"not empty and holds no run \(model.pt, …\).*full/run1"):
            RunFolder(tmp_path / "full", **more)  # type: ignore[arg-type]


def test_a_file_is_no_place_for_a_run(tmp_path: Path) -> None:
    """A path that is a file is refused as one, with a path that can be."""
    (tmp_path / "log.txt").write_text("mine")
    with pytest.raises(RunError, match=r"log.txt' is a file; a run is a folder: give another path, e.g. .*log.txt-run"):
        RunFolder(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == "mine"


def test_a_failed_start_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run cannot be begun, the next attempt in the same process can."""
    monkeypatch.setattr(RunFolder, "_save_state", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        RunFolder(tmp_path / "run")
    monkeypatch.undo()
    RunFolder(tmp_path / "run", resume=True).close()


def test_readers_do_not_need_to_write(make_run: MakeRun) -> None:
    """A run on a read-only folder opens, is finished, and is not changed by reading."""
    path = Path(make_run(STEPS, keep=full()))
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    run = open_run(path)
    assert run.state == "finished"
    run.table(), run.metrics(), list(run.tensors()), run.merged("steps")
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before
