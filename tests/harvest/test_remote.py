"""Harvests in an object store: an S3 server of our own, with the connection cut in the middle."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harvest.subjects import make_data, make_model
from torch.utils.data import DataLoader

import tensortap as tt
from tensortap.errors import HarvestError
from tensortap.harvest.folder import is_harvest
from tensortap.harvest.summary import summarize_sites

pytestmark = pytest.mark.filterwarnings("ignore")  # botocore's own
OPTIONS: dict[str, Any] = {
    "keep": tt.tokens(mask="attention_mask"), "batch_size": 8, "dtype": "bf16", "shard_size": 1500, "spread": 2,
    "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A server that speaks S3, in this process; requests fail while `server.broken` is set."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    inner = DomainDispatcherApplication(create_backend_app)
    state = type("State", (), {"left": None, "url": ""})()

    def application(environ: dict[str, Any], start: Any) -> Any:
        if state.left is not None and environ["REQUEST_METHOD"] == "PUT":
            state.left -= 1
            if state.left < 0:
                # The client sees a connection that ends; one that is only closed here stays open while others hold it.
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
        return inner(environ, start)

    http = make_server("127.0.0.1", 0, application, threaded=True)
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}"
    yield state
    http.shutdown()
    thread.join()


@pytest.fixture
def bucket(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a new folder in a bucket."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    name = f"bucket-{os.getpid()}"
    if not store.exists(name):
        store.mkdir(name)
    return f"s3://{name}/{tmp_path.name}"


def harvest(to: Any) -> tt.Harvest:
    return tt.harvest(make_model(), make_data(), "blocks.0", to=to, **OPTIONS)


def test_a_cut_connection(server: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the connection is cut what is committed stays, and the same call goes on to the same bytes as on a disk."""
    import s3fs.core

    torch.set_num_threads(1)
    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 1)
    server.left = 14
    with pytest.raises(HarvestError, match=r"cannot write to s3://.*what is committed stays"):
        harvest(bucket)
    server.left = None
    s3fs.S3FileSystem.clear_instance_cache()
    committed = tt.open_harvest(bucket)
    assert not committed.complete
    assert 0 < committed.rows < 294
    acts, local = harvest(bucket), harvest(tmp_path / "acts")
    assert acts.complete
    assert acts.rows == local.rows == 294
    for there, here in zip(acts.files(), local.files(), strict=True):
        assert acts.folder.files.fs.cat_file(there) == Path(here).read_bytes()
    for name in ("harvest.json", "manifest.json", "statistics.safetensors"):
        assert acts.folder.files.read(name) == local.folder.files.read(name)
    a, b = ([batch.sample.tolist() for batch in each.batches(50)] for each in (acts, local))
    assert a == b
    assert summarize_sites(acts)[0].to_dict() == summarize_sites(local)[0].to_dict()


def test_memory_urls(tmp_path: Path) -> None:
    """Any file system that fsspec knows can be written to and read from."""
    acts = harvest("memory://harvest-test")
    assert sorted(b for batch in acts.batches(64) for b in batch.sample) == sorted(
        b for batch in harvest(tmp_path / "acts").batches(64) for b in batch.sample
    )


def test_workers_read_from_a_store(bucket: str) -> None:
    """Forked workers of a DataLoader open their own connections, though this process has some already."""
    acts = harvest(bucket)
    loader = DataLoader(acts.dataset(32), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert sum(len(rows) for rows in loader) == acts.rows


def test_a_store_that_cannot_be_reached(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read from a store that does not answer, the error names the place, and is one of ours."""
    import s3fs.core

    gone = harvest(bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    gone.folder.files._fs = s3fs.S3FileSystem()  # type: ignore[assignment]
    reads: list[Callable[[], Any]] = [
        lambda: tt.open_harvest(bucket), lambda: harvest(bucket), lambda: next(gone.batches(8)),
        lambda: gone.statistics("blocks.0"), lambda: tt.diff(gone, gone), lambda: is_harvest(bucket),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(HarvestError, match=r"bucket-\d+/.* cannot be read"):
            read()
