"""A real server on a port of its own, asked over HTTP."""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn

from tensortap.view.api.service import Api
from tensortap.view.api.wire import unpack
from tensortap.view.server.app import LOCAL, app_for
from tensortap.view.server.launch import listen

ROOT = Path(__file__).resolve().parents[2]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        def refuse(token: str) -> None:
            raise AssertionError(f"{token} is no JSON")

        return json.loads(self.body, parse_constant=refuse)

    @property
    def columns(self) -> Any:
        return unpack(self.body)


class Client:
    def __init__(self, api: Api, port: int) -> None:
        self.api = api
        self.port = port

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            got = connection.getresponse()
            return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            connection.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """A function that serves a folder and gives a client."""
    started: list[tuple[uvicorn.Server, threading.Thread, Any, Api]] = []

    def start(folder: str | Path = tmp_path, static: Path | None = None, hosts: frozenset[str] = LOCAL) -> Client:
        api = Api(str(folder))
        heard = listen("127.0.0.1", 20_000)
        app = app_for(api, hosts) if static is None else app_for(api, hosts, static)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [heard.socket]}, daemon=True)
        thread.start()
        started.append((server, thread, heard.socket, api))
        return Client(api, heard.port)

    yield start
    for server, thread, heard, api in started:
        server.should_exit = True
        thread.join(20)
        heard.close()
        api.close()


@pytest.fixture(scope="session")
def bench() -> Any:
    """The benchmark's own builder of large runs."""
    spec = importlib.util.spec_from_file_location("benchmark_view", ROOT / "benchmarks" / "view.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ask(tmp_path):
    """A function that opens a folder and answers one question about it."""
    opened = {}

    def answer(path, where="run", **given):
        if where not in opened:
            opened[where] = Api(str(tmp_path / where))
        return opened[where].answer(path, {name: str(value) for name, value in given.items()})

    yield answer
    for api in opened.values():
        api.close()
