"""Runs behind fsspec: `memory://` here, `s3://` by the same code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tensortap.errors import NotARunError, RunExistsError
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import full, histogram
from tensortap.select.probes import probe
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.types import Place

URL = "memory://bucket/runs/exp1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def write(steps: range, *, resume: bool = False, overwrite: bool = False, close: bool = True) -> Writer:
    recorder = Recorder([probe("**", keep=[histogram(), full()])], start=steps.start)
    writer = Writer([RunFolder(URL, resume=resume, overwrite=overwrite)], release=recorder.release)
    for number in steps:
        value = np.full((2, 3), number, np.float32)
        recorder.observe(recorder.point(Place("a"), 1), buffer_of(value))
        for step in recorder.close({"loss": number}):
            writer.put(step)
    if close:
        writer.close()
    return writer


def test_a_remote_run_is_written_and_read(cache: Path) -> None:
    """Records, metrics and tensors go to the remote address; nothing of them stays behind here."""
    write(range(5))
    run = open_run(URL)
    assert run.steps == list(range(5)) and run.state == "finished" and run.sites == ["a:output"]
    assert run.table()["mean"].to_pylist() == list(range(5))
    assert run.metrics()["value"].to_pylist() == list(range(5))
    assert run.tensor("a", 3).tolist() == [[3.0] * 3] * 2
    assert run.series("a", "mean").values.tolist() == list(range(5))
    assert run.sql("select max(mean) m from records")["m"].to_pylist() == [4.0]
    names = fsspec.filesystem("memory").find("/bucket/runs/exp1")
    assert any(name.endswith(".parquet") and "/rank=0/" in name for name in names)
    assert any(name.endswith(".safetensors") for name in names)
    assert not [p for p in cache.rglob("*") if p.is_file() and p.name != "_lock"]


def test_what_is_not_sealed_yet_is_seen_on_the_same_machine() -> None:
    """A live remote run shows its tails here, where they lie."""
    writer = write(range(3), close=False)
    run = open_run(URL)
    assert run.state == "live" and run.steps == [0, 1, 2]
    assert run.tensor("a", 2).tolist() == [[2.0] * 3] * 2
    writer.close()
    assert run.steps == [0, 1, 2] and run.state == "finished"


def test_a_remote_run_is_resumed_and_compacted() -> None:
    """Segments of several lives fold into one, remotely."""
    for start in (0, 3, 6):
        write(range(start, start + 3), resume=True)
    result = compact(URL)
    assert result.rows == 9 and result.after_files < result.before_files
    run = open_run(URL)
    assert run.steps == list(range(9)) and len(list(run.tensors())) == 9
    names = fsspec.filesystem("memory").find("/bucket/runs/exp1/rank=0")
    assert len([name for name in names if name.endswith(".parquet")]) == 1


def test_a_remote_run_is_not_overwritten_unasked() -> None:
    """The same errors as for a folder, and overwrite takes away what lay there and here."""
    write(range(2))
    with pytest.raises(RunExistsError, match=r"memory://bucket/runs/exp1-2.*resume=True.*overwrite=True"):
        write(range(2))
    with pytest.raises(NotARunError, match="no such folder"):
        open_run("memory://bucket/nothing")
    write(range(4, 5), overwrite=True)
    assert open_run(URL).steps == [4]


def test_tails_of_a_deleted_run_do_not_enter_the_next(cache: Path) -> None:
    """What an earlier run of this address left on this machine is not sealed into a new one."""
    writer = write(range(2), close=False)
    [tail] = cache.glob("tensortap/*/rank=0/_tail-*.arrows")
    data = tail.read_bytes()
    writer.close()
    fsspec.filesystem("memory").rm("/bucket/runs/exp1", recursive=True)
    tail.write_bytes(data)
    write(range(7, 8))
    assert open_run(URL).steps == [7]
