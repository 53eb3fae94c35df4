"""Ask the ranks of a live run for something: `ask("runs/exp1", ControlRequest(action="pause"))`.

Reads the run folder and talks to the sockets in it; nothing that records is imported.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import socket
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensortap.control.paths import AVAILABLE, SOCKET, reachable
from tensortap.control.requests import LONGEST_WAIT, ControlRequest, checked
from tensortap.errors import ControlError, NotARunError
from tensortap.store.claim import is_locked, read_info
from tensortap.store.files import Files, load_json
from tensortap.store.names import RUN_JSON, rank_folder, rank_of

_CONNECT_SECONDS: Final = 5.0
_LONGEST_ANSWER: Final = 1 << 20
_AHEAD: Final = 3  # steps between now and the first step to act at, so that no rank has passed it
_LOOK_SECONDS: Final = 0.05  # seconds between two readings of the step, which show how fast steps are
_REACH_SECONDS: Final = 0.5  # within which a request reaches all ranks, also of a busy machine
_AT_ONCE: Final = 64  # ranks that are asked at a time


class RankAnswer(NamedTuple):
    """What one rank answered."""

    rank: int
    ok: bool
    said: str
    reply: dict[str, Any]


def ask(path: str | os.PathLike[str], request: ControlRequest, ranks: Sequence[int] = ()) -> list[RankAnswer]:
    """Send a request to every rank of a live run, or to some; return the answers.

    Captures of several ranks begin at one step that all of them still have before them.
    """
    request = checked(request)
    sockets = live_sockets(path, ranks)
    if len(sockets) > 1 and request.action in ("capture", "snapshot") and not request.start:
        request = replace(request, start=_step_ahead(sockets))
    return _ask_all(sockets, request)


def _step_ahead(sockets: dict[int, Path]) -> int:
    """Return a step that no rank will have reached when the request arrives at the last of them."""
    earlier, begin = _latest_step(sockets), time.monotonic()
    time.sleep(_LOOK_SECONDS)
    latest = _latest_step(sockets)
    rate = (latest - earlier) / (time.monotonic() - begin)
    return latest + _AHEAD + math.ceil(rate * _REACH_SECONDS)


def _latest_step(sockets: dict[int, Path]) -> int:
    return max(int(answer.reply.get("step", 0)) for answer in _ask_all(sockets, ControlRequest(action="status")))


def _ask_all(sockets: dict[int, Path], request: ControlRequest) -> list[RankAnswer]:
    """Ask all ranks at once: each answers when its own step ends."""
    with ThreadPoolExecutor(max_workers=min(len(sockets), _AT_ONCE)) as pool:
        return list(pool.map(lambda rank: _ask_rank(rank, sockets[rank], request), sockets))


def live_sockets(path: str | os.PathLike[str], ranks: Sequence[int] = ()) -> dict[int, Path]:
    """Return the socket of every running rank; raise ControlError with the reason if there is none."""
    files = Files(path)
    if not files.exists(RUN_JSON):
        read_info(files)  # raises, and says what is missing
    if files.local is None:
        raise ControlError(f"{files} is not on this machine: control it where it runs, by the folder it writes to")
    if not AVAILABLE:
        raise ControlError("this system has no Unix sockets: control the run where it was started")
    known = sorted(rank for name in files.list() if (rank := rank_of(name)) is not None)
    if missing := [rank for rank in ranks if rank not in known]:
        raise ControlError(f"rank must be one of {known}, got {missing[0]}")
    found = {rank: files.local / rank_folder(rank) for rank in ranks or known}
    live = {rank: folder / SOCKET for rank, folder in found.items() if is_locked(folder)}
    if not live:
        _clear_away(found.values())
        raise ControlError(f"{files} is not live: {_ended(files, found)}. Only a run that is being recorded listens")
    return live


def can_control(path: str | os.PathLike[str]) -> bool:
    """Return whether any rank of a run listens now."""
    try:
        return any(_is_socket(where) for where in live_sockets(path).values())
    except (ControlError, NotARunError, OSError):
        return False


def _ended(files: Files, folders: dict[int, Path]) -> str:
    states = {_state(folder).get("state", "") for folder in folders.values()}
    return "it has finished" if states == {"finished"} else "its process has gone without closing it"


def _clear_away(folders: Any) -> None:
    """Remove the sockets that a killed process has left."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if _is_socket(folder / SOCKET):
                (folder / SOCKET).unlink()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False


def _state(folder: Path) -> dict[str, Any]:
    try:
        said = load_json((folder / "_rank.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _ask_rank(rank: int, where: Path, request: ControlRequest) -> RankAnswer:
    try:
        reply = _exchange(where, request)
    except PermissionError:
        raise ControlError(f"{where} is {_owner(where)}'s socket: only that user may control the run") from None
    except FileNotFoundError:
        why = _state(where.parent).get("control") or "it was started with control=False, or has just begun or ended"
        raise ControlError(f"rank {rank} of {where.parents[1]} is live and does not listen: {why}") from None
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        raise ControlError(f"rank {rank} of {where.parents[1]} does not answer{_elsewhere(where)}") from None
    except TimeoutError:
        raise ControlError(f"rank {rank} of {where.parents[1]} has not answered in time") from None
    return RankAnswer(rank, bool(reply.get("ok")), str(reply.get("said", "")), reply)


def _exchange(where: Path, request: ControlRequest) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_CONNECT_SECONDS)
        with reachable(where) as short:
            asking.connect(short)
        asking.sendall(request.encoded())
        asking.settimeout(min(request.wait, LONGEST_WAIT) + _CONNECT_SECONDS)
        data = b""
        while not data.endswith(b"\n") and len(data) < _LONGEST_ANSWER and (part := asking.recv(1 << 16)):
            data += part
    reply = load_json(data or b"{}")
    if not isinstance(reply, dict) or not reply:
        raise ControlError(f"{where} gave no answer; has the run just ended?")
    return reply


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError, NotImplementedError):
        return "another user"


def _elsewhere(where: Path) -> str:
    """Say where the run is, when it runs on another machine that shares the folder."""
    with contextlib.suppress(OSError, ValueError):
        info = load_json((where.parents[1] / RUN_JSON).read_bytes())
        host = info.get("host") if isinstance(info, dict) else None
        if host and host != platform.node():
            return f": it runs on {host}; a socket is reached on its own machine only"
    return ": its process is just ending, or does not accept connections"
