"""Carry out the requests to a running tap: between two steps, in the thread that trains."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from tensortap.adapters.closing import StepCloser
from tensortap.adapters.named_values import NamedValueRecorder
from tensortap.adapters.protocol import Adapter
from tensortap.control.listener import Listener, Peer, Reply
from tensortap.control.paths import SOCKET
from tensortap.control.probe_changes import ProbeChanges
from tensortap.control.requests import LONGEST_WAIT, ControlRequest
from tensortap.errors import ControlError, TensortapError
from tensortap.record.recorder import Recorder
from tensortap.store.folder import RunFolder
from tensortap.store.names import rank_folder

PROBE_ACTIONS: Final = ("capture", "snapshot", "probe add", "probe remove")
SHARED: Final = "its ranks share statistics (global_stats=True), so its probes cannot change while it runs"
ENDED: Final = "the run ended before a step did"
EVENT: Final = "control"  # the kind of the events that say what was asked


class PendingRequest:
    """A request, who asked, and the answer once there is one."""

    def __init__(self, request: ControlRequest, peer: Peer) -> None:
        self.request = request
        self.peer = peer
        self.reply: Reply = {}
        self._done = threading.Event()

    def answer(self, reply: Reply) -> None:
        """Give the answer to the client that waits."""
        self.reply = reply
        self._done.set()

    def wait(self) -> bool:
        """Wait for the answer as long as the client wants to; return whether it came."""
        return self._done.wait(min(self.request.wait, LONGEST_WAIT))


class TapControl:
    """The requests of clients to one tap. They wait until a step ends; nothing here raises into the training."""

    def __init__(
        self, adapter: Adapter, recorder: Recorder, closer: StepCloser, named_values: NamedValueRecorder
    ) -> None:
        self._adapter = adapter
        self._recorder = recorder
        self._closer = closer
        self._probes = ProbeChanges(adapter, recorder, named_values)
        self._queue: deque[PendingRequest] = deque()
        self._lock = threading.RLock()
        self._closed = False
        self._listener: Listener | None = None
        self._actions: dict[str, Callable[[ControlRequest], str]] = {
            "capture": self._probes.capture, "snapshot": self._probes.snapshot, "probe add": self._probes.add,
            "probe remove": self._probes.remove, "pause": self._pause, "resume": self._resume, "note": _noted,
        }  # fmt: skip

    def listen(self, folder: RunFolder) -> None:
        """Listen in the rank's folder; if that is impossible, the folder says why and the run goes on."""
        if folder.files.local is None:
            return
        try:
            self._listener = Listener(folder.files.local / rank_folder(folder.rank) / SOCKET, self.ask)
        except (OSError, RuntimeError, TensortapError) as error:
            with contextlib.suppress(OSError):
                folder.note(control=f"not listening: {error}")

    def close(self) -> None:
        """Stop listening; clients that still wait are told that the run has ended."""
        self._closed = True
        self._closer.requested = self._adapter.steps.between = None
        if self._listener is not None:
            self._listener.close()
        while self._queue:
            self._queue.popleft().answer({"ok": False, "said": ENDED})

    def ask(self, request: ControlRequest, peer: Peer) -> Reply:
        """Answer a request on the client's thread. All but `status` wait for the end of a step."""
        if request.action == "status":
            return self.status()
        if request.action in PROBE_ACTIONS and self._closer.global_stats_shared:
            raise ControlError(SHARED)
        if self._closed:
            raise ControlError(ENDED)
        pending = PendingRequest(request, peer)
        self._queue.append(pending)
        self._schedule()
        if pending.wait():
            return pending.reply
        step = self._recorder.current.number
        return {"ok": True, "waiting": True, "step": step, "said": f"waits for step {step} to end, and acts then"}

    def still_unseen(self, unseen: dict[str, str]) -> dict[str, str]:
        """Return the sites that were never seen in the whole run: replaced taps do not know of earlier ones."""
        if not self._probes.changed:
            return unseen
        seen = {f"{place.site}:{place.port}" for place in self._recorder.names.places}
        return {site: why for site, why in unseen.items() if site not in seen}

    def status(self) -> Reply:
        """Return the state of the tap."""
        recorder = self._recorder
        state = "paused" if recorder.paused else "recording"
        probes = [
            {"number": i, "sites": list(shown["sites"]), "keep": shown["keep"], "when": shown["when"]}
            for i, each in enumerate(recorder.probes)
            if (shown := each.describe())["sites"]
        ]
        step = recorder.current.number
        return {"ok": True, "said": f"{state}, at step {step}", "state": state, "step": step, "rank": recorder.rank,
                "pid": os.getpid(), "probes": probes}  # fmt: skip

    # In the thread that trains

    def _schedule(self) -> None:
        """Ask to be called at the end of the step, or also when a call is over, where taps cannot change inside one."""
        self._closer.requested = self._at_step_end
        if self._probes.capturing or any(each.request.action in PROBE_ACTIONS for each in list(self._queue)):
            self._adapter.steps.between = self._between_calls

    def _between_calls(self) -> None:
        with self._lock:
            self._run(PROBE_ACTIONS)
            self._end_captures()

    def _end_captures(self) -> None:
        for ended in self._probes.end_captures():
            self._recorder.events.add(EVENT, "capture ended", "", ended)

    def _at_step_end(self) -> None:
        with self._lock:
            changes = self._adapter.changes_in_calls or not self._adapter.steps.busy
            self._run(tuple(self._actions) if changes else ("pause", "resume", "note"))
            if changes:
                self._end_captures()
        if self._queue or self._probes.capturing:
            self._schedule()

    def _run(self, actions: tuple[str, ...]) -> None:
        for pending in list(self._queue):
            if pending.request.action in actions:
                self._queue.remove(pending)
                pending.answer(self._done(pending))

    def _done(self, pending: PendingRequest) -> Reply:
        request, peer, step = pending.request, pending.peer, self._recorder.current.number
        try:
            ok, said = True, self._actions[request.action](request)
        except Exception as error:
            ok, said = False, str(error) if isinstance(error, TensortapError) else f"{type(error).__name__}: {error}"
        about = {"pid": peer.pid, "user": peer.user, "done": ok, "said": said}
        with contextlib.suppress(Exception):  # an event that cannot be written costs the event
            self._recorder.events.add(EVENT, request.action, "", {**request.asked(), **about})
        return {"ok": ok, "said": said, "step": step, "rank": self._recorder.rank}

    def _pause(self, request: ControlRequest) -> str:
        self._recorder.pause()
        return "paused: nothing is recorded from the next step on"

    def _resume(self, request: ControlRequest) -> str:
        self._recorder.resume()
        self._closer.restart_clock()
        return "records again, from the next step on"


def _noted(request: ControlRequest) -> str:
    return "noted"
