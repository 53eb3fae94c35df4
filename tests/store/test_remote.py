"""Runs behind fsspec: `memory://`, and `s3://` as a real server speaks it, with connections that are cut."""

from __future__ import annotations

import sys
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import s3fs

from tensortap.errors import NotARunError, RunExistsError
from tensortap.record.counters import Counters
from tensortap.record.recorder import Recorder
from tensortap.record.writer import Writer
from tensortap.reduce.buffers import buffer_of
from tensortap.reduce.reducers import full, histogram
from tensortap.select.probes import probe
from tensortap.store.compact import compact
from tensortap.store.folder import RunFolder
from tensortap.store.run import open_run
from tensortap.types import Place

sys.path.insert(0, str(Path(__file__).parent))
from s3 import Server

# s3fs closes its connections when the process ends, and botocore's own calls are deprecated here and there.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """An S3 server on this machine, behind a proxy that can cut connections."""
    running = Server()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def s3_url(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new address on the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # another test's server may be gone
    yield f"s3://{server.bucket}/{uuid.uuid4().hex}/exp1"
    server.proxy.restore()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        found: str = request.getfixturevalue("s3_url")
        return found
    return f"memory://{uuid.uuid4().hex}/runs/exp1"


def write(
    url: str, steps: range, *, resume: bool = False, overwrite: bool = False, close: bool = True,
    counters: Counters | None = None,
) -> Writer:  # fmt: skip
    counters = counters or Counters()
    recorder = Recorder([probe("**", keep=[histogram(), full()])], start=steps.start, counters=counters)
    folder = RunFolder(url, resume=resume, overwrite=overwrite, counters=counters)
    writer = Writer([folder], release=recorder.release, counters=counters)
    for number in steps:
        value = np.full((2, 3), number, np.float32)
        recorder.observe(recorder.point(Place("a"), 1), buffer_of(value))
        for step in recorder.close({"loss": number}):
            writer.put(step)
    if close:
        writer.close()
    return writer


def files_at(url: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(url)
    return [str(name) for name in fs.find(path)]


def test_a_remote_run_is_written_and_read(url: str, cache: Path) -> None:
    """Records, metrics and tensors go to the remote address; nothing of them stays behind here."""
    write(url, range(5))
    run = open_run(url)
    assert run.steps == list(range(5)) and run.state == "finished" and run.sites == ["a:output"]
    assert run.table()["mean"].to_pylist() == list(range(5))
    assert run.metrics()["value"].to_pylist() == list(range(5))
    assert run.tensor("a", 3).tolist() == [[3.0] * 3] * 2
    assert run.series("a", "mean").values.tolist() == list(range(5))
    assert run.sql("select max(mean) m from records")["m"].to_pylist() == [4.0]
    names = files_at(url)
    assert any(name.endswith(".parquet") and "/rank=0/" in name for name in names)
    assert any(name.endswith(".safetensors") for name in names)
    assert not [p for p in cache.rglob("*") if p.is_file() and p.name != "_lock"]


def test_what_is_not_sealed_yet_is_seen_on_the_same_machine(url: str) -> None:
    """A live remote run shows its tails here, where they lie."""
    writer = write(url, range(3), close=False)
    run = open_run(url)
    assert run.state == "live" and run.steps == [0, 1, 2]
    assert run.tensor("a", 2).tolist() == [[2.0] * 3] * 2
    writer.close()
    assert run.steps == [0, 1, 2] and run.state == "finished"


def test_a_remote_run_is_resumed_and_compacted(url: str) -> None:
    """Segments of several lives fold into one, remotely."""
    for start in (0, 3, 6):
        write(url, range(start, start + 3), resume=True)
    result = compact(url)
    assert result.rows == 9 and result.after_files < result.before_files
    run = open_run(url)
    assert run.steps == list(range(9)) and len(list(run.tensors())) == 9
    names = files_at(f"{url}/rank=0")
    assert len([name for name in names if name.endswith(".parquet")]) == 1


def test_a_remote_run_is_not_overwritten_unasked(url: str) -> None:
    """The same errors as for a folder, and overwrite takes away what lay there and here."""
    write(url, range(2))
    with pytest.raises(RunExistsError, match=r"/exp1-2.*resume=True.*overwrite=True"):
        write(url, range(2))
    with pytest.raises(NotARunError, match="no such folder"):
        open_run(url.replace("exp1", "nothing"))
    write(url, range(4, 5), overwrite=True)
    assert open_run(url).steps == [4]


def test_tails_of_a_deleted_run_do_not_enter_the_next(url: str, cache: Path) -> None:
    """What an earlier run of this address left on this machine is not sealed into a new one."""
    writer = write(url, range(2), close=False)
    [tail] = cache.glob("tensortap/*/rank=0/_tail-*.arrows")
    data = tail.read_bytes()
    writer.close()
    fs, path = fsspec.core.url_to_fs(url)
    fs.rm(path, recursive=True)
    tail.write_bytes(data)
    write(url, range(7, 8))
    assert open_run(url).steps == [7]


def test_connections_cut_in_the_middle_of_reading_change_nothing(server: Server, s3_url: str) -> None:
    """A reader whose connections break after some bytes asks again: the same rows, or an error, never fewer rows."""
    write(s3_url, range(6))
    wanted = open_run(s3_url).table()
    for after in (0, 100, 2000):
        server.proxy.cut(connections=2, after=after, uploads=False)
        run = open_run(s3_url)
        assert run.table().equals(wanted) and len(list(run.tensors())) == 6 and run.counts == {}
        assert server.proxy.cuts_left == 0


def test_connections_cut_in_the_middle_of_writing_lose_nothing(server: Server, s3_url: str) -> None:
    """An upload that breaks off is done again; nothing half lies at the address."""
    for start, after in ((0, 0), (4, 300), (8, 3000)):
        server.proxy.cut(connections=2, after=after, uploads=True)
        write(s3_url, range(start, start + 4), resume=start > 0)
        server.proxy.restore()
        run = open_run(s3_url)
        assert run.steps == list(range(start + 4)) and run.table().num_rows == start + 4 and run.counts == {}
    server.proxy.cut(connections=2, after=500, uploads=True)
    assert compact(s3_url).rows == 12
    server.proxy.restore()
    assert open_run(s3_url).steps == list(range(12)) and open_run(s3_url).damage == {}


def test_a_dead_server_raises_nothing_into_the_script_and_resuming_brings_all(
    server: Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing with the connection dead counts and warns; the steps wait on this machine for the next launch."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    counters = Counters()
    writer = write(s3_url, range(3), close=False, counters=counters)
    server.proxy.cut(connections=10**6, after=0, uploads=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer.close()
    assert counters.counts()
    server.proxy.restore()
    write(s3_url, range(3, 5), resume=True)
    run = open_run(s3_url)
    assert run.steps == list(range(5)) and run.table().num_rows == 5 and len(list(run.tensors())) == 5
