"""Serve a folder of runs on a thread of this process: a server in milliseconds instead of seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import uvicorn

from tensortap.view.api.service import Api
from tensortap.view.server.app import LOCAL, app_for
from tensortap.view.server.control import PageControl
from tensortap.view.server.launch import STATIC, listen


class Served(NamedTuple):
    """A server that runs."""

    api: Api
    port: int
    token: str = ""

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://127.0.0.1:{self.port}/{self.token and f'?token={self.token}'}"


@contextmanager
def served(
    folder: str | Path, static: Path = STATIC, hosts: frozenset[str] = LOCAL, control: bool = False
) -> Iterator[Served]:
    """Serve until the end of the block, on a free port."""
    api, heard = Api(str(folder)), listen("127.0.0.1", 20_000)
    allowed = PageControl(api.found.where) if control else None
    app = app_for(api, hosts, static, allowed)
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [heard.socket]}, daemon=True)
    thread.start()
    try:
        yield Served(api, heard.port, allowed.token if allowed else "")
    finally:
        server.should_exit = True
        thread.join(20)
        heard.socket.close()
        api.close()
