"""Listen on a socket in the run folder: one thread that sleeps until a client connects, and one for each client."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensortap.control.paths import AVAILABLE, reachable
from tensortap.control.requests import LONGEST, ControlRequest, parse
from tensortap.errors import ControlError, TensortapError
from tensortap.record import at_exit

MOST_CLIENTS: Final = 8
PATIENCE: Final = 2.0  # seconds that a client may take to send its request
Reply = dict[str, Any]


class Peer(NamedTuple):
    """The client of a request: its process and user."""

    pid: int
    uid: int

    @property
    def user(self) -> str:
        """The user's name, or number where there is no name."""
        try:
            import pwd

            return pwd.getpwuid(self.uid).pw_name
        except (ImportError, KeyError):
            return str(self.uid)


class Listener:
    """Accept requests at a path and answer each with what `handle` returns. Nothing raises but the constructor."""

    def __init__(self, path: Path, handle: Callable[[ControlRequest, Peer], Reply]) -> None:
        if not AVAILABLE:
            raise ControlError("this system has no Unix sockets")
        self.path = path
        self._handle = handle
        self._clients = threading.BoundedSemaphore(MOST_CLIENTS)
        self._socket = _listening(path)
        self._inode = path.lstat().st_ino
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="tensortap-control", daemon=True)
        at_exit.register(self)
        self._thread.start()

    def close(self, timeout: float | None = None) -> None:
        """Stop listening and remove the socket. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._remove()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread up; closing would not
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)
        self._socket.close()
        at_exit.unregister(self)

    def after_fork(self) -> None:
        """Let go of the socket in a forked child: it is the parent's."""
        self._over = threading.Event()  # a thread of the parent may have held its lock
        self._over.set()
        self._socket.close()

    def _remove(self) -> None:
        """Remove the socket's file, unless another process has put its own there."""
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                self._over.wait(0.1)  # closed; or too many open files, of which others will be closed
            else:
                self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        """Answer on a separate thread, so that a slow client does not delay others."""
        if not self._clients.acquire(blocking=False):
            _send(client, {"ok": False, "said": f"{MOST_CLIENTS} clients are being answered already; ask again"})
            return
        try:
            threading.Thread(target=self._answer, args=(client,), name="tensortap-client", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down
            self._clients.release()
            client.close()

    def _answer(self, client: socket.socket) -> None:
        try:
            _send(client, self._reply(client))
        finally:
            self._clients.release()

    def _reply(self, client: socket.socket) -> Reply:
        try:
            peer = peer_of(client)
            if peer.uid not in (os.getuid(), 0):
                raise ControlError(f"this run is another user's; {peer.user} may not control it")
            return self._handle(parse(_received(client)), peer)
        except TensortapError as error:
            return {"ok": False, "said": str(error)}
        except Exception as error:  # nothing a client sends may end the thread with a traceback in the user's terminal
            return {"ok": False, "said": f"{type(error).__name__}: {error}"}


def _listening(path: Path) -> socket.socket:
    """Return a socket that listens at a path, for its owner only. Whoever calls holds the rank's lock."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ControlError(f"{path} is not a socket; remove it to control the run")
        path.unlink()  # a process that was killed has left it
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(OSError):
            os.fchmod(made.fileno(), 0o600)  # on Linux the file has this mode from the beginning
        with reachable(path) as short:
            made.bind(short)
        path.chmod(0o600)
        made.listen(MOST_CLIENTS)
    except BaseException:
        made.close()
        raise
    return made


def peer_of(client: socket.socket) -> Peer:
    """Return the client at the other end; if the system does not tell, one with this process's rights."""
    if not hasattr(socket, "SO_PEERCRED"):
        return Peer(0, os.getuid())
    pid, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return Peer(pid, uid)


def _received(client: socket.socket) -> bytes:
    """Return the line that a client sends, in time and not too long."""
    data, until = b"", time.monotonic() + PATIENCE
    while not data.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0:
            raise ControlError(f"a request must come within {PATIENCE:g} seconds")
        client.settimeout(left)
        try:
            part = client.recv(LONGEST)
        except TimeoutError:
            continue
        data += part
        if len(data) > LONGEST:
            raise ControlError(f"a request must have at most {LONGEST} bytes")
        if not part:
            break
    return data


def _send(client: socket.socket, reply: Reply) -> None:
    with contextlib.suppress(OSError), client:
        client.settimeout(PATIENCE)
        client.sendall(json.dumps(reply).encode() + b"\n")
