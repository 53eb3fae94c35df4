"""What `tensortap view --control` adds: the page may ask live runs for more, with the token of its address.

Without `--control` none of this is reachable, and the server only shows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any, Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tensortap.control.client import ask, can_control
from tensortap.control.requests import LONGEST, parse
from tensortap.errors import TensortapError
from tensortap.store.files import load_json

PATH: Final = "/api/control"
TOKEN: Final = "x-tensortap-token"
HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class PageControl:
    """One server's control: who may ask, and for which runs. `where` gives the path of a run that is shown."""

    def __init__(self, where: Callable[[str], str]) -> None:
        self.token = secrets.token_urlsafe(24)
        self._where = where

    def routes(self) -> list[Route]:
        """Return the routes to add."""
        return [Route(PATH, self._status, methods=["GET"]), Route(PATH, self._act, methods=["POST"])]

    def refused(self, request: Request) -> str:
        """Return why a POST is not answered; nothing when it may be. Its host was checked before."""
        if request.url.path != PATH:
            return f"a POST must go to {PATH}, got another path"
        if request.headers.get("origin") is None:
            return "a request to control must say which page it comes from"
        return "" if self._knows(request) else "the token must be that of the address that `tensortap view` printed"

    def _knows(self, request: Request) -> bool:
        return secrets.compare_digest(request.headers.get(TOKEN, "").encode(), self.token.encode())

    async def _status(self, request: Request) -> Response:
        """Say whether a run can be controlled, and what its ranks do."""
        if not self._knows(request):
            return _answer({"error": "the token is not that of the address that was printed", "hint": ""}, 403)
        return await self._answered(request.query_params.get("run", ""), b'{"action": "status"}', live=True)

    async def _act(self, request: Request) -> Response:
        """Ask all ranks of a run for what the body says: a request of `tensortap ctl`, and the run's name."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LONGEST:
                return _answer({"error": f"a request must have at most {LONGEST} bytes", "hint": ""}, 413)
        try:
            given = load_json(body)
            run = given.pop("run", "")
        except (ValueError, AttributeError, TypeError):
            return _answer({"error": "a request must be a JSON object", "hint": ""}, 400)
        return await self._answered(run, json.dumps(given).encode())

    async def _answered(self, run: Any, line: bytes, live: bool = False) -> Response:
        try:
            path = self._where(str(run))
            if live and not await to_thread.run_sync(can_control, path):
                return _answer({"live": False, "answers": []})
            answers = await to_thread.run_sync(lambda: ask(path, parse(line)))
        except (TensortapError, OSError) as error:
            return _answer({"error": str(error), "hint": ""}, 409)
        return _answer({"live": True, "answers": [answer.reply for answer in answers]})


def _answer(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status, HEADERS)
