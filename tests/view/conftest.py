"""A real server on a port of its own, asked over HTTP."""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import served

from tensortap.view.api.service import Api
from tensortap.view.api.wire import unpack

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
    with ExitStack() as started:

        def start(folder: str | Path = tmp_path, *more: Any, **named: Any) -> Client:
            return Client(*started.enter_context(served(folder, *more, **named))[:2])

        yield start


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
