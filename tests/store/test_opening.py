"""Opening folders: damaged files are skipped and counted, what is no run is refused, no run is overwritten unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensortap.errors import NotARunError, RunError, RunExistsError, SchemaError
from tensortap.reduce.reducers import full
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run

MakeRun = Callable[..., str]


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
