"""The viewer's server: for this machine only, the runs' folder and our page only; it answers GET (but see `control`).

Without control the one POST keeps tags and notes in a file beside the runs, for the page on this machine alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import mimetypes
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tensortap.errors import NotARunError, TensortapError
from tensortap.view.api.service import PATHS, Api, EncodedAnswer
from tensortap.view.server.control import PageControl
from tensortap.view.server.events import Poller, state_of, stream
from tensortap.view.server.launch import NOT_BUILT, STATIC, is_loopback

LOCAL: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
ANY_ADDRESS: Final = "*"
AT_ONCE: Final = 4
WRITES: Final = frozenset({"/api/notes"})
LONGEST_BODY: Final = 64_000
_KINDS: Final = {"json": "application/json", "columns": "application/octet-stream"}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class BuffersResponse(Response):
    """Send an answer piece by piece: put together first, a heat map would be copied once more."""

    def __init__(self, sent: EncodedAnswer, headers: dict[str, str]) -> None:
        self._buffers = sent.buffers
        super().__init__(None, headers={**headers, "Content-Length": str(sent.nbytes)}, media_type=_KINDS[sent.kind])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for buffer in self._buffers if scope["method"] != "HEAD" else ():
            await send({"type": "http.response.body", "body": buffer, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class LocalPageMiddleware:
    """Refuse requests that our own page never makes: other methods, hosts (DNS rebinding) and origins."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], control: PageControl | None = None) -> None:
        self._app = app
        self._hosts = hosts
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refused(Request(scope))
        await (refused or self._app)(scope, receive, send)

    def _serves(self, name: str) -> bool:
        return name in self._hosts - {ANY_ADDRESS} or (ANY_ADDRESS in self._hosts and _is_address(name))

    def _refused(self, request: Request) -> Response | None:
        writes = request.method == "POST" and request.url.path in WRITES
        posted = request.method == "POST" and not writes and self._control is not None
        if request.method not in ("GET", "HEAD") and not posted and not writes:
            return problem(405, f"{request.method} is not allowed: this server only shows", headers={"Allow": "GET"})
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._serves(_name(hosts[0])):
            return problem(403, "this host name is not served", "open the address that `tensortap view` printed")
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "none")
        if (origin and origin.partition("://")[2] != hosts[0]) or site in ("cross-site", "same-site"):
            return problem(403, "another site's page may not ask here", "open the address that was printed")
        if posted and self._control is not None and (why := self._control.refused(request)):
            return problem(403, why, "open the address that was printed")
        if writes and not (origin and _is_local(request) and _is_json(request)):
            return problem(403, "only the page itself, on this machine, may write notes")
        return None


def _is_local(request: Request) -> bool:
    """Return whether a request comes from this machine."""
    return request.client is not None and is_loopback(request.client.host)


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip() == "application/json"


def _name(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


def _is_address(name: str) -> bool:
    """Return whether a host is an IP address: a page that came here by DNS rebinding has a name."""
    try:
        return bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def problem(status: int, error: str, hint: str = "", headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error in the form that the page reads."""
    return JSONResponse({"error": error, "hint": hint}, status, {**_HEADERS, **(headers or {})})


def app_for(
    api: Api, hosts: frozenset[str] = LOCAL, static: Path = STATIC, control: PageControl | None = None
) -> ASGIApp:
    """Return the whole server as an ASGI application; without `control` it only shows."""
    limit = CapacityLimiter(AT_ONCE)
    routes = [Route(path, _answering(api, limit), methods=["GET"]) for path in PATHS]
    routes += [Route("/api/events", _events(api), methods=["GET"])]
    routes += [] if control is None else control.routes()
    routes += [Route("/api/notes", _writing(api), methods=["POST"])]
    routes += [Route("/{path:path}", partial(_static, static=static), methods=["GET"])]
    return LocalPageMiddleware(Starlette(routes=routes), hosts, control)


def _answering(api: Api, limit: CapacityLimiter) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that answers on one of a few threads, so that memory stays bounded."""

    async def answer(request: Request) -> Response:
        try:
            work = partial(api.encoded, request.url.path, dict(request.query_params))
            sent = await to_thread.run_sync(work, limiter=limit)
        except Exception as error:
            return _explained(error)
        return BuffersResponse(sent, {**_HEADERS, "Cache-Control": "no-store"})

    return answer


def _writing(api: Api) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that keeps the tags and the note of a run in a file beside the runs."""

    async def write(request: Request) -> Response:
        if int(request.headers.get("content-length") or LONGEST_BODY + 1) > LONGEST_BODY:
            return problem(413, f"a note must be at most {LONGEST_BODY} bytes")
        try:
            said = await request.json()
            if not isinstance(said, dict):
                raise ValueError("it must be an object with run, tags and note")
            work = partial(api.write_note, str(said.get("run", "")), said.get("tags", []), said.get("note", ""))
            return JSONResponse(await to_thread.run_sync(work), headers=_HEADERS)
        except ValueError as error:
            return problem(400, f"the note could not be read: {error}")
        except Exception as error:
            return _explained(error)

    return write


def _events(api: Api) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that streams a message whenever the run has grown."""
    pollers: dict[str, Poller] = {}

    async def listen(request: Request) -> Response:
        try:
            opened = await to_thread.run_sync(api.opened, request.query_params.get("run", ""))
        except Exception as error:
            return _explained(error)
        poller = pollers.setdefault(opened.ident, Poller(partial(state_of, opened)))
        headers = {**_HEADERS, "Cache-Control": "no-store"}
        return StreamingResponse(stream(poller), headers=headers, media_type="text/event-stream")

    return listen


def _explained(error: Exception) -> Response:
    hint = getattr(error, "hint", "")
    if isinstance(error, NotARunError):
        return problem(404, str(error), hint or "choose one of the runs that are listed")
    if isinstance(error, TensortapError):
        return problem(400, str(error), hint)
    if isinstance(error, OSError):
        return problem(500, f"the run could not be read: {error}", "is it being moved or deleted?")
    return problem(500, f"{type(error).__name__}: {error}", "this is a fault of tensortap: please report it")


def _files(static: Path) -> dict[str, Path]:
    """Return the page's files by their address: a request can name nothing else."""
    return {file.relative_to(static).as_posix(): file for file in static.rglob("*") if file.is_file()}


async def _static(request: Request, static: Path) -> Response:
    path, files = request.path_params["path"] or "index.html", _files(static)
    if path not in files:
        missing = "" if files else "the page was not built"
        hint = NOT_BUILT if missing else ""
        return problem(404, missing or f"there is no {path!r} here", hint)
    data = await anyio.Path(files[path]).read_bytes()
    kept = "public, max-age=31536000, immutable" if path.startswith("assets/") else "no-cache"
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return Response(data, headers={**_HEADERS, "Cache-Control": kept}, media_type=kind)


def hosts_for(host: str) -> frozenset[str]:
    """Return the host names to serve when listening at `host`."""
    named = {host.lower()} | ({f"[{host}]"} if ":" in host else set())
    return LOCAL | named | ({ANY_ADDRESS, socket.gethostname().lower()} if host in ("0.0.0.0", "::") else set())


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve until interrupted, and end quietly: pages that still listen for news are no error."""
    logging.getLogger("uvicorn.error").addFilter(lambda said: "graceful shutdown exceeded" not in said.getMessage())
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
