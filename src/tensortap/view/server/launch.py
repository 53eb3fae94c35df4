"""`tensortap view`: find a free port, say where, open the page, serve until Ctrl-C."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tensortap.errors import MissingExtraError, RunError
from tensortap.text import printable

PORT: Final = 6160
_TRIED: Final = 50
STATIC: Final = Path(__file__).parents[1] / "static"
NOT_BUILT: Final = (
    "the viewer's page was not built into this installation: install Node 20 or later, then "
    "`pip install --force-reinstall --no-deps --no-binary tensortap tensortap` (in a source tree: `make page`)"
)


class ListeningSocket(NamedTuple):
    """An open socket and its address for a browser."""

    socket: socket.socket
    url: str
    port: int


def view(
    path: str, host: str = "127.0.0.1", port: int | None = None, browser: bool = True,
    say: Callable[[str], None] = print, decode: Callable[[list[int]], str] | None = None, *, control: bool = False,
) -> None:  # fmt: skip
    """Serve the runs and harvests at a path, until interrupted; `decode` turns a harvest's token ids into text.

    With `control` the page can ask live runs for more.
    """
    require_extra()
    from tensortap.view.api.service import Api
    from tensortap.view.server import app as server
    from tensortap.view.server.control import PageControl

    if control and not is_loopback(host):
        raise RunError(f"--control is for this machine only, got --host {host}: leave one of them out")
    api = Api(path, decode=decode)
    listening = listen(host, port or PORT)
    allowed = PageControl(api.found.where) if control else None
    url = listening.url if allowed is None else f"{listening.url}?token={allowed.token}"
    try:
        api.warm()
        for line in remarks(host, port, listening):
            say(line)
        say(f"{printable(api.found.path)} is shown at {url}  (Ctrl-C ends it)")
        if browser and built():
            webbrowser.open(url)
        server.serve(server.app_for(api, server.hosts_for(host), control=allowed), listening.socket)
    finally:
        listening.socket.close()
        api.close()


def require_extra() -> None:
    """Raise an error that says what to install when the server's packages are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"the viewer needs {' and '.join(missing)}: pip install 'tensortap[view]'")


def built(static: Path = STATIC) -> bool:
    """Return whether the page was built into this installation."""
    return (static / "index.html").is_file()


def remarks(host: str, requested: int | None, listening: ListeningSocket) -> list[str]:
    """Return the lines to print before the address."""
    lines = []
    if requested is not None and listening.port != requested:
        lines.append(f"port {requested} is in use, so it is {listening.port}")
    if not is_loopback(host):
        lines.append(f"anyone who can reach this machine at {host} can read these runs")
    if not built():
        lines.append(NOT_BUILT)
    return lines


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> ListeningSocket:
    """Take the port, or the next free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [*range(port, min(port + _TRIED, 65536)), 0]:
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host.strip("[]"), candidate))
        except OSError as error:
            taken.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise RunError(f"cannot listen at {host}: {error}; leave --host out to use this machine") from error
            continue
        taken.listen(128)
        number = taken.getsockname()[1]
        shown = "127.0.0.1" if host in ("0.0.0.0", "") else f"[{host.strip('[]')}]" if ":" in host else host
        return ListeningSocket(taken, f"http://{shown}:{number}/", number)
    raise RunError(f"no port from {port} on is free; give another: --port 8000")
